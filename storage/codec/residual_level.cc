#include "storage/codec/residual_level.h"

#include <algorithm>
#include <cmath>

#include "storage/base/status_macros.h"

namespace kvtrie {

std::vector<float> RateThresholds(const ResidualProfile& profile, float rate_weight) {
  std::vector<float> thresholds(std::size_t{kScaleClasses} * kRestoredOffsets);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    const std::uint16_t* const frequencies =
        profile.class_frequencies.data() + c * kResidualSymbols;
    const auto bits = [&](std::int32_t value) {
      const double share =
          (frequencies[kSymbolMax + value] + frequencies[kSymbolMax - value]) / 2.0;
      return 12 - std::log2(std::max(share, 0.5));
    };
    for (std::int32_t k = 0; k < static_cast<std::int32_t>(kRestoredOffsets); ++k) {
      // Where (x - k)^2 + rate_weight * bits(k) is as large as the same of k + 1. The restored
      // offsets are left out: thresholds and offsets that follow each other end in few, near
      // values.
      const double border = 0.5 + rate_weight * (bits(k + 1) - bits(k)) / 2;
      thresholds[c * kRestoredOffsets + static_cast<std::size_t>(k)] =
          static_cast<float>(std::clamp(border, 0.5, 1.0));
    }
  }
  return thresholds;
}

std::vector<std::uint32_t> SymbolLimits(const ResidualProfile& profile) {
  std::vector<std::uint32_t> limits(kScaleClasses);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    const std::uint16_t* const zero =
        profile.class_frequencies.data() + c * kResidualSymbols + kSymbolMax;
    std::int32_t limit = 0;
    while (limit < kSymbolMax && zero[limit + 1] > 0 && zero[-limit - 1] > 0) ++limit;
    limits[c] = static_cast<std::uint32_t>(limit);
  }
  return limits;
}

SymbolTables::SymbolTables(const ResidualProfile& profile)
    : rans_(kScaleClasses + profile.exponent_frequencies.size() / kExponentSymbols),
      expected_(profile.expected.begin(), profile.expected.end()),
      carried_(profile.carried.begin(), profile.carried.end()),
      limits_(SymbolLimits(profile)),
      offsets_(profile.offsets.data()),
      prior_(profile.prior) {}

absl::StatusOr<SymbolTables> SymbolTables::Of(const ResidualProfile& profile) {
  SymbolTables made(profile);
  std::size_t table = 0;
  const auto set_each = [&](std::span<const std::uint16_t> frequencies, std::size_t symbols) {
    for (; !frequencies.empty(); frequencies = frequencies.subspan(symbols)) {
      KV_RETURN_IF_ERROR(made.rans_.Set(table++, frequencies.first(symbols)));
    }
    return absl::OkStatus();
  };
  KV_RETURN_IF_ERROR(set_each(profile.class_frequencies, kResidualSymbols));
  KV_RETURN_IF_ERROR(set_each(profile.exponent_frequencies, kExponentSymbols));
  return made;
}

ResidualTables SymbolTables::Tables(const float* thresholds) const {
  return {.decode = rans_.decode(),
          .encode = rans_.encode(),
          .expected = expected_.data(),
          .offsets = offsets_,
          .thresholds = thresholds,
          .limits = limits_.data(),
          .carried = carried_.data(),
          .prior = prior_};
}

LevelPlane::LevelPlane(const ResidualProfile& profile, std::uint32_t plane, std::size_t level) {
  const PlaneProfile& of = profile.plane_profiles[plane];
  const std::size_t block_components = profile.planes[plane].components() / of.block_count;
  for (std::uint32_t v = 0; v < of.scales[level].size(); ++v) {
    const std::uint8_t scale = of.scales[level][v];
    if (scale == kNotCoded) {
      dropped_.push_back(v);
      continue;
    }
    scales_.push_back(scale);
    groups_.push_back(
        static_cast<std::uint8_t>(profile.group_count > 1 ? v / block_components : 0));
    values_.push_back(v);
  }
  symbols_ = {.scales = scales_.data(),
              .groups = groups_.data(),
              .coded_count = static_cast<std::uint32_t>(scales_.size()),
              .group_count = profile.group_count,
              .exponent_table = kScaleClasses + of.exponent_table};
}

void LevelPlane::Gather(const float* values, std::size_t width, float factor, float* coded) const {
  for (std::size_t c = 0; c < values_.size(); ++c) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      coded[c * kLanes + lane] = values[lane * width + values_[c]] * factor;
    }
  }
}

void LevelPlane::Scatter(const float* coded, float factor, float* values, std::size_t width) const {
  for (std::size_t c = 0; c < values_.size(); ++c) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      values[lane * width + values_[c]] = coded[c * kLanes + lane] * factor;
    }
  }
}

bool LevelPlane::MayDrop(const float* values, float bound) const {
  // Written so that NaN is not small.
  return std::all_of(dropped_.begin(), dropped_.end(),
                     [&](std::uint32_t v) { return std::abs(values[v]) <= bound; });
}

void PredictFromTokens(const ResidualProfile& profile, std::uint32_t plane,
                       std::span<const TokenId> tokens, std::span<float> rows) {
  if (profile.planes[plane].layer > 0) return;
  const std::size_t components = profile.planes[plane].components();
  std::size_t first = 0, width = 0;
  for (std::uint32_t i = 0; i < profile.planes.size() && profile.planes[i].layer == 0; ++i) {
    if (i == plane) first = width;
    width += profile.planes[i].components();
  }
  const std::vector<float>& scales = profile.plane_profiles[plane].input_scales;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const auto found =
        std::lower_bound(profile.table_tokens.begin(), profile.table_tokens.end(), tokens[t]);
    if (found == profile.table_tokens.end() || *found != tokens[t]) continue;
    const auto entry = static_cast<std::size_t>(found - profile.table_tokens.begin());
    const std::int8_t* const codes = profile.table_rows.data() + entry * width + first;
    float* const row = rows.data() + t * components;
    for (std::size_t c = 0; c < components; ++c) row[c] += scales[c] * static_cast<float>(codes[c]);
  }
}

}  // namespace kvtrie
