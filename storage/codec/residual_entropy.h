#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/rans_lanes.h"
#include "storage/codec/symbol_constants.h"

// What the kernels that code the symbols of residual frames take.
namespace kvtrie {

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
