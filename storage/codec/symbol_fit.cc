#include "storage/codec/symbol_fit.h"

#include <algorithm>
#include <cmath>

#include "storage/codec/codec_kernels.h"
#include "storage/codec/rans.h"
#include "storage/codec/residual_level.h"

namespace kvtrie {
namespace {

// Encoder tables that leave in a record which symbol of which table it is, instead of its code.
constexpr std::uint32_t kTraceMark = 1u << 30;
std::vector<std::uint32_t> TraceTables() {
  std::vector<std::uint32_t> trace(kRansTablesMax << 8);
  for (std::uint32_t i = 0; i < trace.size(); ++i) trace[i] = kTraceMark | i;
  return trace;
}
bool IsSymbol(std::uint32_t record) { return (record & kTraceMark) != 0; }

}  // namespace

void SetFirstTables(ResidualProfile& profile) {
  std::vector<std::uint32_t> counts(kResidualSymbols);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    const double scale = std::exp2(static_cast<double>(c) / kClassesPerOctave - 8) / std::sqrt(2.0);
    for (std::int32_t value = -kSymbolMax; value <= kSymbolMax; ++value) {
      const double low = std::abs(value) - 0.5, high = std::abs(value) + 0.5;
      const double share = value == 0 ? 1 - std::exp(-0.5 / scale)
                                      : (std::exp(-low / scale) - std::exp(-high / scale)) / 2;
      counts[static_cast<std::size_t>(value + kSymbolMax)] =
          share > 0.5 / kRansFrequencySum || value == 0
              ? 1 + static_cast<std::uint32_t>(share * 1e9)
              : 0;
    }
    counts[kEscape] = 1;
    NormalizeCounts(
        counts,
        std::span(profile.class_frequencies).subspan(c * kResidualSymbols, kResidualSymbols));
  }
  std::vector<std::uint32_t> deltas(kExponentSymbols);
  for (std::size_t i = 0; i < kExponentSymbols; ++i) {
    deltas[i] = 1 + static_cast<std::uint32_t>(
                        1e4 * std::exp2(-std::abs(static_cast<double>(i) - kExponentDeltaMax)));
  }
  for (std::size_t t = 0; t < profile.exponent_frequencies.size() / kExponentSymbols; ++t) {
    NormalizeCounts(
        deltas,
        std::span(profile.exponent_frequencies).subspan(t * kExponentSymbols, kExponentSymbols));
  }
  for (std::size_t i = 0; i <= kScaleIndexMax; ++i) {
    const double scale = std::exp2(static_cast<double>(i) / 8 - 8);
    const double expected = 0.72 * scale * std::exp(-0.45 / scale);
    profile.expected[i] = static_cast<std::uint16_t>(std::min(expected, 255.0) * 16);
  }
}

SymbolFit::SymbolFit(const ResidualProfile& profile)
    : counts_(std::size_t{kScaleClasses} * kResidualSymbols),
      offset_sums_(std::size_t{kScaleClasses} * kRestoredOffsets),
      offset_counts_(offset_sums_.size()),
      magnitudes_(kScaleIndexMax + 1),
      magnitude_counts_(magnitudes_.size()),
      exponents_(profile.planes.size()) {}

void SymbolFit::Code(const ResidualProfile& profile, std::uint32_t plane, std::size_t level,
                     std::span<const LaneMask> active, std::span<const std::int32_t> exponents,
                     std::span<ResidualCarry> carry, std::span<float> values) {
  static const std::vector<std::uint32_t> trace = TraceTables();
  const ResidualLevel& of_level = profile.levels[level];
  const LevelPlane coded(profile, plane, level);
  const std::vector<float> thresholds = RateThresholds(profile, of_level.rate_weight);
  const std::vector<std::uint32_t> expected(profile.expected.begin(), profile.expected.end());
  const std::vector<std::uint32_t> carried(profile.carried.begin(), profile.carried.end());
  // All symbols may be seen, so that tables can be made for them.
  const std::vector<std::uint32_t> limits(kScaleClasses, kSymbolMax);
  const ResidualTables tables = {.decode = nullptr,
                                 .encode = trace.data(),
                                 .expected = expected.data(),
                                 .offsets = profile.offsets.data(),
                                 .thresholds = thresholds.data(),
                                 .limits = limits.data(),
                                 .carried = carried.data(),
                                 .prior = profile.prior};
  const ResidualPlane symbols = coded.Symbols();
  const std::size_t width = profile.planes[plane].components();
  const std::size_t coded_count = coded.coded_count();
  std::vector<float> targets(coded_count * kLanes), restored(coded_count * kLanes);
  std::vector<std::uint32_t> records((symbols.group_count + coded_count * kResidualStepsMax) *
                                     kLanes);

  for (std::size_t group = 0; group < active.size(); ++group) {
    float* const of_group = values.data() + group * kLanes * width;
    const std::int32_t* const group_exponents =
        exponents.data() + group * symbols.group_count * kLanes;
    coded.Gather(of_group, width, 1 / of_level.step, targets.data());
    const std::size_t steps =
        Kernels().residual_encode(tables, symbols, active[group], group_exponents, targets.data(),
                                  &carry[group], restored.data(), records.data());
    if (active[group] != 0) {
      CountExponents(plane, std::span(records).first(symbols.group_count * kLanes));
      std::size_t value = 0;
      for (std::size_t step = symbols.group_count; step < steps; ++step) {
        // Between symbols there are steps of low bits and escapes.
        const std::uint32_t* const record = records.data() + step * kLanes;
        if (std::none_of(record, record + kLanes, IsSymbol)) continue;
        const std::int32_t* const of_value =
            symbols.group_count == 0 ? nullptr : group_exponents + symbols.groups[value] * kLanes;
        CountValue(record, symbols.scales[value], of_value, targets.data() + value * kLanes,
                   restored.data() + value * kLanes);
        ++value;
      }
    }
    std::fill_n(of_group, kLanes * width, 0.0f);
    coded.Scatter(restored.data(), of_level.step, of_group, width);
  }
}

void SymbolFit::CountExponents(std::uint32_t plane, std::span<const std::uint32_t> records) {
  for (const std::uint32_t record : records) {
    if (IsSymbol(record)) ++exponents_[plane][record & 0xFF];
  }
}

void SymbolFit::CountValue(const std::uint32_t* record, std::int32_t scale,
                           const std::int32_t* exponents, const float* targets,
                           const float* restored) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    if (!IsSymbol(record[lane])) continue;
    const std::uint32_t table = (record[lane] & ~kTraceMark) >> 8;
    const std::uint32_t symbol = record[lane] & 0xFF;
    ++counts_[table * kResidualSymbols + symbol];

    const std::int32_t exponent = exponents == nullptr ? 0 : exponents[lane];
    const float steps = std::exp2(static_cast<float>(exponent) / 4);
    const auto at_exponent =
        static_cast<std::size_t>(std::clamp(scale + 2 * exponent, 0, kScaleIndexMax));
    magnitudes_[at_exponent] += std::min(std::nearbyint(std::abs(restored[lane]) * steps), 255.0f);
    ++magnitude_counts_[at_exponent];

    const auto value =
        static_cast<std::size_t>(std::abs(static_cast<std::int32_t>(symbol) - kSymbolMax));
    const float above = std::abs(targets[lane]) * steps - static_cast<float>(value);
    // Where low bits are sent, the symbol is not the value.
    if (symbol == kEscape || value == 0 || std::abs(above) > 1) continue;
    const std::size_t at = table * kRestoredOffsets + std::min(value, kRestoredOffsets) - 1;
    offset_sums_[at] += above;
    ++offset_counts_[at];
  }
}

void SymbolFit::SetTables(ResidualProfile& profile) const {
  std::vector<std::uint32_t> counts(kResidualSymbols);
  std::vector<double> shares(kResidualSymbols);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    // Symmetric, with a little of the neighbours'.
    double total = 0;
    for (std::size_t symbol = 0; symbol < kResidualSymbols; ++symbol) {
      const auto seen = [&](std::size_t of_class) {
        const double* const from = counts_.data() + of_class * kResidualSymbols;
        return symbol == kEscape ? from[symbol]
                                 : (from[symbol] + from[2 * kSymbolMax - symbol]) / 2;
      };
      double smoothed = seen(c);
      if (c > 0) smoothed += 0.05 * seen(c - 1);
      if (c + 1 < kScaleClasses) smoothed += 0.05 * seen(c + 1);
      shares[symbol] = smoothed;
      total += smoothed;
    }
    // What would take more of a table than its share is escaped.
    for (std::size_t symbol = 0; symbol < kResidualSymbols; ++symbol) {
      const double share = shares[symbol] / std::max(total, 1.0);
      const bool kept =
          symbol == kEscape || symbol == kSymbolMax || share > 0.5 / kRansFrequencySum;
      counts[symbol] = kept ? 1 + static_cast<std::uint32_t>(share * 1e9) : 0;
    }
    NormalizeCounts(
        counts,
        std::span(profile.class_frequencies).subspan(c * kResidualSymbols, kResidualSymbols));
    for (std::size_t k = 0; k < kRestoredOffsets; ++k) {
      const std::size_t at = c * kRestoredOffsets + k;
      const double count = offset_counts_[at];
      profile.offsets[at] =
          static_cast<float>(std::clamp(offset_sums_[at] / (count + 50), -0.45, 0.45));
    }
  }
  std::vector<std::uint32_t> deltas(kExponentSymbols);
  const std::size_t tables = profile.exponent_frequencies.size() / kExponentSymbols;
  for (std::size_t t = 0; t < tables; ++t) {
    std::fill(deltas.begin(), deltas.end(), 1u);
    for (std::size_t plane = 0; plane < profile.planes.size(); ++plane) {
      if (profile.plane_profiles[plane].exponent_table != t) continue;
      for (std::size_t i = 0; i < kExponentSymbols; ++i) {
        deltas[i] += static_cast<std::uint32_t>(64 * exponents_[plane][i]);
      }
    }
    NormalizeCounts(
        deltas,
        std::span(profile.exponent_frequencies).subspan(t * kExponentSymbols, kExponentSymbols));
  }
  // Where a scale was not seen, its neighbour's expectation goes on by an eighth of an octave.
  for (std::size_t i = 0; i <= kScaleIndexMax; ++i) {
    if (magnitude_counts_[i] >= 1000) {
      const double mean = magnitudes_[i] / magnitude_counts_[i];
      profile.expected[i] = static_cast<std::uint16_t>(std::clamp(mean * 16, 0.0, 255.0 * 16));
    } else if (i > 0) {
      profile.expected[i] = static_cast<std::uint16_t>(
          std::min(profile.expected[i - 1] * std::exp2(0.125), 255.0 * 16));
    }
  }
}

}  // namespace kvtrie
