#pragma once

// Loops of raw_kv.cc, for codec_kernels_impl.h.
#include "storage/codec/lanes.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

constexpr std::uint32_t kFloatSign = 0x80000000;
constexpr std::uint32_t kFloatInfinity = 0x7F800000;

// A float of one or two bytes: sign, exponent, and kMantissaBits below. Where it has infinity, that
// and NaN take the last exponent, as in IEEE 754; where not, one code is NaN (e4m3).
template <unsigned kBytes, unsigned kMantissaBits, int kBias, bool kHasInfinity>
struct SmallFloat {
  static constexpr std::uint32_t kSign = kBytes == 1 ? 0x80 : 0x8000;
  static constexpr unsigned kShift = 23 - kMantissaBits;
  static constexpr std::uint32_t kExponentStep = 1u << kMantissaBits;
  static constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias);
  // Codes without sign.
  static constexpr std::uint32_t kInfinity = (kSign - 1) & ~(kExponentStep - 1);
  static constexpr std::uint32_t kMax = kHasInfinity ? kInfinity - 1 : kSign - 2;
  static constexpr std::uint32_t kNan = kHasInfinity ? kInfinity | kExponentStep >> 1 : kSign - 1;

  // What the least subnormal is worth: 2^(1 - bias - mantissa bits).
  static KV_LANES_INLINE F32x16 LeastSubnormal() {
    return BitCast<float>(U32x16((kRebias + 1 - kMantissaBits) << 23));
  }

  static KV_LANES_INLINE F32x16 Decode(U32x16 code) {
    const U32x16 magnitude = code & (kSign - 1);
    U32x16 bits = (magnitude << kShift) + (kRebias << 23);
    if constexpr (kHasInfinity) {
      bits = SelectLess(magnitude, U32x16(kInfinity), bits, (magnitude << kShift) | kFloatInfinity);
    } else {
      bits = SelectEqual(magnitude, U32x16(kNan), U32x16(kFloatInfinity | 1u << 22), bits);
    }
    const F32x16 subnormal = Convert<float>(BitCast<std::int32_t>(magnitude)) * LeastSubnormal();
    bits = SelectLess(magnitude, U32x16(kExponentStep), BitCast<std::uint32_t>(subnormal), bits);
    return BitCast<float>(bits | (code & kSign) << (kBytes == 1 ? 24 : 16));
  }

  static KV_LANES_INLINE U32x16 Encode(F32x16 value) {
    const U32x16 bits = BitCast<std::uint32_t>(value);
    const U32x16 magnitude = bits & (kFloatSign - 1);
    // To nearest, a tie to the even code. What is rounded up may take the next exponent.
    const U32x16 rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
    U32x16 code = (rounded >> kShift) - kRebias * kExponentStep;
    // The sum has no bits below one subnormal step, so the addition itself rounds.
    constexpr std::uint32_t kUnit = (127 + 23) << 23;  // 2^23
    const F32x16 steps = BitCast<float>(magnitude) * (F32x16(1.0f) / LeastSubnormal());
    const U32x16 subnormal = BitCast<std::uint32_t>(steps + BitCast<float>(U32x16(kUnit))) - kUnit;
    code = SelectLess(magnitude, U32x16((kRebias + 1) << 23), subnormal, code);
    // From twice the largest exponent on, the code has wrapped.
    code = SelectLess(magnitude, U32x16(((kMax >> kMantissaBits) + kRebias + 1) << 23), code,
                      U32x16(kMax));
    code = SelectLess(code, U32x16(kMax), code, U32x16(kMax));
    if constexpr (kHasInfinity) {
      code = SelectEqual(magnitude, U32x16(kFloatInfinity), U32x16(kInfinity), code);
    }
    code = SelectLess(U32x16(kFloatInfinity), magnitude, U32x16(kNan), code);
    return code | (bits & kFloatSign) >> (kBytes == 1 ? 24 : 16);
  }
};

using Float16 = SmallFloat<2, 10, 15, true>;
using Float8E4m3 = SmallFloat<1, 3, 7, false>;
using Float8E5m2 = SmallFloat<1, 2, 15, true>;

struct Bfloat16 {
  static KV_LANES_INLINE F32x16 Decode(U32x16 code) { return BitCast<float>(code << 16); }
  static KV_LANES_INLINE U32x16 Encode(F32x16 value) {
    constexpr std::uint32_t kMax = 0x7F7F0000;
    const U32x16 bits = BitCast<std::uint32_t>(value);
    const U32x16 magnitude = bits & (kFloatSign - 1);
    U32x16 rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1);
    rounded = SelectLess(rounded, U32x16(kFloatInfinity), rounded, U32x16(kMax));
    // Infinity as it is; NaN quiet, so that cutting its bits leaves one.
    rounded = SelectEqual(magnitude, U32x16(kFloatInfinity), magnitude, rounded);
    rounded = SelectLess(U32x16(kFloatInfinity), magnitude, magnitude | 1u << 22, rounded);
    return (rounded | (bits & kFloatSign)) >> 16;
  }
};

template <int kLeast, int kMost>
struct SmallInteger {
  static KV_LANES_INLINE F32x16 Decode(U32x16 code) {
    auto value = BitCast<std::int32_t>(code);
    if (kLeast < 0) value = (value << 24) >> 24;
    return Convert<float>(value);
  }
  static KV_LANES_INLINE U32x16 Encode(F32x16 value) {
    value = SelectEqual(value, value, value, F32x16(0.0f));
    value = SelectLess(value, F32x16(kLeast), F32x16(kLeast), value);
    value = SelectLess(F32x16(kMost), value, F32x16(kMost), value);
    // 1.5 * 2^23: the sum has no bits below 1, so the addition rounds, a tie to the even one.
    constexpr float kRound = 12582912.0f;
    return BitCast<std::uint32_t>(Convert<std::int32_t>((value + F32x16(kRound)) - F32x16(kRound)));
  }
};
using Int8 = SmallInteger<-128, 127>;
using Uint8 = SmallInteger<0, 255>;

void LoadFloat32(const std::uint8_t* raw, std::size_t count, float* values) {
  if (count > 0) __builtin_memcpy(values, raw, count * sizeof(float));
}
void StoreFloat32(const float* values, std::size_t count, std::uint8_t* raw) {
  if (count > 0) __builtin_memcpy(raw, values, count * sizeof(float));
}

template <typename Type>
void LoadTwoBytes(const std::uint8_t* raw, std::size_t count, float* values) {
  std::size_t at = 0;
  for (; count - at >= kLanes; at += kLanes)
    Store(Type::Decode(LoadU16(raw + 2 * at)), values + at);
  if (at == count) return;
  std::uint16_t codes[kLanes] = {};
  __builtin_memcpy(codes, raw + 2 * at, 2 * (count - at));
  StoreFirst(Type::Decode(LoadU16(codes)), values + at, count - at);
}
template <typename Type>
void StoreTwoBytes(const float* values, std::size_t count, std::uint8_t* raw) {
  std::size_t at = 0;
  for (; count - at >= kLanes; at += kLanes)
    StoreU16(Type::Encode(Load(values + at)), raw + 2 * at);
  if (at == count) return;
  std::uint16_t codes[kLanes];
  StoreU16(Type::Encode(LoadFirst(values + at, count - at)), codes);
  __builtin_memcpy(raw + 2 * at, codes, 2 * (count - at));
}

template <typename Type>
void LoadOneByte(const std::uint8_t* raw, std::size_t count, float* values) {
  std::size_t at = 0;
  for (; count - at >= kLanes; at += kLanes) Store(Type::Decode(LoadU8(raw + at)), values + at);
  if (at == count) return;
  std::uint8_t codes[kLanes] = {};
  __builtin_memcpy(codes, raw + at, count - at);
  StoreFirst(Type::Decode(LoadU8(codes)), values + at, count - at);
}
template <typename Type>
void StoreOneByte(const float* values, std::size_t count, std::uint8_t* raw) {
  std::size_t at = 0;
  for (; count - at >= kLanes; at += kLanes) StoreU8(Type::Encode(Load(values + at)), raw + at);
  if (at == count) return;
  std::uint8_t codes[kLanes];
  StoreU8(Type::Encode(LoadFirst(values + at, count - at)), codes);
  __builtin_memcpy(raw + at, codes, count - at);
}

// Turns dimensions i and i + pair_count of each head by the angle whose cosine is angles[i] of the
// token and whose sine is `direction` times the pair_count-th behind it: by minus the angle when
// direction is 1.
void RotateHalfSplit(float* rows, std::size_t token_count, std::size_t head_count,
                     std::size_t head_dim, std::size_t pair_count, const float* angles,
                     float direction) {
  for (std::size_t token = 0; token < token_count; ++token, angles += 2 * pair_count) {
    for (std::size_t head = 0; head < head_count; ++head, rows += head_dim) {
      for (std::size_t i = 0; i < pair_count; i += kLanes) {
        const std::size_t count = pair_count - i < kLanes ? pair_count - i : kLanes;
        float* const at = rows + i;
        if (count == kLanes) [[likely]] {
          const F32x16 a = Load(at);
          const F32x16 b = Load(at + pair_count);
          const F32x16 cosine = Load(angles + i);
          const F32x16 sine = Load(angles + pair_count + i) * F32x16(direction);
          Store(a * cosine + b * sine, at);
          Store(b * cosine - a * sine, at + pair_count);
        } else {
          const F32x16 a = LoadFirst(at, count);
          const F32x16 b = LoadFirst(at + pair_count, count);
          const F32x16 cosine = LoadFirst(angles + i, count);
          const F32x16 sine = LoadFirst(angles + pair_count + i, count) * F32x16(direction);
          StoreFirst(a * cosine + b * sine, at, count);
          StoreFirst(b * cosine - a * sine, at + pair_count, count);
        }
      }
    }
  }
}

// The same for dimensions 2i and 2i + 1. The cosine of a pair stands twice, the sine with its own
// sign and with the other one.
void RotateInterleaved(float* rows, std::size_t token_count, std::size_t head_count,
                       std::size_t head_dim, std::size_t pair_count, const float* angles,
                       float direction) {
  const std::size_t dims = 2 * pair_count;
  for (std::size_t token = 0; token < token_count; ++token, angles += 2 * dims) {
    for (std::size_t head = 0; head < head_count; ++head, rows += head_dim) {
      for (std::size_t i = 0; i < dims; i += kLanes) {
        const std::size_t count = dims - i < kLanes ? dims - i : kLanes;
        if (count == kLanes) [[likely]] {
          const F32x16 a = Load(rows + i);
          const F32x16 sine = Load(angles + dims + i) * F32x16(direction);
          Store(a * Load(angles + i) + SwapPairs(a) * sine, rows + i);
        } else {
          const F32x16 a = LoadFirst(rows + i, count);
          const F32x16 sine = LoadFirst(angles + dims + i, count) * F32x16(direction);
          StoreFirst(a * LoadFirst(angles + i, count) + SwapPairs(a) * sine, rows + i, count);
        }
      }
    }
  }
}

// Whether each |value| is below the limit; NaN is not.
bool AllBelow(const float* values, std::size_t count, float limit) {
  U32x16 outside = 0;
  const auto check = [&outside, limit](F32x16 value) KV_LANES_INLINE_LAMBDA {
    const F32x16 magnitude = BitCast<float>(BitCast<std::uint32_t>(value) & (kFloatSign - 1));
    outside = outside | SelectLess(magnitude, F32x16(limit), U32x16(0), U32x16(1));
  };
  std::size_t at = 0;
  for (; count - at >= kLanes; at += kLanes) check(Load(values + at));
  if (at < count) check(LoadFirst(values + at, count - at));
  return Equal(outside, U32x16(0)) == kAllLanes;
}

}  // namespace
}  // namespace kvtrie

#pragma GCC diagnostic pop
