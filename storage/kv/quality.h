#pragma once

#include <compare>
#include <cstdint>

namespace kvtrie {

// Stored and sent; values equal those of the protos. Zero is never valid.

// What a block is stored as.
enum class Rung : std::uint8_t { kTokens = 1, kCoded = 2, kExact = 3 };

// What a block's KV costs the model's output: a bound on the mean KL divergence to the uncompressed
// cache. Numbers are names here: their order is not the order of quality.
enum class Quality : std::uint8_t {
  kHigh = 1,       // at most 0.01 nat
  kNearExact = 2,  // at most 0.001 nat
  kExact = 3,      // bit for bit
  kSmall = 4,      // at most 0.05 nat
  kUnrated = 5,    // lossy, without a measured bound
};

// Compare with IsAtLeast.
bool operator<(Quality, Quality) = delete;
bool operator<=(Quality, Quality) = delete;
bool operator>(Quality, Quality) = delete;
bool operator>=(Quality, Quality) = delete;
std::strong_ordering operator<=>(Quality, Quality) = delete;

inline constexpr Quality kAllQualities[] = {Quality::kUnrated, Quality::kSmall, Quality::kHigh,
                                            Quality::kNearExact, Quality::kExact};

// Greater is better, from 1 on; 0: not a quality.
constexpr int QualityRank(Quality quality) {
  switch (quality) {
    case Quality::kUnrated:
      return 1;
    case Quality::kSmall:
      return 2;
    case Quality::kHigh:
      return 3;
    case Quality::kNearExact:
      return 4;
    case Quality::kExact:
      return 5;
  }
  return 0;
}

constexpr bool IsQuality(Quality quality) { return QualityRank(quality) != 0; }
constexpr bool IsAtLeast(Quality quality, Quality wanted) {
  return QualityRank(quality) >= QualityRank(wanted);
}
constexpr Quality LowerOf(Quality a, Quality b) { return IsAtLeast(a, b) ? b : a; }

// The bound that the level promises, in nats; 0 for exact. REQUIRES: not unrated.
constexpr double MeanKlMax(Quality quality) {
  switch (quality) {
    case Quality::kNearExact:
      return 0.001;
    case Quality::kHigh:
      return 0.01;
    case Quality::kSmall:
      return 0.05;
    default:
      return 0;
  }
}

// How a frame's body is made (storage/codec/FORMAT.md).
enum class CodecId : std::uint16_t {
  kRaw = 1,         // the KV itself
  kLossless = 2,    // the KV, packed
  kResidual = 3,    // what a profile's predictions leave, quantized
  kRotated = 4,     // quantized without a profile
  kReferenced = 5,  // as residual, of some tokens the difference to the same text's KV elsewhere
};
inline constexpr CodecId kAllCodecs[] = {CodecId::kRaw, CodecId::kLossless, CodecId::kResidual,
                                         CodecId::kRotated, CodecId::kReferenced};

constexpr bool IsCodec(CodecId codec) {
  return codec >= CodecId::kRaw && codec <= CodecId::kReferenced;
}

// The rung that frames of a codec are on.
constexpr Rung RungOf(CodecId codec) {
  return codec == CodecId::kRaw || codec == CodecId::kLossless ? Rung::kExact : Rung::kCoded;
}

inline constexpr std::uint8_t RungBit(Rung rung) {
  return static_cast<std::uint8_t>(1u << static_cast<unsigned>(rung));
}

}  // namespace kvtrie
