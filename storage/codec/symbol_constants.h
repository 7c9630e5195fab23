#pragma once

#include <cstddef>
#include <cstdint>

// How the symbols of residual frames are coded: numbers that encoder, decoder and fit share, on
// whatever device they run. The layout that follows from them is described in RESIDUAL.md.
//
// Only integers choose a table, so every decoder that has decoded the same symbols so far chooses
// the same one, whatever its floating-point unit does.
namespace kvtrie {

inline constexpr std::size_t kLanes = 16;

// Bit i belongs to lane i.
using LaneMask = std::uint16_t;
inline constexpr LaneMask kAllLanes = 0xFFFF;

// A frequency is a share of 2^12.
inline constexpr unsigned kRansFrequencyBits = 12;
inline constexpr std::uint32_t kRansFrequencySum = 1u << kRansFrequencyBits;
// A state lies in [2^16, 2^32); a lane starts to encode, and ends to decode, with the least one.
inline constexpr std::uint32_t kRansStateMin = 1u << 16;
inline constexpr std::size_t kRansStateBytes = 4 * kLanes;

// Expected size of a component, relative to its step: index i stands for 2^(i/8 - 8) steps.
inline constexpr std::int32_t kScaleIndexMax = 159;
inline constexpr std::uint8_t kNotCoded = 255;  // in the place of a scale index: all are zero
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
inline constexpr std::size_t kExponentGroupsMax = 64;  // of a plane

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

// To encoders, targets beyond it are out of range; and so are values that a level does not code, of
// so many base steps. Most are far below one; at this bound one adds a tenth to the error of its
// token.
inline constexpr float kTargetMax = 1 << 22;
inline constexpr float kDroppedMax = 16;

}  // namespace kvtrie
