#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/codec/rans.h"
#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {

// From which fraction on an encoder takes k + 1 instead of k, for k = 0, 1, and 2 or more:
// [kScaleClasses][kRestoredOffsets]. It minimizes squared error in steps + rate_weight * bits.
std::vector<float> RateThresholds(const ResidualProfile& profile, float rate_weight);

// The largest value of each class that its table has with either sign; larger ones are escaped.
// [kScaleClasses], for encoders.
std::vector<std::uint32_t> SymbolLimits(const ResidualProfile& profile);

// The tables of a profile in the form that kernels read. They point into it. Immutable,
// thread-safe.
class SymbolTables {
 public:
  // REQUIRES: the profile is consistent. InvalidArgument: a table's frequencies do not sum up to
  // 4096.
  static absl::StatusOr<SymbolTables> Of(const ResidualProfile& profile);

  // All that decoders read. An encoder takes the thresholds of its level too. Points into this.
  ResidualTables Tables(const float* thresholds = nullptr) const;

 private:
  explicit SymbolTables(const ResidualProfile& profile);

  RansTables rans_;  // classes, then exponents
  std::vector<std::uint32_t> expected_;
  std::vector<std::uint32_t> carried_;
  std::vector<std::uint32_t> limits_;
  const float* offsets_;
  std::uint32_t prior_;
};

// The values that one plane codes at one level. Immutable, thread-safe.
class LevelPlane {
 public:
  LevelPlane(const ResidualProfile& profile, std::uint32_t plane, std::size_t level);

  // What the kernels take. Points into this object.
  ResidualPlane Symbols() const { return symbols_; }
  std::size_t coded_count() const { return values_.size(); }

  // Between values of 16 tokens, [token][value], and the kernels' order, [coded value][token];
  // times `factor`. Scatter leaves values that are not coded as they are.
  void Gather(const float* values, std::size_t width, float factor, float* coded) const;
  void Scatter(const float* coded, float factor, float* values, std::size_t width) const;

  // Whether all values of a token that are not coded are at most `bound` in size.
  bool MayDrop(const float* values, float bound) const;

 private:
  std::vector<std::uint8_t> scales_;
  std::vector<std::uint8_t> groups_;
  std::vector<std::uint32_t> values_;   // that are coded, ascending
  std::vector<std::uint32_t> dropped_;  // that are not
  ResidualPlane symbols_;
};

// Adds what the token table says to the rows of a plane: in layer 0, which depends on the token
// alone, and nothing above.
void PredictFromTokens(const ResidualProfile& profile, std::uint32_t plane,
                       std::span<const TokenId> tokens, std::span<float> rows);

}  // namespace kvtrie
