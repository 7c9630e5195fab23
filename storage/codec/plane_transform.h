#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "storage/codec/matrix_product.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {

// What predictions read: restored rows in 8 bits, of the planes that later ones still need. Rows
// are tokens of any blocks; a multiple of kProductRows.
class RestoredCodes {
 public:
  RestoredCodes(std::size_t plane_count, std::size_t row_count)
      : codes_(plane_count), row_count_(row_count) {}

  std::size_t row_count() const { return row_count_; }

  // rows: [row_count][components]. What no later plane reads is dropped.
  void Add(std::uint32_t plane, const PlaneProfile& profile, const PlaneShape& shape,
           std::span<const float> rows);
  std::span<const std::uint8_t> Of(std::uint32_t plane) const { return codes_[plane]; }

 private:
  std::vector<std::vector<std::uint8_t>> codes_;  // [plane][row][component]
  std::size_t row_count_;
};

// What makes values of a residual, [component][value] of one block of a plane: the inverse of its
// basis. Differs in last bits between machines. REQUIRES: the profile is consistent.
std::vector<float> AnalysisMatrix(const ResidualProfile& profile, std::uint32_t plane,
                                  std::uint32_t block);

// The matrices of one plane, packed to be run. Rows are [row][component], values [row][value] (as
// many), in units of the profile's metric. Immutable, thread-safe.
class PlaneTransform {
 public:
  // REQUIRES: the profile is consistent.
  PlaneTransform(const ResidualProfile& profile, std::uint32_t plane);

  // What the planes below say. Layer 0 has nothing below it: its rows come from the token table.
  void Predict(const RestoredCodes& codes, std::span<float> rows) const;

  // rows += basis . values. With Predict, the same bits on every machine: integer products, and
  // sums whose order is fixed.
  void AddResidual(std::span<const float> values, std::span<float> rows) const;

  // Values of rows - predicted. Only for encoders.
  void Analyze(std::span<const float> residual, std::span<float> values) const;

 private:
  struct Block {
    std::vector<IntegerProduct> predict;  // one, or none without inputs
    std::vector<float> basis;             // [value][component]
    std::vector<FloatProduct> analyze;
  };

  std::size_t components_;
  std::size_t block_components_;
  std::vector<std::uint32_t> inputs_;
  std::vector<std::size_t> input_components_;  // of a block
  std::vector<float> offset_;                  // prediction at product 0
  std::vector<float> scale_;
  std::vector<Block> blocks_;
};

}  // namespace kvtrie
