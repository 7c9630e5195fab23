#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "storage/codec/fit_material.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// Rows of one matrix product while all rows are gone through.
inline constexpr std::size_t kFitChunkRows = 4096;

// The tokens of all samples as rows, as a fit goes through them: each sample begins with a group of
// 16 rows of its own, and is filled up to one. The samples are read in place.
class FitRows {
 public:
  // REQUIRES: CheckSamples(spec, samples) is OK; what samples point to outlives this.
  FitRows(const ModelSpec& spec, std::span<const KvSample> samples);
  FitRows(const FitRows&) = delete;
  FitRows& operator=(const FitRows&) = delete;

  std::size_t row_count() const { return tokens_.size(); }
  std::span<const TokenId> tokens() const { return tokens_; }  // [row]

  // Whether a row says something of what is coded. Padding does not, nor do tokens that frames keep
  // apart: first ones, and those with extreme values.
  bool counts(std::size_t row) const { return (active_[row / kLanes] >> row % kLanes & 1) != 0; }
  std::size_t counted() const { return counted_; }
  std::span<const LaneMask> active() const { return active_; }  // the same, [group of 16 rows]

  std::size_t sample_count() const { return samples_.size(); }
  std::size_t first_row(std::size_t sample) const { return samples_[sample].first_row; }
  std::span<const TokenId> tokens_of(std::size_t sample) const {
    return samples_[sample].kv.tokens;
  }

  // One sample's rows of a plane, [token][component]. REQUIRES: `rows` has room for them.
  void ReadSample(std::size_t sample, const PlaneShape& plane, std::span<float> rows) const;
  // The same with zeros in rows that do not count.
  void ReadCounted(std::size_t sample, const PlaneShape& plane, std::span<float> rows) const;
  // Those of all samples, [row][component].
  std::vector<float> ReadPlane(const PlaneShape& plane) const;
  // Tokens of a sample that are those of a reference too.
  struct ReferencedRun {
    std::size_t sample = 0;
    std::size_t first_token = 0;
    std::size_t token_count = 0;
    KvSample reference;      // outlives this
    std::size_t offset = 0;  // of the first of them in the reference
  };
  // From here on, a row is what its token's K and V differ by from the reference's, and no other
  // token counts. REQUIRES: CheckSamples() of the references; runs of a sample do not overlap.
  void TakeDifferences(std::span<const ReferencedRun> runs);

  // Turns such rows into those after RoPE.
  void Rotate(const PlaneShape& plane, std::span<float> rows) const;

 private:
  struct Sample {
    KvSample kv;
    const RawKv* raw_kv;
    RopeAngles angles;
    std::size_t first_row;
    // Of a sample whose rows are differences.
    struct Run {
      ReferencedRun run;
      const RawKv* raw_kv;
      RopeAngles angles;
    };
    std::vector<Run> runs = {};
  };
  const RawKv& RawKvOf(std::size_t token_count);
  static std::vector<bool> ExtremeTokens(const RawKv& raw_kv, const KvSample& kv,
                                         std::span<const PlaneShape> planes);
  std::span<float> RowsOf(const Sample& sample, const PlaneShape& plane,
                          std::span<float> rows) const;

  const ModelSpec spec_;
  std::map<std::size_t, RawKv> raw_kv_;  // by a sample's number of tokens
  std::vector<Sample> samples_;
  std::vector<TokenId> tokens_;
  std::vector<LaneMask> active_;
  std::size_t counted_ = 0;
};

}  // namespace kvtrie
