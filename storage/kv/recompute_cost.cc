#include "storage/kv/recompute_cost.h"

#include <algorithm>

namespace kvtrie {
namespace {

constexpr double kQueriesPerKvHead = 4;
constexpr double kWidthMin = 1024;
constexpr double kWeightsPerSquaredWidth = 12;

}  // namespace

RecomputeCost::RecomputeCost(const ModelSpec& spec) : block_tokens_(spec.block_tokens) {
  for (const KvGroup& group : spec.kv_groups) {
    Span span{0, static_cast<double>(group.window_tokens)};
    for (const LayerRun& run : group.layer_runs) {
      const double width = std::max(
          kWidthMin, kQueriesPerKvHead * run.kv_heads * run.k_head_dim * spec.tensor_parallel_size);
      weight_flops_ += run.layer_count * 2 * kWeightsPerSquaredWidth * width * width;
      span.attention_flops += run.layer_count * 4 * width;
    }
    spans_.push_back(span);
  }
}

double RecomputeCost::BlockFlops(std::uint32_t depth) const {
  const double middle_token = (depth - 0.5) * block_tokens_;
  double flops = weight_flops_;
  for (const Span& span : spans_) {
    const double seen =
        span.window_tokens == 0 ? middle_token : std::min(middle_token, span.window_tokens);
    flops += span.attention_flops * seen;
  }
  return flops * block_tokens_;
}

}  // namespace kvtrie
