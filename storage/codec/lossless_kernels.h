#pragma once

// Loops of lossless.cc, for codec_kernels_impl.h. LOSSLESS.md says what they compute.
#include "storage/codec/codec_kernel_table.h"
#include "storage/codec/rans_lanes.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

struct SplitValues {
  U32x16 sign;
  U32x16 exponent;
  U32x16 mantissa;
};

// Floats of 1, 2 or 4 bytes: sign, exponent, mantissa, from the top bit down.
template <unsigned kByteCount, unsigned kMantissaBits>
struct FloatSplit {
  static constexpr unsigned kBytes = kByteCount;
  static constexpr unsigned kExponentBits = 8 * kBytes - 1 - kMantissaBits;
  static constexpr bool kMantissaInRans = false;

  static KV_LANES_INLINE SplitValues Split(U32x16 code) {
    return {code >> (8 * kBytes - 1), (code >> kMantissaBits) & ((1u << kExponentBits) - 1),
            code & ((1u << kMantissaBits) - 1)};
  }
  static KV_LANES_INLINE U32x16 Join(SplitValues split) {
    return split.sign << (8 * kBytes - 1) | split.exponent << kMantissaBits | split.mantissa;
  }
};

// Integers of one byte: the exponent is the number of bits of the magnitude, the mantissa what is
// below its highest bit. kZero is the code of 0.
template <std::uint32_t kZero>
struct IntegerSplit {
  static constexpr unsigned kBytes = 1;
  static constexpr unsigned kExponentBits = 4;
  static constexpr bool kMantissaInRans = true;

  static KV_LANES_INLINE SplitValues Split(U32x16 code) {
    const U32x16 value = (code ^ kZero) & 0xFF;
    const U32x16 sign = value >> 7;
    const U32x16 magnitude = SelectEqual(sign, U32x16(0), value, U32x16(256) - value);
    const F32x16 as_float = Convert<float>(BitCast<std::int32_t>(magnitude));
    const U32x16 bits = (BitCast<std::uint32_t>(as_float) >> 23) - 126;
    const U32x16 exponent = SelectEqual(magnitude, U32x16(0), U32x16(0), bits);
    return {sign, exponent, magnitude & ((U32x16(1) << MantissaBits(exponent)) - 1)};
  }
  static KV_LANES_INLINE U32x16 Join(SplitValues split) {
    const U32x16 magnitude =
        SelectEqual(split.exponent, U32x16(0), U32x16(0),
                    (U32x16(1) << (MantissaBits(split.exponent) & 15)) | split.mantissa);
    const U32x16 value = SelectEqual(split.sign, U32x16(0), magnitude, U32x16(256) - magnitude);
    return (value & 0xFF) ^ kZero;
  }
  static KV_LANES_INLINE U32x16 MantissaBits(U32x16 exponent) {
    return SelectEqual(exponent, U32x16(0), U32x16(0), exponent - 1);
  }
};

using SplitFloat32 = FloatSplit<4, 23>;
using SplitFloat16 = FloatSplit<2, 10>;
using SplitBfloat16 = FloatSplit<2, 7>;
using SplitFloat8E4m3 = FloatSplit<1, 3>;
using SplitFloat8E5m2 = FloatSplit<1, 2>;
using SplitInt8 = IntegerSplit<0>;
using SplitUint8 = IntegerSplit<0x80>;

// `count` codes (1 to 16) of kBytes each; the other lanes are 0.
template <unsigned kBytes>
KV_LANES_INLINE U32x16 LoadCodes(const std::uint8_t* from, std::size_t count) {
  std::uint8_t some[kBytes * kLanes];
  if (count < kLanes) [[unlikely]] {
    __builtin_memset(some, 0, sizeof some);
    __builtin_memcpy(some, from, count * kBytes);
    from = some;
  }
  if constexpr (kBytes == 1) return LoadU8(from);
  if constexpr (kBytes == 2) return LoadU16(from);
  if constexpr (kBytes == 4) return LoadU32(from);
}
template <unsigned kBytes>
KV_LANES_INLINE void StoreCodes(U32x16 codes, std::uint8_t* to, std::size_t count) {
  std::uint8_t some[kBytes * kLanes];
  std::uint8_t* const at = count < kLanes ? some : to;
  if constexpr (kBytes == 1) StoreU8(codes, at);
  if constexpr (kBytes == 2) StoreU16(codes, at);
  if constexpr (kBytes == 4) StoreU32(codes, at);
  if (count < kLanes) [[unlikely]]
    __builtin_memcpy(to, some, count * kBytes);
}

KV_LANES_INLINE std::size_t CountInStep(std::size_t components, std::size_t at) {
  return components - at < kLanes ? components - at : kLanes;
}
KV_LANES_INLINE LaneMask FirstLanes(std::size_t count) {
  return static_cast<LaneMask>((1u << count) - 1);
}

// What the tokens before tell of 16 channels: the mean of their exponents and how far they are from
// it, in sixteenths, the last sign, and how often it came in a row.
struct ChannelStates {
  I32x16 mean;
  I32x16 spread;
  U32x16 sign;
  U32x16 same_signs;

  static KV_LANES_INLINE ChannelStates First(std::int32_t mean) {
    return {I32x16(mean), I32x16(16), U32x16(0), U32x16(0)};
  }
  static KV_LANES_INLINE ChannelStates Load(const std::uint32_t* from) {
    const auto* const numbers = reinterpret_cast<const std::int32_t*>(from);
    return {kvtrie::Load(numbers), kvtrie::Load(numbers + kLanes), kvtrie::Load(from + 2 * kLanes),
            kvtrie::Load(from + 3 * kLanes)};
  }
  KV_LANES_INLINE void Store(std::uint32_t* to) const {
    kvtrie::Store(BitCast<std::uint32_t>(mean), to);
    kvtrie::Store(BitCast<std::uint32_t>(spread), to + kLanes);
    kvtrie::Store(sign, to + 2 * kLanes);
    kvtrie::Store(same_signs, to + 3 * kLanes);
  }

  KV_LANES_INLINE I32x16 Base() const { return (mean + 4) >> 4; }
  KV_LANES_INLINE U32x16 Table() const {
    const U32x16 upper_half = BitCast<std::uint32_t>((mean + 4) >> 3) & 1;
    U32x16 table = upper_half;
    constexpr std::int32_t kBounds[] = {8, 14, 22};
    for (const std::int32_t bound : kBounds) {
      table = table + SelectLess(spread, I32x16(bound), U32x16(0), U32x16(2));
    }
    return table + SelectEqual(same_signs, U32x16(2), U32x16(8), U32x16(0));
  }
  KV_LANES_INLINE void Add(U32x16 exponent, U32x16 new_sign, LosslessRates rates) {
    const I32x16 difference = BitCast<std::int32_t>(exponent << 4) - mean;
    const I32x16 distance = SelectLess(difference, I32x16(0), I32x16(0) - difference, difference);
    mean = mean + ((difference * rates.mean) >> 8);
    spread = spread + (((distance - spread) * rates.spread) >> 8);
    const U32x16 more = SelectLess(same_signs, U32x16(2), same_signs + 1, same_signs);
    same_signs = SelectEqual(sign, new_sign, more, U32x16(0));
    sign = new_sign;
  }
};

// The class of an exponent that differs so much from the base: 0 when the class does not say it.
KV_LANES_INLINE U32x16 ExponentClass(I32x16 difference) {
  const U32x16 shifted = BitCast<std::uint32_t>(difference + kLosslessClassOffset);
  return SelectLess(shifted - 1, U32x16(kLosslessClasses - 1), shifted, U32x16(0));
}

template <typename Split>
LosslessSums LosslessSum(const std::uint8_t* raw, std::size_t count) {
  U32x16 exponents = 0;
  U32x16 mantissa_bits = 0;
  LosslessSums sums = {};
  const auto collect = [&]() KV_LANES_INLINE_LAMBDA {
    std::uint32_t lanes[kLanes];
    Store(exponents, lanes);
    for (const std::uint32_t lane : lanes) sums.exponents += lane;
    exponents = 0;
  };
  for (std::size_t at = 0; at < count; at += kLanes) {
    const std::size_t in_step = CountInStep(count, at);
    const SplitValues split =
        Split::Split(LoadCodes<Split::kBytes>(raw + at * Split::kBytes, in_step));
    exponents = exponents + Select(FirstLanes(in_step), split.exponent, U32x16(0));
    mantissa_bits = mantissa_bits | split.mantissa;
    if (at % (1u << 20) == 0) collect();
  }
  collect();
  std::uint32_t lanes[kLanes];
  Store(mantissa_bits, lanes);
  for (const std::uint32_t lane : lanes) sums.mantissa_bits |= lane;
  if (Split::kMantissaInRans) sums.mantissa_bits = 0;
  return sums;
}

template <typename Split>
void LosslessModel(const LosslessKind& kind, const std::uint8_t* raw, std::uint32_t* states,
                   std::uint8_t* tables, std::uint8_t* symbols) {
  for (std::size_t token = 0; token < kind.token_count; ++token) {
    for (std::size_t at = 0; at < kind.row_components; at += kLanes) {
      const std::size_t in_step = CountInStep(kind.row_components, at);
      const SplitValues split = Split::Split(LoadCodes<Split::kBytes>(raw, in_step));
      raw += in_step * Split::kBytes;
      std::uint32_t* const state = states + at * kLosslessStateWords;
      ChannelStates channels =
          token == 0 ? ChannelStates::First(kind.mean) : ChannelStates::Load(state);
      const U32x16 exponent_class =
          ExponentClass(BitCast<std::int32_t>(split.exponent) - channels.Base());
      StoreU8(channels.Table(), tables);
      StoreU8((exponent_class << 1) | (split.sign ^ channels.sign), symbols);
      tables += kLanes;
      symbols += kLanes;
      channels.Add(split.exponent, split.sign, kind.rates[token]);
      channels.Store(state);
    }
  }
}

template <typename Split>
std::uint32_t* LosslessRecord(const LosslessKind& kind, const std::uint8_t* raw,
                              const std::uint32_t* rans_tables, const std::uint8_t* tables,
                              const std::uint8_t* symbols, std::uint32_t* records,
                              std::uint8_t* planes) {
  for (std::size_t token = 0; token < kind.token_count; ++token) {
    for (std::size_t at = 0; at < kind.row_components; at += kLanes) {
      const std::size_t in_step = CountInStep(kind.row_components, at);
      const LaneMask lanes = FirstLanes(in_step);
      const SplitValues split = Split::Split(LoadCodes<Split::kBytes>(raw, in_step));
      raw += in_step * Split::kBytes;
      const U32x16 symbol = LoadU8(symbols);
      Store(RansSymbolRecords(rans_tables, LoadU8(tables), symbol, lanes), records);
      records += kLanes;
      const auto escaped = static_cast<LaneMask>(Less(symbol, U32x16(2)) & lanes);
      if (escaped != 0) [[unlikely]] {
        Store(RansBitsRecords(split.exponent, U32x16(Split::kExponentBits), escaped), records);
        records += kLanes;
      }
      if constexpr (Split::kMantissaInRans) {
        Store(RansBitsRecords(split.mantissa, Split::MantissaBits(split.exponent), lanes), records);
        records += kLanes;
      } else {
        for (std::uint32_t left = kind.planes; left != 0; left &= left - 1) {
          const auto bit = static_cast<std::uint32_t>(__builtin_ctz(left));
          const LaneMask plane = SignBits(BitCast<std::int32_t>(split.mantissa << (31 - bit)));
          __builtin_memcpy(planes, &plane, sizeof plane);
          planes += sizeof plane;
        }
      }
      tables += kLanes;
      symbols += kLanes;
    }
  }
  return records;
}

template <typename Split>
KV_LANES_INLINE void LosslessDecodeKind(RansDecoder& decoder, const LosslessKind& kind,
                                        const std::uint32_t* rans_tables,
                                        const std::uint8_t* planes, std::uint32_t* states,
                                        std::uint8_t* raw) {
  RansDecoder local = decoder;
  for (std::size_t token = 0; token < kind.token_count; ++token) {
    for (std::size_t at = 0; at < kind.row_components; at += kLanes) {
      const std::size_t in_step = CountInStep(kind.row_components, at);
      const LaneMask lanes = FirstLanes(in_step);
      std::uint32_t* const state = states + at * kLosslessStateWords;
      ChannelStates channels =
          token == 0 ? ChannelStates::First(kind.mean) : ChannelStates::Load(state);
      const U32x16 symbol = local.DecodeSymbols(rans_tables, channels.Table(), lanes);
      SplitValues split;
      split.sign = (symbol & 1) ^ channels.sign;
      split.exponent = BitCast<std::uint32_t>(BitCast<std::int32_t>(symbol >> 1) -
                                              kLosslessClassOffset + channels.Base());
      const auto escaped = static_cast<LaneMask>(Less(symbol, U32x16(2)) & lanes);
      if (escaped != 0) [[unlikely]] {
        split.exponent = Select(escaped, local.DecodeBits(U32x16(Split::kExponentBits), escaped),
                                split.exponent);
      }
      // Of damaged bytes.
      split.exponent = split.exponent & ((1u << Split::kExponentBits) - 1);
      split.mantissa = 0;
      if constexpr (Split::kMantissaInRans) {
        split.exponent = SelectLess(split.exponent, U32x16(8), split.exponent, U32x16(8));
        split.mantissa = local.DecodeBits(Split::MantissaBits(split.exponent), lanes);
      } else {
        for (std::uint32_t left = kind.planes; left != 0; left &= left - 1) {
          LaneMask plane;
          __builtin_memcpy(&plane, planes, sizeof plane);
          planes += sizeof plane;
          split.mantissa = split.mantissa | Select(plane, U32x16(left & (0 - left)), U32x16(0));
        }
      }
      StoreCodes<Split::kBytes>(Split::Join(split), raw, in_step);
      raw += in_step * Split::kBytes;
      channels.Add(split.exponent, split.sign, kind.rates[token]);
      channels.Store(state);
    }
  }
  decoder = local;
}

template <typename Split>
bool LosslessDecode(const LosslessKind* kinds, const std::uint32_t* const* rans_tables,
                    const std::uint8_t* bytes, std::size_t byte_count,
                    const std::uint8_t* const* planes, std::uint32_t* states,
                    std::uint8_t* const* raw) {
  RansDecoder decoder;
  decoder.Start(bytes, byte_count);
  for (std::size_t k = 0; k < 2; ++k) {
    LosslessDecodeKind<Split>(decoder, kinds[k], rans_tables[k], planes[k], states, raw[k]);
  }
  return decoder.Finished();
}

}  // namespace
}  // namespace kvtrie

#pragma GCC diagnostic pop
