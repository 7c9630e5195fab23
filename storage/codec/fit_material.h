#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// KV of the first tokens of a text: raw KV as one block of so many tokens, from position 0 on.
struct KvSample {
  std::span<const TokenId> tokens;
  std::span<const std::byte> raw;
  // Squared gradient of a loss further on, for each token: [plane][KV head][token]. Empty: not
  // known.
  std::span<const float> importance = {};
};

// Of the queries of a model, before RoPE.
struct QueryStatistics {
  std::uint32_t query_heads = 0;
  std::span<const float> means;        // [layer][query head][k_head_dim]
  std::span<const float> covariances;  // [layer][query head][k_head_dim][k_head_dim]
};

// What is known of a model beside its KV: it needs the weights, and gradients where there are any,
// so it is made once and kept in a file.
struct FitMaterial {
  // [plane] what an error costs, [component][component]: symmetric, joins components of one KV
  // head, on one scale for all planes. Empty: each component counts by its variance.
  std::vector<std::vector<float>> metrics;
  // Step exponents per plane: 0, 1, or one for each KV head (all layers have as many).
  std::uint32_t group_count = 0;
  ImportanceModel importance;  // no query heads: all tokens count the same

  // The bytes of a file. Metrics are kept in 8 bits, queries in 16.
  std::string Encode(std::span<const PlaneShape> planes) const;
  // DataLoss: damaged. InvalidArgument: of another model.
  static absl::StatusOr<FitMaterial> Decode(std::span<const PlaneShape> planes,
                                            std::string_view bytes);
};

// InvalidArgument names the first sample whose sizes are not those of its tokens and the model.
// REQUIRES: spec.Validate() is OK.
absl::Status CheckSamples(const ModelSpec& spec, std::span<const KvSample> samples);

struct ImportanceFitOptions {
  bool group_per_head = false;
  std::uint32_t covariance_rank = 8;
  std::function<void(double done_share)> progress = nullptr;  // after each sample
};

// Fits what predicts importance to the samples that have gradients. Errors: InvalidArgument names
// what of samples or queries does not fit the model; no sample has gradients; a sample is shorter
// than 17 tokens.
absl::StatusOr<ImportanceModel> FitImportance(const ModelSpec& spec,
                                              std::span<const KvSample> samples,
                                              const QueryStatistics& queries,
                                              const ImportanceFitOptions& options);

}  // namespace kvtrie
