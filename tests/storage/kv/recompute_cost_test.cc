#include "storage/kv/recompute_cost.h"

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

ModelSpec SpecOf(std::uint32_t layers, std::uint32_t kv_heads, std::uint32_t head_dim,
                 std::uint32_t window_tokens = 0) {
  ModelSpec spec;
  spec.block_tokens = 16;
  spec.kv_groups = {
      {.layer_runs = {{layers, kv_heads, head_dim, head_dim}}, .window_tokens = window_tokens}};
  return spec;
}

TEST(RecomputeCostTest, IsThatOfWeightsAndOfAttentionToWhatStandsBefore) {
  // Width 4 x 8 x 128 = 4,096; the middle of block 3 is token 40.
  const RecomputeCost cost(SpecOf(32, 8, 128));
  const double weights = 32.0 * 2 * 12 * 4096 * 4096;
  const double attention = 32.0 * 4 * 4096 * 40;
  EXPECT_DOUBLE_EQ(cost.BlockFlops(3), 16 * (weights + attention));
  // 8 billion weights, at two operations each, is what such a model has, within a factor of two.
  EXPECT_NEAR(cost.BlockFlops(1) / 16, 2 * 8e9, 8e9);
}

TEST(RecomputeCostTest, GrowsWithDepthUnlessAWindowEndsIt) {
  const RecomputeCost full(SpecOf(4, 4, 64));
  const RecomputeCost window(SpecOf(4, 4, 64, 1024));
  EXPECT_GT(full.BlockFlops(1000), 2 * full.BlockFlops(1));
  EXPECT_DOUBLE_EQ(window.BlockFlops(10), full.BlockFlops(10));
  EXPECT_DOUBLE_EQ(window.BlockFlops(1000), window.BlockFlops(65));
  EXPECT_LT(window.BlockFlops(1000), full.BlockFlops(1000));
}

TEST(RecomputeCostTest, ARankOfASplitModelCostsWhatTheModelsWidthSays) {
  ModelSpec rank = SpecOf(32, 2, 128);
  rank.tensor_parallel_size = 4;
  EXPECT_DOUBLE_EQ(RecomputeCost(rank).BlockFlops(7),
                   RecomputeCost(SpecOf(32, 8, 128)).BlockFlops(7));
}

TEST(RecomputeCostTest, GroupsOfAHybridModelAddUp) {
  ModelSpec hybrid = SpecOf(8, 8, 128, 512);
  hybrid.kv_groups.push_back(SpecOf(24, 8, 128).kv_groups.front());
  const double sum = RecomputeCost(SpecOf(8, 8, 128, 512)).BlockFlops(500) +
                     RecomputeCost(SpecOf(24, 8, 128)).BlockFlops(500);
  EXPECT_DOUBLE_EQ(RecomputeCost(hybrid).BlockFlops(500), sum);
}

}  // namespace
}  // namespace kvtrie
