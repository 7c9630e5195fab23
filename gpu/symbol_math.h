#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/scalar_math.h"
#include "storage/codec/host_device_code.h"
#include "storage/codec/symbol_constants.h"

// The integer steps of RESIDUAL.md for one lane, and how quantized values are rounded and restored:
// what residual_kernels.h does in 16 lanes, bit for bit. C++17, no Abseil.
namespace kvtrie::gpu {

KV_HOST_DEVICE inline std::int32_t Clamp(std::int32_t value, std::int32_t least,
                                         std::int32_t most) {
  return value < least ? least : value > most ? most : value;
}
KV_HOST_DEVICE inline std::int32_t Magnitude(std::int32_t value) {
  return value < 0 ? -value : value;
}

// About 8 log2 of 1 to 2^24: exponent and three bits of the mantissa. Exact arithmetic.
KV_HOST_DEVICE inline std::int32_t EighthOctaves(std::int32_t positive) {
  return static_cast<std::int32_t>(BitsOf(static_cast<float>(positive)) >> 20);
}

// The energy of one token while a plane is coded.
struct Energy {
  std::int32_t seen = 1;
  std::int32_t expected = 1;
};
KV_HOST_DEVICE inline std::int32_t ShiftOf(const Energy& energy) {
  return Clamp(EighthOctaves(energy.seen) - EighthOctaves(energy.expected), -kScaleShiftMax,
               kScaleShiftMax);
}
KV_HOST_DEVICE inline void AddEnergy(std::int32_t value, std::int32_t expected, Energy& energy) {
  const std::int32_t magnitude = Clamp(Magnitude(value), 0, kMagnitudeMax);
  energy.seen = Clamp(energy.seen + magnitude * 16, 0, kEnergyMax);
  energy.expected = Clamp(energy.expected + expected, 0, kEnergyMax);
}

KV_HOST_DEVICE inline std::int32_t ClampScale(std::int32_t scale) {
  return Clamp(scale, 0, kScaleIndexMax);
}

// Half of a scale index, 0 to 79: which table, and how many low bits go beside its symbols.
KV_HOST_DEVICE inline std::int32_t LowBitsOf(std::int32_t half) {
  return half < kScaleClasses ? 0 : (half - kScaleClasses) / kClassesPerOctave + 1;
}
KV_HOST_DEVICE inline std::int32_t TableOf(std::int32_t half) {
  return half - kClassesPerOctave * LowBitsOf(half);
}

// offsets: [kScaleClasses][kRestoredOffsets].
KV_HOST_DEVICE inline float RestoredValue(const float* offsets, std::int32_t half,
                                          std::int32_t value) {
  const std::int32_t magnitude = Magnitude(value);
  float restored = static_cast<float>(magnitude);
  if (magnitude > 0 && half < kScaleClasses) {
    const std::int32_t which = Clamp(magnitude, 1, static_cast<std::int32_t>(kRestoredOffsets));
    restored += offsets[half * static_cast<std::int32_t>(kRestoredOffsets) + which - 1];
  }
  return value < 0 ? 0.0f - restored : restored;
}

// 2^(e/4): a quarter's mantissa, and the exponent in its place.
KV_HOST_DEVICE inline float QuarterOctaves(std::int32_t e) {
  const std::int32_t quarter = e & 3;
  const float mantissa = quarter == 0   ? 1.0f
                         : quarter == 1 ? 1.189207115f
                         : quarter == 2 ? 1.414213562f
                                        : 1.681792831f;
  return FloatOf(BitsOf(mantissa) + (static_cast<std::uint32_t>((e - quarter) / 4) << 23));
}

// The value for a target in steps: rounded by rate and distortion, which the thresholds hold,
// [kScaleClasses][kRestoredOffsets].
KV_HOST_DEVICE inline std::int32_t QuantizeTarget(const float* thresholds, std::int32_t half,
                                                  float target) {
  const float magnitude = FloatOf(BitsOf(target) & (kFloatSignBit - 1));
  constexpr float kMost = static_cast<float>(kValueMax - 1);
  const float bounded = magnitude < kMost ? magnitude : kMost;  // NaN too
  const auto floor = static_cast<std::int32_t>(bounded);
  const float above = bounded - static_cast<float>(floor);
  float threshold = 0.5f;
  if (half < kScaleClasses) {
    const std::int32_t which = Clamp(floor, 0, static_cast<std::int32_t>(kRestoredOffsets) - 1);
    threshold = thresholds[half * static_cast<std::int32_t>(kRestoredOffsets) + which];
  }
  const std::int32_t rounded = above < threshold ? floor : floor + 1;
  return target < 0.0f ? -rounded : rounded;
}

// A table of symbols: for each where its slots begin, and for each 16 slots the symbol of the
// first. A symbol that begins where the next one does has no slots.
inline constexpr std::uint32_t kTableSymbols = 128;
inline constexpr std::uint32_t kBucketSlots = 16;
struct SymbolTable {
  std::uint16_t begins[kTableSymbols + 1];  // the last one is kRansFrequencySum
  std::uint16_t limit;    // of a class: the largest value that the table has with either sign
  std::uint16_t zero[2];  // 8 bytes at a time are copied
  std::uint8_t first[kRansFrequencySum / kBucketSlots];
};
static_assert(sizeof(SymbolTable) == 520);

// What the symbol of a slot is. REQUIRES: slot < kRansFrequencySum, a table whose sum is that.
KV_HOST_DEVICE inline std::uint32_t SymbolAt(const SymbolTable& table, std::uint32_t slot) {
  std::uint32_t symbol = table.first[slot / kBucketSlots];
  while (table.begins[symbol + 1] <= slot) ++symbol;
  return symbol;
}

// A decoder's state behind a symbol or some bits; it may need a word then.
struct RansStep {
  std::uint32_t symbol = 0;
  std::uint32_t state = 0;
};
KV_HOST_DEVICE inline RansStep DecodeSymbol(const SymbolTable& table, std::uint32_t state) {
  const std::uint32_t slot = state & (kRansFrequencySum - 1);
  RansStep step;
  step.symbol = SymbolAt(table, slot);
  const std::uint32_t begin = table.begins[step.symbol];
  const std::uint32_t frequency = table.begins[step.symbol + 1] - begin;
  step.state = frequency * (state >> kRansFrequencyBits) + (slot - begin);
  return step;
}
KV_HOST_DEVICE inline RansStep DecodeBits(std::uint32_t bit_count, std::uint32_t state) {
  const std::uint32_t shift = kRansFrequencyBits - bit_count;
  const std::uint32_t slot = state & (kRansFrequencySum - 1);
  RansStep step;
  step.symbol = slot >> shift;
  step.state = ((state >> kRansFrequencyBits) << shift) + (slot & ((1u << shift) - 1));
  return step;
}

// Slots of what an encoder codes.
struct RansSlots {
  std::uint32_t begin = 0;
  std::uint32_t frequency = 0;  // 0: the table has no such symbol
};
KV_HOST_DEVICE inline RansSlots SlotsOfSymbol(const SymbolTable& table, std::uint32_t symbol) {
  RansSlots slots;
  slots.begin = table.begins[symbol];
  slots.frequency = table.begins[symbol + 1] - slots.begin;
  return slots;
}
KV_HOST_DEVICE inline RansSlots SlotsOfBits(std::uint32_t bits, std::uint32_t bit_count) {
  const std::uint32_t shift = kRansFrequencyBits - bit_count;
  RansSlots slots;
  slots.begin = bits << shift;
  slots.frequency = 1u << shift;
  return slots;
}
// Whether the state gives its low word away first.
KV_HOST_DEVICE inline bool IsFull(std::uint32_t state, const RansSlots& slots) {
  return (state >> 20) >= slots.frequency;
}
// REQUIRES: the state is not full, the frequency not 0.
KV_HOST_DEVICE inline std::uint32_t EncodeState(std::uint32_t state, const RansSlots& slots) {
  const std::uint32_t quotient = state / slots.frequency;
  return (quotient << kRansFrequencyBits) + (state - quotient * slots.frequency) + slots.begin;
}

// A quantized value and half its scale index in one word, kept until symbols are made of them.
KV_HOST_DEVICE inline std::uint32_t PackValue(std::int32_t value, std::int32_t half) {
  return (static_cast<std::uint32_t>(value) & 0x1FFFFFF) | static_cast<std::uint32_t>(half) << 25;
}
KV_HOST_DEVICE inline std::int32_t PackedValue(std::uint32_t packed) {
  const auto low = static_cast<std::int32_t>(packed & 0x1FFFFFF);
  return low >= 0x1000000 ? low - 0x2000000 : low;
}
KV_HOST_DEVICE inline std::int32_t PackedHalf(std::uint32_t packed) {
  return static_cast<std::int32_t>(packed >> 25);
}

}  // namespace kvtrie::gpu
