#include "client/load_plan.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

v1::BlockRun RunOf(std::uint32_t first, std::uint32_t count, CodecId codec, std::uint64_t bytes,
                   double read_seconds = 0, double decode_seconds = 0) {
  v1::BlockRun run;
  run.set_first_block(first);
  run.set_block_count(count);
  run.set_codec(static_cast<v1::FrameCodec>(codec));
  run.set_bytes(bytes);
  run.set_memory_bytes(read_seconds > 0 ? 0 : bytes);
  run.set_read_seconds(read_seconds);
  run.set_decode_seconds(decode_seconds);
  return run;
}

LoadPlan Plan(const std::vector<v1::BlockRun>& runs, const PlannedPrompt& prompt,
              const LoadCost& load, const PrefillCost& prefill) {
  std::vector<const v1::BlockRun*> pointers;
  for (const v1::BlockRun& run : runs) pointers.push_back(&run);
  return PlanLoad(pointers, prompt, load, prefill);
}

constexpr PlannedPrompt kPrompt{.tokens = 1000, .block_tokens = 10, .raw_block_bytes = 1000};

TEST(LoadPlanTest, WithNothingMeasuredAllIsLoaded) {
  const std::vector<v1::BlockRun> runs = {RunOf(0, 5, CodecId::kRaw, 5000, 100),
                                          RunOf(5, 3, CodecId::kResidual, 300, 100, 100)};
  EXPECT_EQ(Plan(runs, kPrompt, {}, {}).load_blocks, 8u);
  EXPECT_EQ(Plan({}, kPrompt, {}, {}).load_blocks, 0u);
}

TEST(LoadPlanTest, PrefillIsTheSumOverItsTokens) {
  const PrefillCost cost{0.25, 0.001};
  double sum = 0;
  for (int i = 0; i < 500; ++i) sum += 0.25 + 0.001 * (300 + i + 0.5);
  EXPECT_NEAR(cost.Seconds(500, 300), sum, 1e-9);
  EXPECT_EQ(cost.Seconds(0, 300), 0);
}

TEST(LoadPlanTest, LoadsUpToWhereLoadingCostsMoreThanComputing) {
  // 10 ms to compute a block; a block in memory takes 1 ms to come, one on the disk 50 ms to be
  // read.
  const PrefillCost prefill{0.001, 0};
  const LoadCost load{.seconds_per_byte = 1e-6};
  const std::vector<v1::BlockRun> runs = {RunOf(0, 20, CodecId::kRaw, 20 * 1000),
                                          RunOf(20, 30, CodecId::kRaw, 30 * 1000, 30 * 0.050)};
  const LoadPlan plan = Plan(runs, kPrompt, load, prefill);
  EXPECT_EQ(plan.load_blocks, 20u);
  EXPECT_NEAR(plan.load_seconds, 0.020, 1e-12);
  EXPECT_NEAR(plan.prefill_seconds, 0.800, 1e-12);
  // The same disk before much that is in memory is worth waiting for.
  const std::vector<v1::BlockRun> behind = {RunOf(0, 2, CodecId::kRaw, 2000, 0.1),
                                            RunOf(2, 98, CodecId::kRaw, 98'000)};
  EXPECT_EQ(Plan(behind, kPrompt, load, prefill).load_blocks, 100u);
}

TEST(LoadPlanTest, WhoDecodesDecidesWhatTravelsAndWhoseTimeItIs) {
  const PrefillCost prefill{1, 0};
  const std::vector<v1::BlockRun> coded = {RunOf(0, 10, CodecId::kResidual, 100, 3, 7)};
  LoadCost load{.seconds_per_byte = 0.001};
  load.DecodeSecondsPerToken(CodecId::kResidual) = 0.5;
  EXPECT_NEAR(Plan(coded, kPrompt, load, prefill).load_seconds, 100 * 0.001 + 100 * 0.5, 1e-9);
  load.server_decodes = true;
  EXPECT_NEAR(Plan(coded, kPrompt, load, prefill).load_seconds, 10.0, 1e-9);  // 3 + 7, and 10 bytes
  load.seconds_per_byte = 0.002;
  EXPECT_NEAR(Plan(coded, kPrompt, load, prefill).load_seconds, 20.0, 1e-9);
  // What was coded against others may be the server's to decode, the rest not.
  load.server_decodes = false;
  load.server_decodes_members = true;
  const std::vector<v1::BlockRun> referenced = {RunOf(0, 10, CodecId::kReferenced, 100, 3, 37)};
  EXPECT_NEAR(Plan(referenced, kPrompt, load, prefill).load_seconds, 40.0, 1e-9);
  EXPECT_NEAR(Plan(coded, kPrompt, load, prefill).load_seconds, 100 * 0.002 + 100 * 0.5, 1e-9);
  load.server_decodes_members = false;
  load.DecodeSecondsPerToken(CodecId::kReferenced) = 0.25;
  EXPECT_NEAR(Plan(referenced, kPrompt, load, prefill).load_seconds, 100 * 0.002 + 100 * 0.25,
              1e-9);
}

TEST(LoadPlanTest, IsTheBestOfAllThatCouldBe) {
  std::mt19937 random(1);
  const auto draw = [&](double most) { return most * static_cast<double>(random() % 1001) / 1000; };
  int between = 0;
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    std::vector<v1::BlockRun> runs;
    struct Block {
      CodecId codec;
      double bytes, read, decode;
    };
    std::vector<Block> blocks;
    const std::size_t run_count = random() % 5;
    for (std::size_t r = 0; r < run_count; ++r) {
      const auto count = static_cast<std::uint32_t>(1 + random() % 8);
      const Block block{kAllCodecs[random() % std::size(kAllCodecs)],
                        static_cast<double>(1 + random() % 1000),
                        random() % 2 == 0 ? 0 : draw(0.02), draw(0.02)};
      runs.push_back(RunOf(static_cast<std::uint32_t>(blocks.size()), count, block.codec,
                           static_cast<std::uint64_t>(block.bytes) * count, block.read * count,
                           block.decode * count));
      blocks.insert(blocks.end(), count, block);
    }
    const PlannedPrompt prompt{
        .tokens = blocks.size() * 10 + random() % 100, .block_tokens = 10, .raw_block_bytes = 1000};
    LoadCost load{.seconds_per_byte = draw(3e-5),
                  .server_decodes = random() % 2 == 0,
                  .server_decodes_members = random() % 2 == 0};
    for (const CodecId codec : kAllCodecs) load.DecodeSecondsPerToken(codec) = draw(0.002);
    const PrefillCost prefill{draw(0.002), draw(2e-5)};
    if (!prefill.is_known()) continue;

    double best = 0;
    std::size_t best_count = 0;
    for (std::size_t n = 0; n <= blocks.size(); ++n) {
      double server = 0, client = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const Block& block = blocks[i];
        const bool raw = block.codec == CodecId::kRaw;
        const bool by_server =
            !raw && (load.server_decodes ||
                     (block.codec == CodecId::kReferenced && load.server_decodes_members));
        server += block.read + (by_server ? block.decode : 0);
        client += load.seconds_per_byte * (by_server ? 1000 : block.bytes);
        if (!raw && !by_server) client += 10 * load.DecodeSecondsPerToken(block.codec);
      }
      double total = std::max(server, client);
      for (std::uint64_t token = n * 10; token < prompt.tokens; ++token) {
        total += prefill.seconds_per_token +
                 prefill.seconds_per_token_pair * (static_cast<double>(token) + 0.5);
      }
      if (n > 0 && total > best) continue;
      best = total;
      best_count = n;
    }
    const LoadPlan plan = Plan(runs, prompt, load, prefill);
    EXPECT_NEAR(plan.load_seconds + plan.prefill_seconds, best, 1e-9);
    if (plan.load_blocks != 0 && plan.load_blocks != blocks.size()) ++between;
    if (plan.load_blocks == best_count) continue;
    // Rounding decides between equal ones.
    EXPECT_NEAR(plan.load_seconds + plan.prefill_seconds, best, 1e-12);
  }
  EXPECT_GT(between, 100);
}

}  // namespace
}  // namespace kvtrie
