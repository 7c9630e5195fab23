#pragma once

// Loops of residual_codec.cc, for codec_kernels_impl.h.
#include "storage/codec/rans_lanes.h"
#include "storage/codec/residual_entropy.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

KV_LANES_INLINE I32x16 Signed(U32x16 lanes) { return BitCast<std::int32_t>(lanes); }
KV_LANES_INLINE U32x16 Unsigned(I32x16 lanes) { return BitCast<std::uint32_t>(lanes); }

KV_LANES_INLINE I32x16 Min(I32x16 a, I32x16 b) { return Select(Less(a, b), a, b); }
KV_LANES_INLINE I32x16 Max(I32x16 a, I32x16 b) { return Select(Less(a, b), b, a); }
KV_LANES_INLINE I32x16 Abs(I32x16 a) { return Max(a, I32x16(0) - a); }

// About 8 log2 of 1 to 2^24: exponent and three bits of the mantissa. Exact arithmetic.
KV_LANES_INLINE I32x16 EighthOctaves(I32x16 positive) {
  return BitCast<std::int32_t>(Convert<float>(positive)) >> 20;
}

KV_LANES_INLINE LaneMask NotZero(I32x16 lanes) {
  return static_cast<LaneMask>(~Equal(lanes, I32x16(0)));
}

// The energy context of 16 tokens while a plane is coded.
struct EnergyContext {
  I32x16 seen;
  I32x16 expected;

  KV_LANES_INLINE EnergyContext(const ResidualTables& tables, const std::int32_t* shift)
      : seen(Signed(Gather(tables.carried, Unsigned(Load(shift) + I32x16(kScaleShiftMax))))),
        expected(static_cast<std::int32_t>(tables.prior)) {}

  KV_LANES_INLINE I32x16 Shift() const {
    const I32x16 ratio = EighthOctaves(seen) - EighthOctaves(expected);
    return Max(Min(ratio, I32x16(kScaleShiftMax)), I32x16(-kScaleShiftMax));
  }

  KV_LANES_INLINE void Add(const ResidualTables& tables, I32x16 scale, I32x16 value) {
    const I32x16 magnitude = Min(Abs(value), I32x16(kMagnitudeMax));
    seen = Min(seen + (magnitude << 4), I32x16(kEnergyMax));
    expected = Min(expected + Signed(Gather(tables.expected, Unsigned(scale))), I32x16(kEnergyMax));
  }
};

KV_LANES_INLINE I32x16 ClampScale(I32x16 scale) {
  return Max(Min(scale, I32x16(kScaleIndexMax)), I32x16(0));
}

// Table of a scale index, and how many low bits go beside it.
struct ScaleClass {
  I32x16 table;
  I32x16 low_bits;

  explicit KV_LANES_INLINE ScaleClass(I32x16 scale) {
    const I32x16 all = scale >> 1;
    const I32x16 above = all - I32x16(kScaleClasses);
    const LaneMask large = Less(I32x16(kScaleClasses - 1), all);
    low_bits = Select(large, (above >> 2) + I32x16(1), I32x16(0));
    table = all - (low_bits << 2);
  }
};

KV_LANES_INLINE F32x16 RestoredValue(const ResidualTables& tables, const ScaleClass& of,
                                     I32x16 value) {
  const I32x16 magnitude = Abs(value);
  const I32x16 which = Max(Min(magnitude, I32x16(static_cast<int>(kRestoredOffsets))), I32x16(1));
  const I32x16 at = of.table * I32x16(static_cast<int>(kRestoredOffsets)) + which - I32x16(1);
  const F32x16 offset = Gather(tables.offsets, Unsigned(at));
  // Zero stays zero, and with low bits values are dense enough.
  const LaneMask plain =
      static_cast<LaneMask>(Equal(of.low_bits, I32x16(0)) & Less(I32x16(0), magnitude));
  const F32x16 restored = Convert<float>(magnitude) + Select(plain, offset, F32x16(0.0f));
  return Select(Less(value, I32x16(0)), F32x16(0.0f) - restored, restored);
}

KV_LANES_INLINE F32x16 ExponentFactor(I32x16 exponent, bool inverse) {
  // 2^(-e/4), or 2^(e/4): a quarter's mantissa, and the exponent in its place.
  const I32x16 e = inverse ? exponent : I32x16(0) - exponent;
  alignas(64) static constexpr float kQuarters[4] = {1.0f, 1.189207115f, 1.414213562f,
                                                     1.681792831f};
  const F32x16 quarter = Gather(kQuarters, Unsigned(e & I32x16(3)));
  return BitCast<float>(BitCast<std::int32_t>(quarter) + ((e >> 2) << 23));
}

KV_LANES_INLINE RansDecoder Resume(const RansState& state) {
  RansDecoder decoder;
  decoder.states = Load(state.states);
  decoder.next = state.next;
  decoder.end = state.end;
  decoder.damaged = state.damaged;
  return decoder;
}

KV_LANES_INLINE void Suspend(const RansDecoder& decoder, RansState& state) {
  Store(decoder.states, state.states);
  state.next = decoder.next;
  state.end = decoder.end;
  state.damaged = decoder.damaged;
}

// A value in each lane of `active`: symbol, then low bits or an escape's.
KV_LANES_INLINE I32x16 DecodeValue(RansDecoder& decoder, const ResidualTables& tables,
                                   const ScaleClass& of, LaneMask active) {
  const I32x16 symbol = Signed(decoder.DecodeSymbols(tables.decode, Unsigned(of.table), active));
  I32x16 value = symbol - I32x16(kSymbolMax);
  const LaneMask escaped =
      static_cast<LaneMask>(Equal(symbol, I32x16(static_cast<std::int32_t>(kEscape))) & active);
  const LaneMask with_bits = static_cast<LaneMask>(NotZero(of.low_bits) & active & ~escaped);
  if (with_bits != 0) {
    const I32x16 low = Signed(decoder.DecodeBits(Unsigned(of.low_bits), with_bits));
    value = Select(with_bits, (value << of.low_bits) | low, value);
  }
  if (escaped != 0) [[unlikely]] {
    const I32x16 negative = Signed(decoder.DecodeBits(U32x16(1), escaped));
    const I32x16 low = Signed(decoder.DecodeBits(U32x16(12), escaped));
    const I32x16 high = Signed(decoder.DecodeBits(U32x16(12), escaped));
    const I32x16 magnitude = (high << 12) | low;
    value = Select(escaped, Select(NotZero(negative), I32x16(0) - magnitude, magnitude), value);
  }
  return value;
}

void ResidualStart(const std::uint8_t* bytes, std::size_t byte_count, RansState* state) {
  RansDecoder decoder;
  decoder.Start(bytes, byte_count);
  Suspend(decoder, *state);
}

bool ResidualFinished(const RansState* state) { return Resume(*state).Finished(); }

// values: [coded_count][16], in base steps.
void ResidualDecodePlane(const ResidualTables& tables, const ResidualPlane& plane, LaneMask active,
                         RansState* state, ResidualCarry* carry, float* values) {
  RansDecoder decoder = Resume(*state);
  for (std::uint32_t group = 0; group < plane.group_count; ++group) {
    const I32x16 delta =
        Signed(decoder.DecodeSymbols(tables.decode, plane.exponent_table, active)) -
        I32x16(kExponentDeltaMax);
    const I32x16 exponent = Load(carry->exponents[group]) + delta;
    Store(Max(Min(exponent, I32x16(kExponentMax)), I32x16(-kExponentMax)), carry->exponents[group]);
  }

  EnergyContext context(tables, carry->shift);
  for (std::uint32_t component = 0; component < plane.coded_count; ++component) {
    I32x16 exponent = 0;
    if (plane.group_count > 0) exponent = Load(carry->exponents[plane.groups[component]]);
    const I32x16 scale =
        ClampScale(I32x16(static_cast<std::int32_t>(plane.scales[component])) + (exponent << 1));
    const ScaleClass of(ClampScale(scale + context.Shift()));
    const I32x16 value = DecodeValue(decoder, tables, of, active);
    context.Add(tables, scale, value);
    Store(RestoredValue(tables, of, value) * ExponentFactor(exponent, false),
          values + component * kLanes);
  }
  Store(context.Shift(), carry->shift);
  Suspend(decoder, *state);
}

KV_LANES_INLINE std::uint32_t* Record(std::uint32_t* to, U32x16 lanes) {
  Store(lanes, to);
  return to + kLanes;
}

// Records what DecodeValue reads; returns where the next record goes.
KV_LANES_INLINE std::uint32_t* RecordValue(const ResidualTables& tables, const ScaleClass& of,
                                           I32x16 value, LaneMask active, std::uint32_t* to) {
  const I32x16 short_value = value >> of.low_bits;
  const I32x16 limit = Signed(Gather(tables.limits, Unsigned(of.table)));
  const LaneMask fits =
      static_cast<LaneMask>(~(Less(limit, short_value) | Less(short_value, I32x16(0) - limit)));
  const LaneMask escaped = static_cast<LaneMask>(~fits & active);
  const I32x16 symbol =
      Select(fits, short_value + I32x16(kSymbolMax), I32x16(static_cast<std::int32_t>(kEscape)));
  to = Record(to, RansSymbolRecords(tables.encode, Unsigned(of.table), Unsigned(symbol), active));
  const LaneMask with_bits = static_cast<LaneMask>(NotZero(of.low_bits) & active & ~escaped);
  if (with_bits != 0) {
    const I32x16 low = value & ((I32x16(1) << of.low_bits) - I32x16(1));
    to = Record(to, RansBitsRecords(Unsigned(low), Unsigned(of.low_bits), with_bits));
  }
  if (escaped != 0) [[unlikely]] {
    const U32x16 magnitude = Unsigned(Abs(value));
    const U32x16 negative = Unsigned(value) >> 31;
    to = Record(to, RansBitsRecords(negative, U32x16(1), escaped));
    to = Record(to, RansBitsRecords(magnitude & 0xFFF, U32x16(12), escaped));
    to = Record(to, RansBitsRecords(magnitude >> 12, U32x16(12), escaped));
  }
  return to;
}

// The value for `target` steps: rounded by rate and distortion, which the thresholds hold.
KV_LANES_INLINE I32x16 Quantize(const ResidualTables& tables, const ScaleClass& of, F32x16 target) {
  const F32x16 magnitude = BitCast<float>(BitCast<std::int32_t>(target) & I32x16(0x7FFFFFFF));
  const F32x16 bounded = Select(Less(magnitude, F32x16(static_cast<float>(kValueMax - 1))),
                                magnitude, F32x16(static_cast<float>(kValueMax - 1)));
  const I32x16 floor = Convert<std::int32_t>(bounded);
  const F32x16 above = bounded - Convert<float>(floor);
  const I32x16 which = Min(floor, I32x16(static_cast<int>(kRestoredOffsets) - 1));
  const I32x16 at = of.table * I32x16(static_cast<int>(kRestoredOffsets)) + which;
  const F32x16 half = 0.5f;
  const F32x16 threshold =
      Select(Equal(of.low_bits, I32x16(0)), Gather(tables.thresholds, Unsigned(at)), half);
  const I32x16 rounded = Select(Less(above, threshold), floor, floor + I32x16(1));
  return Select(Less(target, F32x16(0.0f)), I32x16(0) - rounded, rounded);
}

// Records the steps of one plane for 16 tokens and returns how many. targets, values:
// [coded_count][16] in base steps; `exponents` [group_count][16] within +-kExponentMax. Each
// component records at most kResidualStepsMax steps of 16.
std::size_t ResidualEncodePlane(const ResidualTables& tables, const ResidualPlane& plane,
                                LaneMask active, const std::int32_t* exponents,
                                const float* targets, ResidualCarry* carry, float* values,
                                std::uint32_t* records) {
  std::uint32_t* to = records;
  for (std::uint32_t group = 0; group < plane.group_count; ++group) {
    const I32x16 exponent = Load(exponents + group * kLanes);
    const I32x16 delta = exponent - Load(carry->exponents[group]);
    to = Record(to, RansSymbolRecords(tables.encode, plane.exponent_table,
                                      Unsigned(delta + I32x16(kExponentDeltaMax)), active));
    Store(exponent, carry->exponents[group]);
  }

  EnergyContext context(tables, carry->shift);
  for (std::uint32_t component = 0; component < plane.coded_count; ++component) {
    I32x16 exponent = 0;
    if (plane.group_count > 0) exponent = Load(carry->exponents[plane.groups[component]]);
    const I32x16 scale =
        ClampScale(I32x16(static_cast<std::int32_t>(plane.scales[component])) + (exponent << 1));
    const ScaleClass of(ClampScale(scale + context.Shift()));
    const F32x16 target = Load(targets + component * kLanes) * ExponentFactor(exponent, true);
    const I32x16 value = Quantize(tables, of, target);

    to = RecordValue(tables, of, value, active, to);
    context.Add(tables, scale, value);
    Store(RestoredValue(tables, of, value) * ExponentFactor(exponent, false),
          values + component * kLanes);
  }
  Store(context.Shift(), carry->shift);
  return static_cast<std::size_t>(to - records) / kLanes;
}

// codes: [row_count][components], 128 + (rows - bias) * inverse_scales, rounded to nearest even and
// bounded to 1 to 255.
void ResidualCodesOfRows(const float* rows, std::size_t row_count, std::size_t components,
                         const float* bias, const float* inverse_scales, std::uint8_t* codes) {
  // Added, it leaves no room for a fraction: the integer is in the low bits.
  constexpr float kRounding = 12582912.0f;
  for (std::size_t row = 0; row < row_count; ++row) {
    const float* const from = rows + row * components;
    std::uint8_t* const to = codes + row * components;
    for (std::size_t c = 0; c < components; ++c) {
      float scaled = (from[c] - bias[c]) * inverse_scales[c];
      scaled = scaled > -127.0f ? scaled : -127.0f;
      scaled = scaled < 127.0f ? scaled : 127.0f;
      const float rounded = (scaled + 128.0f) + kRounding;
      std::uint32_t bits;
      __builtin_memcpy(&bits, &rounded, sizeof bits);
      to[c] = static_cast<std::uint8_t>(bits);
    }
  }
}

// rows: [row_count][components] with so many floats from one to the next; offset + scale * product.
void ResidualRowsOfProducts(const std::int32_t* products, std::size_t row_count,
                            std::size_t components, const float* offset, const float* scale,
                            float* rows, std::size_t row_stride) {
  for (std::size_t row = 0; row < row_count; ++row) {
    const std::int32_t* const from = products + row * components;
    float* const to = rows + row * row_stride;
    for (std::size_t c = 0; c < components; ++c) {
      to[c] = offset[c] + scale[c] * static_cast<float>(from[c]);
    }
  }
}

// rows += values * basis, value by value: every instruction set adds in the same order, and most
// values are zero. values: [row_count][value_count], basis: [value_count][components]; with so many
// floats from one row to the next.
void ResidualAddValues(const float* values, std::size_t value_count, std::size_t value_stride,
                       const float* basis, std::size_t row_count, std::size_t components,
                       float* rows, std::size_t row_stride) {
  for (std::size_t row = 0; row < row_count; ++row) {
    const float* const of_row = values + row * value_stride;
    float* const to = rows + row * row_stride;
    for (std::size_t v = 0; v < value_count; ++v) {
      const float value = of_row[v];
      if (value == 0) continue;
      const float* const direction = basis + v * components;
      for (std::size_t c = 0; c < components; ++c) to[c] += value * direction[c];
    }
  }
}

}  // namespace
}  // namespace kvtrie

#pragma GCC diagnostic pop
