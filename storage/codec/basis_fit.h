#pragma once

#include <cstddef>
#include <span>

#include "storage/codec/residual_profile.h"

namespace kvtrie {

// Sets basis and basis_scales of a plane to the principal components of its residual in a metric,
// where an error of 1 costs the same in every direction. The largest come first.
//
// residual: [row][component], of which `counted_rows` rows are not left out as zeros. metric:
// [component][component] as in FitMaterial, or empty: each component counts by `variance`, or where
// that is 0 by the variance of all. shrinkage: weight of the metric's mean, added to its diagonal.
void FitBasis(std::span<const float> residual, std::size_t counted_rows,
              std::span<const float> metric, double shrinkage, PlaneProfile& of,
              double variance = 0);

// The variance that the basis of a plane was fitted with, where it had no metric.
double VarianceOfBasis(const PlaneProfile& of);

}  // namespace kvtrie
