#include "client/ctl/bench_workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kvtrie {
namespace {

TEST(BenchModelTest, RawBlockHasExactlyTheSizeThatIsAskedFor) {
  for (const std::uint64_t bytes : {32ull, 1024ull, 48ull << 10, 64ull << 10, 256ull << 10,
                                    1ull << 20, 3ull << 20, 8ull << 20, 64ull << 20}) {
    const auto spec = BenchModel(bytes);
    ASSERT_TRUE(spec.ok()) << bytes << " " << spec.status();
    EXPECT_EQ(KvGeometry(*spec).raw_block_bytes(), bytes);
    EXPECT_EQ(spec->block_tokens, kBenchBlockTokens);
  }
}

TEST(BenchModelTest, ImpossibleSizesAreRefused) {
  for (const std::uint64_t bytes : {0ull, 17ull, 100ull, 128ull << 20}) {
    EXPECT_FALSE(BenchModel(bytes).ok()) << bytes;
  }
}

TEST(BenchTokensTest, FollowFromSeedAndSession) {
  EXPECT_EQ(BenchTokens(1, 2, 3), BenchTokens(1, 2, 3));
  EXPECT_NE(BenchTokens(1, 2, 3), BenchTokens(2, 2, 3));
  EXPECT_NE(BenchTokens(1, 2, 3), BenchTokens(1, 3, 3));
  // A longer path begins with the shorter one.
  const auto path = BenchTokens(1, 2, 3);
  const auto longer = BenchTokens(1, 2, 5);
  EXPECT_TRUE(std::equal(path.begin(), path.end(), longer.begin()));
}

TEST(StampTest, TellsBlocksApart) {
  std::vector<std::byte> block(32);
  FillIncompressible(block, 1);
  StampBlock(block, 7, 3);
  EXPECT_TRUE(HasStamp(block, 7, 3));
  EXPECT_FALSE(HasStamp(block, 7, 4));
  EXPECT_FALSE(HasStamp(block, 8, 3));
  block.back() ^= std::byte{1};
  EXPECT_FALSE(HasStamp(block, 7, 3));
}

}  // namespace
}  // namespace kvtrie
