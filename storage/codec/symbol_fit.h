#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {

// Fills the tables of a profile (class_frequencies, exponent_frequencies, expected), whose sizes
// are set, with what fits values of a Laplace distribution.
void SetFirstTables(ResidualProfile& profile);

// Counts the symbols that an encoder sends for a profile, and makes its tables of them. Not
// thread-safe.
class SymbolFit {
 public:
  explicit SymbolFit(const ResidualProfile& profile);

  // Codes one plane at one level, and counts. values: [row][component] in units of the metric; they
  // become what a decoder restores. active: of each group of 16 rows; exponents:
  // [row group][exponent group][lane]; carry: of each row group, from the plane before.
  void Code(const ResidualProfile& profile, std::uint32_t plane, std::size_t level,
            std::span<const LaneMask> active, std::span<const std::int32_t> exponents,
            std::span<ResidualCarry> carry, std::span<float> values);

  // Tables, offsets and expectations of all that was counted.
  void SetTables(ResidualProfile& profile) const;

 private:
  void CountExponents(std::uint32_t plane, std::span<const std::uint32_t> records);
  // A value of 16 rows: its record, scale at exponent 0, exponents (null: all 0), target and
  // restored value in base steps.
  void CountValue(const std::uint32_t* record, std::int32_t scale, const std::int32_t* exponents,
                  const float* targets, const float* restored);

  std::vector<double> counts_;       // [class][symbol]
  std::vector<double> offset_sums_;  // [class][offset]
  std::vector<double> offset_counts_;
  std::vector<double> magnitudes_;  // [scale index]
  std::vector<double> magnitude_counts_;
  std::vector<std::array<double, kExponentSymbols>> exponents_;  // [plane]
};

}  // namespace kvtrie
