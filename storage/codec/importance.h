#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/codec/importance_constants.h"
#include "storage/codec/matrix_product.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// How much an error in a token's K or V costs the model, told from the token's own K and V.
//
// What is predicted is the log of the squared gradient of a later loss. The best that K alone tells
// is the attention that the token will receive: of a query with the layer's mean m and covariance
// C, turned by RoPE as far as one of the distances below says, E exp(q.k / sqrt(d)) is exp(m.k /
// sqrt(d) + k.C k / 2d) up to a constant. These, the sizes of K and V, and the same of the layers
// around are the features of a linear model.
//
// Beside the token it looks only at how many tokens of the session come behind it, as far as they
// are known when it is coded: recent tokens are attended to more.

struct ImportanceSizes {
  std::size_t query_means = 0;
  std::size_t query_factors = 0;
  std::size_t normalizers = 0;
  std::size_t weights = 0;
};
ImportanceSizes SizesOf(std::span<const PlaneShape> planes, std::uint32_t group_count,
                        const ImportanceModel& model);

// InvalidArgument unless the model is one of these planes, with finite numbers.
absl::Status CheckImportance(std::span<const PlaneShape> planes, std::uint32_t group_count,
                             const ImportanceModel& model);

// Features of one plane and group; the last one is 1.
std::size_t ImportanceFeatureCount(std::span<const PlaneShape> planes);

// Rotates queries as RoPE does. Frequencies in radians per position, one per pair; none: no RoPE.
struct RopePairs {
  std::vector<double> frequencies;
  bool interleaved = false;

  // Those of each layer's K.
  static std::vector<RopePairs> OfLayers(const ModelSpec& spec);
};

// The step exponent, within +-kExponentMax, of a token that has so many times the importance of an
// average one: quarter octaves of the step, which goes with the root of the importance. 0 where
// `importance` is no number above 0.
std::int32_t ExponentOf(float importance, float strength);

// The same for the tokens of a block, whose first is row `first_row`, in the place of what stands
// there: [plane][row / 16][group][row % 16].
void SetExponents(std::span<const float> importance, std::size_t first_row,
                  std::uint32_t group_count, float strength,
                  std::vector<std::vector<std::int32_t>>& exponents);

// Of each token of a block, how many of the session are behind it, as far as they are known; itself
// included.
std::uint32_t TokensBehind(std::uint32_t position, std::uint32_t session_tokens);

// What makes scores of one KV head's K, [k_head_dim][column]: for each distance and query head that
// reads it a product with the mean, then those with the factors, whose squares are added.
// REQUIRES: the profile is consistent, its model has query heads; `rope` is of this layer.
std::vector<float> ScoreMatrix(const ResidualProfile& profile, const RopePairs& rope,
                               std::uint32_t layer, std::uint32_t head);

// Immutable, thread-safe.
class ImportanceEstimator {
 public:
  // REQUIRES: the profile is consistent and its model has query heads; `rope` is of its layers.
  ImportanceEstimator(const ResidualProfile& profile, std::span<const RopePairs> rope);

  // rows: [plane][row][component], K before RoPE. tokens_behind: of each row, itself included.
  // Returns [layer][row][feature]. REQUIRES: as many rows as tokens_behind, a multiple of
  // kProductRows.
  std::vector<std::vector<float>> Features(const std::vector<std::vector<float>>& rows,
                                           std::span<const std::uint32_t> tokens_behind) const;

  // For the fit of normalizers: [layer][distance][query head] log of the mean over rows [begin,
  // end) of the attention that the model expects, its normalizers included.
  std::vector<double> LogMeanAttention(const std::vector<std::vector<float>>& rows,
                                       std::size_t row_count, std::size_t begin,
                                       std::size_t end) const;

  // Step exponents within +-kExponentMax: [plane][row / 16][group][row % 16].
  std::vector<std::vector<std::int32_t>> Exponents(const std::vector<std::vector<float>>& features,
                                                   std::size_t row_count, float strength) const;

 private:
  // scores: [row][distance][query head of this KV head], before they are bounded.
  void Scores(std::size_t layer, std::size_t head, std::span<const float> k_rows,
              const PlaneShape& k, std::size_t row_count, std::vector<float>& scores) const;
  // own: [row][own features of a layer]. `v` is null in a layer without V.
  void AddLayer(std::size_t layer, std::span<const float> k_rows, const PlaneShape& k,
                std::span<const float> v_rows, const PlaneShape* v, std::size_t row_count,
                std::span<float> own) const;

  std::vector<PlaneShape> planes_;
  std::uint32_t group_count_;
  ImportanceModel model_;
  std::vector<std::vector<FloatProduct>> layers_;  // [layer][KV head]: K -> scores
};

}  // namespace kvtrie
