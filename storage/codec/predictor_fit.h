#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "storage/codec/fit_rows.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {

// Sets bias, input_scales, weights and weight_scales of one plane of the profile. values:
// [row][component] of the plane; the prediction is a ridge regression on the codes of its inputs,
// as a decoder will have them. `ridge` is relative to the inputs' mean square. Once `is_cancelled`,
// which may be empty, is true, what is set counts for nothing.
void FitPredictor(const FitRows& rows, std::span<const float> values, const RestoredCodes& codes,
                  double ridge, std::uint32_t plane, ResidualProfile& profile,
                  const std::function<bool()>& is_cancelled = {});

}  // namespace kvtrie
