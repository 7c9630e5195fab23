#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "storage/codec/host_device_code.h"

// The float steps of RESIDUAL.md for one number: what the processor's kernels
// (storage/codec/raw_kv_kernels.h, residual_kernels.h) do in 16 lanes, bit for bit. C++17, no
// Abseil; compiled without contraction.
namespace kvtrie::gpu {

KV_HOST_DEVICE inline std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
KV_HOST_DEVICE inline float FloatOf(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline constexpr std::uint32_t kFloatSignBit = 0x80000000;
inline constexpr std::uint32_t kFloatInfinityBits = 0x7F800000;

// A float of one or two bytes, as SmallFloat of raw_kv_kernels.h describes it.
template <unsigned kBytes, unsigned kMantissaBits, int kBias, bool kHasInfinity>
struct SmallFloat {
  static constexpr std::uint32_t kSign = kBytes == 1 ? 0x80 : 0x8000;
  static constexpr unsigned kSignShift = kBytes == 1 ? 24 : 16;
  static constexpr unsigned kShift = 23 - kMantissaBits;
  static constexpr std::uint32_t kExponentStep = 1u << kMantissaBits;
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias);
  static constexpr std::uint32_t kInfinity = (kSign - 1) & ~(kExponentStep - 1);
  static constexpr std::uint32_t kMax = kHasInfinity ? kInfinity - 1 : kSign - 2;
  static constexpr std::uint32_t kNan = kHasInfinity ? kInfinity | kExponentStep >> 1 : kSign - 1;
  // 2^(1 - bias - mantissa bits), and its inverse.
  static constexpr std::uint32_t kLeastBits = (kRebias + 1 - kMantissaBits) << 23;
  static constexpr std::uint32_t kInverseLeastBits = (254u << 23) - kLeastBits;

  KV_HOST_DEVICE static float Decode(std::uint32_t code) {
    const std::uint32_t magnitude = code & (kSign - 1);
    std::uint32_t bits = (magnitude << kShift) + (kRebias << 23);
    if (kHasInfinity) {
      if (magnitude >= kInfinity) bits = (magnitude << kShift) | kFloatInfinityBits;
    } else {
      if (magnitude == kNan) bits = kFloatInfinityBits | 1u << 22;
    }
    if (magnitude < kExponentStep) {
      bits = BitsOf(static_cast<float>(magnitude) * FloatOf(kLeastBits));
    }
    return FloatOf(bits | (code & kSign) << kSignShift);
  }

  KV_HOST_DEVICE static std::uint32_t Encode(float value) {
    const std::uint32_t bits = BitsOf(value);
    const std::uint32_t magnitude = bits & (kFloatSignBit - 1);
    // To nearest, a tie to the even code.
    const std::uint32_t rounded =
        magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
    std::uint32_t code = (rounded >> kShift) - kRebias * kExponentStep;
    if (magnitude < (kRebias + 1) << 23) {
      // The sum has no bits below one subnormal step, so the addition itself rounds.
      constexpr std::uint32_t kUnit = (127 + 23) << 23;  // 2^23
      const float steps = FloatOf(magnitude) * FloatOf(kInverseLeastBits);
      code = BitsOf(steps + FloatOf(kUnit)) - kUnit;
    }
    // From twice the largest exponent on, the code has wrapped.
    if (magnitude >= ((kMax >> kMantissaBits) + kRebias + 1) << 23 || code > kMax) code = kMax;
    if (kHasInfinity && magnitude == kFloatInfinityBits) code = kInfinity;
    if (magnitude > kFloatInfinityBits) code = kNan;
    return code | (bits & kFloatSignBit) >> kSignShift;
  }
};

using Float16 = SmallFloat<2, 10, 15, true>;
using Float8E4m3 = SmallFloat<1, 3, 7, false>;
using Float8E5m2 = SmallFloat<1, 2, 15, true>;

struct Bfloat16 {
  KV_HOST_DEVICE static float Decode(std::uint32_t code) { return FloatOf(code << 16); }
  KV_HOST_DEVICE static std::uint32_t Encode(float value) {
    constexpr std::uint32_t kMax = 0x7F7F0000;
    const std::uint32_t bits = BitsOf(value);
    const std::uint32_t magnitude = bits & (kFloatSignBit - 1);
    std::uint32_t rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1);
    if (rounded >= kFloatInfinityBits) rounded = kMax;
    if (magnitude == kFloatInfinityBits) rounded = magnitude;
    // Quiet, so that cutting its bits leaves a NaN.
    if (magnitude > kFloatInfinityBits) rounded = magnitude | 1u << 22;
    return (rounded | (bits & kFloatSignBit)) >> 16;
  }
};

template <int kLeast, int kMost>
struct SmallInteger {
  KV_HOST_DEVICE static float Decode(std::uint32_t code) {
    return static_cast<float>(kLeast < 0 ? static_cast<int>(static_cast<std::int8_t>(code))
                                         : static_cast<int>(code));
  }
  KV_HOST_DEVICE static std::uint32_t Encode(float value) {
    if (!(value == value)) value = 0;
    if (value < static_cast<float>(kLeast)) value = static_cast<float>(kLeast);
    if (value > static_cast<float>(kMost)) value = static_cast<float>(kMost);
    // The sum with 1.5 * 2^23 has no bits below 1, so the addition rounds, a tie to the even one.
    constexpr float kRound = 12582912.0f;
    return static_cast<std::uint32_t>(static_cast<std::int32_t>((value + kRound) - kRound));
  }
};

// Of a raw block; values are those of DType.
enum class NumberType : std::uint8_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kFloat8E4m3 = 4,
  kFloat8E5m2 = 5,
  kInt8 = 6,
  kUint8 = 7,
};

// REQUIRES: `raw` is aligned as the numbers are.
KV_HOST_DEVICE inline float LoadNumber(NumberType type, const std::uint8_t* raw,
                                       std::size_t index) {
  switch (type) {
    case NumberType::kFloat32:
      return reinterpret_cast<const float*>(raw)[index];
    case NumberType::kFloat16:
      return Float16::Decode(reinterpret_cast<const std::uint16_t*>(raw)[index]);
    case NumberType::kBfloat16:
      return Bfloat16::Decode(reinterpret_cast<const std::uint16_t*>(raw)[index]);
    case NumberType::kFloat8E4m3:
      return Float8E4m3::Decode(raw[index]);
    case NumberType::kFloat8E5m2:
      return Float8E5m2::Decode(raw[index]);
    case NumberType::kInt8:
      return SmallInteger<-128, 127>::Decode(raw[index]);
    default:
      return SmallInteger<0, 255>::Decode(raw[index]);
  }
}

KV_HOST_DEVICE inline void StoreNumber(NumberType type, float value, std::uint8_t* raw,
                                       std::size_t index) {
  switch (type) {
    case NumberType::kFloat32:
      reinterpret_cast<float*>(raw)[index] = value;
      break;
    case NumberType::kFloat16:
      reinterpret_cast<std::uint16_t*>(raw)[index] =
          static_cast<std::uint16_t>(Float16::Encode(value));
      break;
    case NumberType::kBfloat16:
      reinterpret_cast<std::uint16_t*>(raw)[index] =
          static_cast<std::uint16_t>(Bfloat16::Encode(value));
      break;
    case NumberType::kFloat8E4m3:
      raw[index] = static_cast<std::uint8_t>(Float8E4m3::Encode(value));
      break;
    case NumberType::kFloat8E5m2:
      raw[index] = static_cast<std::uint8_t>(Float8E5m2::Encode(value));
      break;
    case NumberType::kInt8:
      raw[index] = static_cast<std::uint8_t>(SmallInteger<-128, 127>::Encode(value));
      break;
    default:
      raw[index] = static_cast<std::uint8_t>(SmallInteger<0, 255>::Encode(value));
      break;
  }
}

// What later planes read of a restored component: RESIDUAL.md's code less 128, -127 to 127.
KV_HOST_DEVICE inline std::int8_t CodeOfRow(float x, float bias, float inverse_scale) {
  // Added, it leaves no room for a fraction: the integer is in the low bits.
  constexpr float kRounding = 12582912.0f;
  float scaled = (x - bias) * inverse_scale;
  scaled = scaled > -127.0f ? scaled : -127.0f;  // NaN too
  scaled = scaled < 127.0f ? scaled : 127.0f;
  const std::uint32_t code = BitsOf((scaled + 128.0f) + kRounding) & 0xFF;
  return static_cast<std::int8_t>(static_cast<int>(code) - 128);
}

// A component as the planes below predict it. `product` is of codes less 128, and `sum` 128 times
// the sum of its weights: together the product that the format means, in exact integers.
KV_HOST_DEVICE inline float RowOfProduct(std::int32_t product, std::int32_t sum, float offset,
                                         float scale) {
  return offset + scale * static_cast<float>(product + sum);
}

// One of a pair of dimensions, turned: `x` with its partner, the other of the pair. `direction` is
// -1 to turn as RoPE does, 1 to undo it.
KV_HOST_DEVICE inline float TurnedComponent(float x, float partner, bool is_first, float cosine,
                                            float sine, float direction) {
  const float directed = sine * direction;
  return is_first ? x * cosine + partner * directed : x * cosine - partner * directed;
}

// Which component of a head is the other of the pair, and which pair it is.
struct PairOfDimension {
  std::uint32_t partner = 0;
  std::uint32_t pair = 0;
  bool is_first = false;
};
// REQUIRES: dim < 2 * pairs.
KV_HOST_DEVICE inline PairOfDimension PairOf(std::uint32_t dim, std::uint32_t pairs,
                                             bool interleaved) {
  PairOfDimension of;
  if (interleaved) {
    of.is_first = dim % 2 == 0;
    of.pair = dim / 2;
    of.partner = of.is_first ? dim + 1 : dim - 1;
  } else {
    of.is_first = dim < pairs;
    of.pair = of.is_first ? dim : dim - pairs;
    of.partner = of.is_first ? dim + pairs : dim - pairs;
  }
  return of;
}

}  // namespace kvtrie::gpu
