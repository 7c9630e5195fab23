#pragma once

#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"

// What is held of every device against ResidualCodec.
namespace kvtrie::gpu {

inline constexpr Quality kCodedQualities[] = {Quality::kHigh, Quality::kNearExact, Quality::kSmall};

// What the processor encodes the device decodes to the same bytes.
inline void ExpectSameDecoded(const Twin& twin, const Blocks& blocks) {
  for (const Quality quality : kCodedQualities) {
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
inline double ErrorOf(const ModelSpec& spec, const Blocks& blocks, const Decoded& decoded) {
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

// The device decides as the processor does, and makes bodies of about the size and error, which
// both decode to the same bytes.
inline void ExpectLikeEncoded(const Twin& twin, const Blocks& blocks) {
  for (const Quality quality : kCodedQualities) {
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
    Decoded by_codec(blocks, *encoded, quality), by_device(blocks, *encoded, quality);
    Decoded from_codec(blocks, *expected, quality);
    ASSERT_TRUE(twin.codec->Decode(by_codec.blocks).ok());
    ASSERT_TRUE(twin.coder->Decode(by_device.blocks).ok());
    ASSERT_TRUE(twin.codec->Decode(from_codec.blocks).ok());
    EXPECT_TRUE(by_codec.raw == by_device.raw);
    const double error = ErrorOf(twin.spec, blocks, by_codec);
    const double expected_error = ErrorOf(twin.spec, blocks, from_codec);
    EXPECT_NEAR(error, expected_error, 0.01 * expected_error);
  }
}

}  // namespace kvtrie::gpu
