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

// Mean squared distance of decoded numbers from the original ones, K after RoPE.
double ErrorOf(const ModelSpec& spec, const Blocks& blocks, const Decoded& decoded) {
  double sum = 0;
  std::size_t count = 0;
  for (std::size_t b = 0; b < decoded.raw.size(); ++b) {
    const auto original = ValuesOf(spec, blocks.raw[b]);
    const auto restored = ValuesOf(spec, decoded.raw[b]);
    for (std::size_t p = 0; p < original.size(); ++p) {
      for (std::size_t i = 0; i < original[p].size(); ++i) {
        const double difference = double{original[p][i]} - restored[p][i];
        sum += difference * difference;
        ++count;
      }
    }
  }
  return sum / static_cast<double>(count);
}

TEST_P(ShapeTest, EncodesAsTheProcessorDoes) {
  const Shape shape = RandomShape(static_cast<std::uint64_t>(GetParam()));
  SCOPED_TRACE(shape.Text());
  const ResidualProfile profile = RandomProfile(shape, static_cast<std::uint64_t>(GetParam()));
  const Twin twin(shape, profile);
  const Blocks blocks = RandomBlocks(shape, profile, 5, 78);
  for (const Quality quality : {Quality::kHigh, Quality::kNearExact, Quality::kSmall}) {
    const auto expected = twin.codec->Encode(blocks.to_encode, quality);
    const auto encoded = twin.coder->Encode(blocks.to_encode, quality);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    ASSERT_EQ(encoded->size(), expected->size());
    std::size_t bytes = 0, expected_bytes = 0;
    for (std::size_t b = 0; b < encoded->size(); ++b) {
      EXPECT_EQ((*encoded)[b].exact_tokens, (*expected)[b].exact_tokens);
      EXPECT_EQ((*encoded)[b].body.empty(), (*expected)[b].body.empty());
      EXPECT_EQ((*encoded)[b].section_bytes.size(), (*expected)[b].section_bytes.size());
      bytes += (*encoded)[b].body.size();
      expected_bytes += (*expected)[b].body.size();
    }
    EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(expected_bytes),
                0.005 * static_cast<double>(expected_bytes));
    Decoded by_codec(blocks, *encoded, quality), by_twin(blocks, *encoded, quality);
    Decoded from_codec(blocks, *expected, quality);
    ASSERT_TRUE(twin.codec->Decode(by_codec.blocks).ok());
    ASSERT_TRUE(twin.coder->Decode(by_twin.blocks).ok());
    ASSERT_TRUE(twin.codec->Decode(from_codec.blocks).ok());
    EXPECT_TRUE(by_codec.raw == by_twin.raw);
    const double error = ErrorOf(twin.spec, blocks, by_codec);
    const double expected_error = ErrorOf(twin.spec, blocks, from_codec);
    EXPECT_NEAR(error, expected_error, 0.01 * expected_error);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShapeTest, testing::Range(0, 56));

}  // namespace
}  // namespace kvtrie::gpu
