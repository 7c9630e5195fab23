#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/codec/fit_material.h"
#include "storage/codec/residual_profile.h"
#include "storage/codec/token_table_fit.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// How differences to references are fitted.
struct DifferenceFitOptions {
  // Texts share a run of so many tokens behind another prefix: one is coded against the other.
  std::size_t run_tokens_min = 32;
  // With fewer such tokens, the profile says nothing of differences. 0: it never does.
  std::size_t tokens_min = 2000;
  std::vector<PredictorInput> inputs = {PredictorInput::kLayerBelow, PredictorInput::kSameLayerK};
  // On the steps of levels. Most of what is coded is small beside them, and stays off by no more
  // than it is: at 4, levels lead the model astray no further than blocks that are coded alone
  // (QUALITY.md).
  float step_factor = 4;
  float rate_weight = 0.08f;
  // 0: differences have no step exponents, which take bits.
  float importance_strength = 0;
  int rounds = 2;
  // As those of ResidualFitOptions. Values are few, and a token is like itself in all planes.
  std::uint16_t energy_prior = 2 * 16;
  double energy_carried = 0.8;
};

// Of levels that say nothing else.
inline constexpr double kRateWeight = 0.08;
inline constexpr double kImportanceStrength = 0.9;

struct ResidualFitOptions {
  // Inputs that a layer has; those that it lacks are left out.
  std::vector<PredictorInput> inputs = {PredictorInput::kLayerBelow, PredictorInput::kTwoBelow,
                                        PredictorInput::kFirstLayer, PredictorInput::kSameLayerK};
  bool block_per_head = false;
  // Weight of the metric's mean, added to its diagonal: 12 texts overrate what they have not seen.
  double metric_shrinkage = 0.1;
  double ridge = 2e-3;
  std::size_t table_tokens_max = std::size_t{1} << 15;
  VocabularyRows vocabulary;     // may be empty: the table has the samples' tokens only
  std::size_t fitted_level = 0;  // predictions are fitted to what this one of the levels restores
  std::vector<ResidualLevel> levels;
  int rounds = 2;  // over all levels, to settle tables
  // How slowly the energy of what a token had so far moves its tables: the expectation that it
  // starts with (in sixteenths), and the share of the last plane's excess that the next one starts
  // with.
  std::uint16_t energy_prior = 6 * 16;
  double energy_carried = 0.5;
  DifferenceFitOptions differences;
  // At each hundredth of the work, and when all is done; may be empty.
  std::function<void(double done_share, std::string_view what)> progress;
  // Asked several times in each plane; once it is true it stays so, and the fit ends as Cancelled.
  // May be empty.
  std::function<bool()> is_cancelled;
};

// Fits a profile to the KV of a model, without the model. Deterministic for the same samples on the
// same machine. Time: some minutes for 70,000 tokens and 11,520 components. Memory: the samples are
// read in place, and some 50 bytes per token and component of one layer.
// Errors: InvalidArgument names what of samples, material or options does not fit the model.
absl::StatusOr<ResidualProfile> FitResidualProfile(const ModelSpec& spec,
                                                   std::span<const KvSample> samples,
                                                   const FitMaterial& material,
                                                   const ResidualFitOptions& options);

// Memory that it takes beside samples and material: about as much, and not less. What grows with a
// model is the square of what one plane is predicted from. `spec` is valid.
std::uint64_t FitWorkingBytes(const ModelSpec& spec, const ResidualFitOptions& options,
                              std::uint64_t token_count);

// Fits what a profile says of differences to runs that samples share: to what a reference leaves
// that was restored at the finest level. Removes it where they share too few tokens. The other
// parts of the profile stay; of `options`, levels and vocabulary do not matter.
// Errors: as above.
absl::Status FitDifferences(const ModelSpec& spec, std::span<const KvSample> samples,
                            const FitMaterial& material, const ResidualFitOptions& options,
                            ResidualProfile& profile);

}  // namespace kvtrie
