#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/rans_lanes.h"

// How the symbols of a residual frame are coded: shared by encoder, decoder and fit. The layout
// that follows from it is described in RESIDUAL.md.
//
// Only integers choose a table, so every decoder that has decoded the same symbols so far chooses
// the same one, whatever its floating-point unit does.
namespace kvtrie {

// Expected size of a component, relative to its step: index i stands for 2^(i/8 - 8) steps.
inline constexpr std::int32_t kScaleIndexMax = 159;
// Two scale indexes share a table of symbols. From kScaleClasses on, a value's low bits are sent as
// they are: class c has (c - kScaleClasses) / 4 + 1 of them, and the table of the class that is so
// many octaves below.
inline constexpr std::int32_t kScaleClasses = 48;
inline constexpr std::int32_t kClassesPerOctave = 4;

// Symbols of a table: value + kSymbolMax, or kEscape, which is followed by a sign and 24 bits.
inline constexpr std::int32_t kSymbolMax = 63;
inline constexpr std::uint32_t kEscape = 2 * kSymbolMax + 1;
inline constexpr std::uint32_t kResidualSymbols = kEscape + 1;
inline constexpr std::int32_t kValueMax = (1 << 24) - 1;

// A step exponent e makes the step of a token 2^(-e/4) times the base step.
inline constexpr std::int32_t kExponentMax = 8;
inline constexpr std::int32_t kExponentDeltaMax = 2 * kExponentMax;
inline constexpr std::uint32_t kExponentSymbols = 2 * kExponentDeltaMax + 1;

// Energy seen so far: |value| up to 255 and its expectation, in sixteenths; their ratio moves the
// scale index by at most kScaleShiftMax.
inline constexpr std::int32_t kMagnitudeMax = 255;
inline constexpr std::int32_t kEnergyMax = (1 << 24) - 1;
inline constexpr std::int32_t kScaleShiftMax = 24;

// Steps that an encoder records for a component of 16 tokens: symbol, low bits, and those of an
// escape.
inline constexpr std::size_t kResidualStepsMax = 5;

// Values 1, 2 and 3 or more are restored a little off their integers, where their mean lies.
inline constexpr std::size_t kRestoredOffsets = 3;

// What a profile says of symbols, in the form that the kernels read. Pointers outlive their use.
struct ResidualTables {
  const std::uint32_t* decode = nullptr;    // RansTables::decode(): classes, then exponents
  const std::uint32_t* encode = nullptr;    // RansTables::encode()
  const std::uint32_t* expected = nullptr;  // [kScaleIndexMax + 1] expected min(|value|, 255) * 16
  const float* offsets = nullptr;           // [kScaleClasses][kRestoredOffsets]
  // For an encoder: residual_level.h makes them.
  const float* thresholds = nullptr;       // [kScaleClasses][kRestoredOffsets]
  const std::uint32_t* limits = nullptr;   // [kScaleClasses]
  const std::uint32_t* carried = nullptr;  // [2 * kScaleShiftMax + 1] energy to start with
  std::uint32_t prior = 0;                 // expected energy to start with, at least 1
};

// One plane (K or V of one layer) at one level.
struct ResidualPlane {
  const std::uint8_t* scales = nullptr;  // [coded_count] scale index at exponent 0
  const std::uint8_t* groups = nullptr;  // [coded_count] exponent group of each component
  std::uint32_t coded_count = 0;         // leading components; the others are zero
  std::uint32_t group_count = 0;         // 0: no exponents, all are zero
  std::uint32_t exponent_table = 0;      // among all tables
};

// What 16 tokens carry from one plane to the next; zero at first.
inline constexpr std::size_t kExponentGroupsMax = 64;
struct ResidualCarry {
  std::int32_t exponents[kExponentGroupsMax][kLanes] = {};
  std::int32_t shift[kLanes] = {};
};

// A decoder's state between two calls.
struct RansState {
  std::uint32_t states[kLanes] = {};
  const std::uint8_t* next = nullptr;
  const std::uint8_t* end = nullptr;
  bool damaged = false;
};

}  // namespace kvtrie
