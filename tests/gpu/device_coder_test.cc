#include "gpu/device_coder.h"

#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"

namespace kvtrie::gpu {
namespace {

class ShapeTest : public testing::TestWithParam<int> {};

TEST_P(ShapeTest, DecodesToTheBytesOfTheProcessor) {
  const Shape shape = RandomShape(static_cast<std::uint64_t>(GetParam()));
  SCOPED_TRACE(shape.Text());
  const ResidualProfile profile = RandomProfile(shape, static_cast<std::uint64_t>(GetParam()));
  const Twin twin(shape, profile);
  const Blocks blocks = RandomBlocks(shape, profile, 5, 77);
  for (const Quality quality : {Quality::kHigh, Quality::kNearExact, Quality::kSmall}) {
    const auto encoded = twin.codec->Encode(blocks.to_encode, quality);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    Decoded expected(blocks, *encoded, quality), decoded(blocks, *encoded, quality);
    EXPECT_GE(expected.blocks.size(), 3u);
    ASSERT_TRUE(twin.codec->Decode(expected.blocks).ok());
    const absl::Status status = twin.coder->Decode(decoded.blocks);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(decoded.raw == expected.raw);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShapeTest, testing::Range(0, 56));

}  // namespace
}  // namespace kvtrie::gpu
