#include "client/load_plan.h"

#include <algorithm>

namespace kvtrie {
namespace {

// Of one block of a run.
struct BlockCost {
  double server_seconds = 0;
  double client_seconds = 0;
};

BlockCost CostOf(const v1::BlockRun& run, const PlannedPrompt& prompt, const LoadCost& load) {
  const auto codec = static_cast<CodecId>(run.codec());
  const bool is_sent_raw =
      codec != CodecId::kRaw &&
      (load.server_decodes || (codec == CodecId::kReferenced && load.server_decodes_members));
  const double blocks = run.block_count();
  const double bytes = is_sent_raw ? static_cast<double>(prompt.raw_block_bytes)
                                   : static_cast<double>(run.bytes()) / blocks;
  BlockCost cost;
  cost.server_seconds = (run.read_seconds() + (is_sent_raw ? run.decode_seconds() : 0)) / blocks;
  cost.client_seconds = bytes * load.seconds_per_byte;
  if (!is_sent_raw && codec != CodecId::kRaw) {
    cost.client_seconds +=
        prompt.block_tokens * load.decode_seconds_per_token[static_cast<std::size_t>(codec) - 1];
  }
  return cost;
}

}  // namespace

double PrefillCost::Seconds(std::uint64_t tokens, std::uint64_t context_tokens) const {
  const auto count = static_cast<double>(tokens);
  const double seen = static_cast<double>(context_tokens) + count / 2;
  return count * (seconds_per_token + seen * seconds_per_token_pair);
}

LoadPlan PlanLoad(std::span<const v1::BlockRun* const> runs, const PlannedPrompt& prompt,
                  const LoadCost& load, const PrefillCost& prefill) {
  const auto with = [&](std::uint32_t blocks, const BlockCost& loaded) {
    const std::uint64_t context =
        std::min(prompt.tokens, std::uint64_t{blocks} * prompt.block_tokens);
    return LoadPlan{blocks, std::max(loaded.server_seconds, loaded.client_seconds),
                    prefill.Seconds(prompt.tokens - context, context)};
  };
  const auto seconds = [](const LoadPlan& plan) {
    return plan.load_seconds + plan.prefill_seconds;
  };
  BlockCost loaded;
  std::uint32_t blocks = 0;
  LoadPlan best = with(0, loaded);
  for (const v1::BlockRun* run : runs) {
    const BlockCost block = CostOf(*run, prompt, load);
    for (std::uint32_t i = 0; i < run->block_count(); ++i) {
      loaded.server_seconds += block.server_seconds;
      loaded.client_seconds += block.client_seconds;
      const LoadPlan plan = with(++blocks, loaded);
      if (!prefill.is_known() || seconds(plan) <= seconds(best)) best = plan;
    }
  }
  return best;
}

}  // namespace kvtrie
