#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/residual_entropy.h"

// How numbers of a 16- or 8-bit float format are coded around a prediction, without loss.
//
// The numbers lie in *cells* of equal width, a power of two near a quarter of what the prediction
// usually misses by. Coded are the difference of cells, as a value of a residual frame is, and then
// what is left within the cell: since cells are cut where exponents change, so many bits as they
// are.
namespace kvtrie {

struct PredictedFormat {
  std::int32_t mantissa_bits = 0;
  std::int32_t bias = 0;        // of the exponent
  std::int32_t sign_shift = 0;  // place of the sign bit
};

// One plane; arrays per component.
struct PredictedPlane {
  const std::int8_t* cell_exponents = nullptr;
  const std::uint8_t* scales = nullptr;  // scale index of the difference of cells
  std::uint32_t components = 0;
};

inline constexpr float kPredictedCellsMax = 1 << 22;
// Those of a value, its rest, and a gap with its escape.
inline constexpr std::size_t kPredictedStepsMax = kResidualStepsMax + 3;

}  // namespace kvtrie
