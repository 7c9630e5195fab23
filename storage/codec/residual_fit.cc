#include "storage/codec/residual_fit.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/codec/basis_fit.h"
#include "storage/codec/fit_rows.h"
#include "storage/codec/importance.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/predictor_fit.h"
#include "storage/codec/profile_header.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_level.h"
#include "storage/codec/shared_runs.h"
#include "storage/codec/symbol_fit.h"
#include "storage/codec/token_table_fit.h"

namespace kvtrie {
namespace {

// A value whose scale is below 2^-5 steps is zero in practice, important tokens included.
constexpr int kScaleIndexMin = 24;

constexpr double kReportedShare = 0.01;

class Fit {
 public:
  Fit(const ModelSpec& spec, std::span<const KvSample> samples, const FitMaterial& material,
      const ResidualFitOptions& options)
      : spec_(spec), samples_(samples), material_(material), options_(options) {}

  absl::StatusOr<ResidualProfile> Run();
  // The same of what tokens of these runs differ by from others.
  absl::StatusOr<ResidualProfile> RunOfDifferences(const ResidualProfile& whole,
                                                   std::span<const FitRows::ReferencedRun> runs);

 private:
  absl::Status CheckOptions() const;
  absl::Status CheckMaterial() const;
  absl::Status CheckVocabulary() const;
  absl::Status Open();
  void SetUpProfile();
  void FitFirstToken();
  void ComputeExponents();

  // One level over all samples. `fit`: predictions and bases too.
  void Pass(std::size_t level, bool fit, SymbolFit& symbols);
  void FitPredictors(std::uint32_t plane, std::span<const float> rows, const RestoredCodes& codes);
  std::vector<float> Predict(const PlaneTransform& transform, std::uint32_t plane,
                             const RestoredCodes& codes) const;
  // What predictions miss, [row][component]; 0 in rows that do not count.
  std::vector<float> Residual(std::span<const float> rows, std::span<const float> predicted) const;
  void FitScales(std::uint32_t plane, std::size_t level, const std::vector<float>& values);
  void FitLevels();
  void FitCells();
  void Report(std::string_view what, double share_of_step);
  bool IsCancelled() const { return options_.is_cancelled && options_.is_cancelled(); }

  const ModelSpec spec_;
  const std::span<const KvSample> samples_;
  const FitMaterial& material_;
  const ResidualFitOptions& options_;

  ResidualProfile profile_;
  std::optional<FitRows> rows_;
  std::vector<std::vector<std::vector<std::int32_t>>> exponents_;  // [level][plane]
  std::vector<ResidualCarry> carry_;                               // [group]
  std::vector<double> variances_;  // [plane] without metrics, of differences; else those that are
  double done_ = 0;
  double total_ = 1;
  double reported_ = 0;
};

void Fit::Report(std::string_view what, double share_of_step) {
  const double done_share = (done_ + share_of_step) / total_;
  if (!options_.progress || done_share < reported_ + kReportedShare) return;
  reported_ = done_share;
  options_.progress(done_share, what);
}

absl::Status Fit::CheckOptions() const {
  const auto bad = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("fit: ", what...));
  };
  if (options_.levels.empty() || options_.levels.size() > kProfileLevelsMax) {
    return bad("levels: ", options_.levels.size(), ", must be 1 to ", kProfileLevelsMax);
  }
  if (options_.energy_prior == 0) return bad("energy_prior is 0");
  if (!(options_.energy_carried >= 0 && options_.energy_carried <= 1)) {
    return bad("energy_carried ", options_.energy_carried, ", must be 0 to 1");
  }
  for (std::size_t i = 0; i < options_.levels.size(); ++i) {
    const ResidualLevel& level = options_.levels[i];
    if (level.quality != Quality::kHigh && level.quality != Quality::kNearExact &&
        level.quality != Quality::kSmall) {
      return bad("level ", i, ": quality must be high, near exact or small");
    }
    for (std::size_t other = 0; other < i; ++other) {
      if (options_.levels[other].quality == level.quality) {
        return bad("level ", i, ": has the quality of level ", other);
      }
    }
    if (!(level.step > 0) || !std::isfinite(level.step)) {
      return bad("level ", i, ": step must be above 0");
    }
    if (!(level.rate_weight >= 0) || !std::isfinite(level.rate_weight)) {
      return bad("level ", i, ": rate_weight must be 0 or more");
    }
    if (!std::isfinite(level.importance_strength)) {
      return bad("level ", i, ": importance_strength must be finite");
    }
  }
  if (options_.fitted_level >= options_.levels.size()) {
    return bad("fitted_level is not one of the levels");
  }
  if (options_.rounds < 1) return bad("rounds must be 1 or more");
  if (!(options_.ridge > 0) || !std::isfinite(options_.ridge)) return bad("ridge must be above 0");
  if (!(options_.metric_shrinkage >= 0) || !std::isfinite(options_.metric_shrinkage)) {
    return bad("metric_shrinkage must be 0 or more");
  }
  return absl::OkStatus();
}

absl::Status Fit::CheckMaterial() const {
  const auto bad = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("fit: ", what));
  };
  const std::vector<PlaneShape>& planes = profile_.planes;
  if (!material_.metrics.empty() && material_.metrics.size() != planes.size()) {
    return bad("metrics are not those of the model's planes");
  }
  for (std::size_t i = 0; i < material_.metrics.size(); ++i) {
    const std::size_t components = planes[i].components();
    if (material_.metrics[i].size() != components * components) {
      return bad("metrics are not those of the model's planes");
    }
    if (std::any_of(material_.metrics[i].begin(), material_.metrics[i].end(),
                    [](float value) { return !std::isfinite(value); })) {
      return bad("metrics are not finite");
    }
  }
  KV_RETURN_IF_ERROR(CheckImportance(planes, material_.group_count, material_.importance));
  const std::uint32_t heads = planes[0].heads;
  const bool same_heads = std::all_of(planes.begin(), planes.end(),
                                      [heads](const PlaneShape& p) { return p.heads == heads; });
  if (material_.group_count > 1 && (!same_heads || !options_.block_per_head ||
                                    material_.group_count != heads || heads > kExponentGroupsMax)) {
    return bad(absl::StrCat("group_count ", material_.group_count,
                            " needs block_per_head, and as many KV heads in every layer, at most ",
                            kExponentGroupsMax));
  }
  if (options_.block_per_head && !same_heads) {
    return bad("block_per_head needs as many KV heads in every layer");
  }
  return absl::OkStatus();
}

absl::Status Fit::CheckVocabulary() const {
  const VocabularyRows& vocabulary = options_.vocabulary;
  const std::size_t width = FirstLayerComponents(profile_.planes);
  if (vocabulary.rows.size() != vocabulary.tokens.size() * width) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fit: vocabulary: ", vocabulary.rows.size(), " numbers for ", vocabulary.tokens.size(),
        " tokens, and layer 0 has ", width, " components of K and V"));
  }
  const auto bad = std::find_if(vocabulary.rows.begin(), vocabulary.rows.end(),
                                [](float value) { return !std::isfinite(value); });
  if (bad != vocabulary.rows.end()) {
    const auto entry = static_cast<std::size_t>(bad - vocabulary.rows.begin()) / width;
    return absl::InvalidArgumentError(
        absl::StrCat("fit: vocabulary: token ", vocabulary.tokens[entry], ": is not finite"));
  }
  return absl::OkStatus();
}

absl::Status Fit::Open() {
  KV_RETURN_IF_ERROR(CheckOptions());
  profile_.planes = PlanesOf(spec_);
  KV_RETURN_IF_ERROR(CheckMaterial());
  KV_RETURN_IF_ERROR(CheckVocabulary());
  if (samples_.empty()) return absl::InvalidArgumentError("fit: no samples");
  KV_RETURN_IF_ERROR(CheckSamples(spec_, samples_));
  rows_.emplace(spec_, samples_);
  if (rows_->counted() < 64) {
    return absl::InvalidArgumentError("fit: samples have fewer than 64 tokens");
  }
  SetUpProfile();
  return absl::OkStatus();
}

void Fit::SetUpProfile() {
  profile_.codec_key = spec_.CodecKey();
  profile_.levels = options_.levels;
  profile_.group_count = material_.importance.query_heads == 0 ? 0 : material_.group_count;
  profile_.importance = material_.importance;
  profile_.plane_profiles.resize(profile_.planes.size());
  const std::size_t exponent_tables = std::min<std::size_t>(profile_.planes.size(), 128);
  for (std::uint32_t i = 0; i < profile_.planes.size(); ++i) {
    PlaneProfile& plane = profile_.plane_profiles[i];
    const std::size_t components = profile_.planes[i].components();
    plane.block_count = options_.block_per_head ? profile_.planes[i].heads : 1;
    const bool first_layer = profile_.planes[i].layer == 0;
    for (const PredictorInput input : options_.inputs) {
      if (!first_layer) plane.inputs.push_back(input);
    }
    // Near the bottom, layer 0 is one of those below already.
    const auto planes_read = InputPlanes(profile_.planes, i, plane.inputs);
    if (std::count(planes_read.begin(), planes_read.end(), 0u) > 1) {
      std::erase(plane.inputs, PredictorInput::kFirstLayer);
    }
    plane.exponent_table = static_cast<std::uint32_t>(i * exponent_tables / profile_.planes.size());
    plane.cell_exponents.assign(components, 0);
    plane.cell_scales.assign(components, 0);
    plane.bias.assign(components, 0);
    plane.input_scales.assign(components, 1);
    const std::size_t block_components = components / plane.block_count;
    plane.basis.assign(components * block_components, 0);
    for (std::size_t v = 0; v < components; ++v) {
      plane.basis[v * block_components + v % block_components] = 1;
    }
    plane.basis_scales.assign(components, 1);
    plane.scales.assign(options_.levels.size(), std::vector<std::uint8_t>(components, kNotCoded));
  }
  profile_.class_frequencies.resize(std::size_t{kScaleClasses} * kResidualSymbols);
  profile_.exponent_frequencies.resize(exponent_tables * kExponentSymbols);
  profile_.expected.resize(kScaleIndexMax + 1);
  profile_.offsets.assign(std::size_t{kScaleClasses} * kRestoredOffsets, 0);
  profile_.prior = options_.energy_prior;
  for (int shift = -kScaleShiftMax; shift <= kScaleShiftMax; ++shift) {
    const double energy =
        options_.energy_prior * std::exp2(options_.energy_carried * shift / 8) + 0.5;
    profile_.carried.push_back(static_cast<std::uint16_t>(std::min(energy, 65535.0)));
  }
  SetFirstTables(profile_);
}

// The commonest first token, if its K and V are the same everywhere.
void Fit::FitFirstToken() {
  std::map<TokenId, std::size_t> seen;
  for (std::size_t i = 0; i < rows_->sample_count(); ++i) ++seen[rows_->tokens_of(i)[0]];
  const auto commonest = std::max_element(
      seen.begin(), seen.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<double> sums(profile_.component_count()), squares(sums.size());
  std::vector<float> rows;
  for (std::size_t i = 0; i < rows_->sample_count(); ++i) {
    if (rows_->tokens_of(i)[0] != commonest->first) continue;
    std::size_t at = 0;
    for (const PlaneShape& plane : profile_.planes) {
      rows.resize(rows_->tokens_of(i).size() * plane.components());
      rows_->ReadSample(i, plane, rows);
      for (std::size_t c = 0; c < plane.components(); ++c, ++at) {
        sums[at] += rows[c];
        squares[at] += double{rows[c]} * rows[c];
      }
    }
  }
  const auto count = static_cast<double>(commonest->second);
  double spread = 0, energy = 0;
  for (std::size_t c = 0; c < sums.size(); ++c) {
    spread += squares[c] / count - (sums[c] / count) * (sums[c] / count);
    energy += squares[c] / count;
  }
  if (!std::isfinite(energy) || spread > 1e-4 * energy) return;
  profile_.has_first_token = true;
  profile_.first_token = commonest->first;
  for (const double sum : sums) profile_.first_rows.push_back(static_cast<float>(sum / count));
}

void Fit::ComputeExponents() {
  exponents_.assign(options_.levels.size(), {});
  for (auto& of_level : exponents_) {
    of_level.assign(profile_.planes.size(),
                    std::vector<std::int32_t>(rows_->row_count() * profile_.group_count));
  }
  if (profile_.importance.query_heads == 0) return;
  const ImportanceEstimator estimator(profile_, RopePairs::OfLayers(spec_));
  for (std::size_t i = 0; i < rows_->sample_count(); ++i) {
    if (IsCancelled()) return;
    const std::size_t token_count = rows_->tokens_of(i).size();
    const std::size_t rows = (token_count + kLanes - 1) / kLanes * kLanes;
    std::vector<std::vector<float>> planes;
    for (const PlaneShape& plane : profile_.planes) {
      rows_->ReadCounted(i, plane, planes.emplace_back(rows * plane.components()));
    }
    std::vector<std::uint32_t> tokens_behind(rows, 1);
    for (std::size_t t = 0; t < token_count; ++t) {
      tokens_behind[t] = static_cast<std::uint32_t>(token_count - t);
    }
    const std::vector<std::vector<float>> features = estimator.Features(planes, tokens_behind);
    for (std::size_t level = 0; level < options_.levels.size(); ++level) {
      const auto of_sample =
          estimator.Exponents(features, rows, options_.levels[level].importance_strength);
      const std::size_t first = rows_->first_row(i) * profile_.group_count;
      for (std::size_t plane = 0; plane < of_sample.size(); ++plane) {
        std::copy(of_sample[plane].begin(), of_sample[plane].end(),
                  exponents_[level][plane].begin() + static_cast<std::ptrdiff_t>(first));
      }
    }
    Report("importance", static_cast<double>(i) / static_cast<double>(rows_->sample_count()));
  }
}

// Those of layer 0 come first: its token table stands on all of them.
void Fit::FitPredictors(std::uint32_t plane, std::span<const float> rows,
                        const RestoredCodes& codes) {
  FitPredictor(*rows_, rows, codes, options_.ridge, plane, profile_, options_.is_cancelled);
  if (plane > 0) return;
  for (std::uint32_t i = 1; i < profile_.planes.size() && profile_.planes[i].layer == 0; ++i) {
    FitPredictor(*rows_, rows_->ReadPlane(profile_.planes[i]), codes, options_.ridge, i, profile_,
                 options_.is_cancelled);
  }
  FitTokenTable(*rows_, options_.vocabulary, options_.table_tokens_max, profile_);
}

std::vector<float> Fit::Predict(const PlaneTransform& transform, std::uint32_t plane,
                                const RestoredCodes& codes) const {
  std::vector<float> rows(rows_->row_count() * profile_.planes[plane].components());
  transform.Predict(codes, rows);
  PredictFromTokens(profile_, plane, rows_->tokens(), rows);
  return rows;
}

std::vector<float> Fit::Residual(std::span<const float> rows,
                                 std::span<const float> predicted) const {
  const std::size_t components = rows.size() / rows_->row_count();
  std::vector<float> residual(rows.size());
  for (std::size_t row = 0; row < rows_->row_count(); ++row) {
    if (!rows_->counts(row)) continue;
    for (std::size_t at = row * components; at < (row + 1) * components; ++at) {
      residual[at] = rows[at] - predicted[at];
    }
  }
  return residual;
}

void Fit::FitScales(std::uint32_t plane, std::size_t level, const std::vector<float>& values) {
  std::vector<std::uint8_t>& scales = profile_.plane_profiles[plane].scales[level];
  std::fill(scales.begin(), scales.end(), kNotCoded);
  const std::size_t width = profile_.planes[plane].components();
  for (std::size_t v = 0; v < width; ++v) {
    double square = 0;
    for (std::size_t row = 0; row < rows_->row_count(); ++row) {
      if (rows_->counts(row)) square += double{values[row * width + v]} * values[row * width + v];
    }
    const double steps =
        std::sqrt(square / static_cast<double>(rows_->counted())) / profile_.levels[level].step;
    const double index = 8 * (std::log2(std::max(steps, 1e-9)) + 8);
    if (index < kScaleIndexMin) continue;
    scales[v] = static_cast<std::uint8_t>(std::min(index + 0.5, double{kScaleIndexMax}));
  }
}

void Fit::Pass(std::size_t level, bool fit, SymbolFit& symbols) {
  carry_.assign(rows_->active().size(), {});
  RestoredCodes codes(profile_.planes.size(), rows_->row_count());
  for (std::uint32_t plane = 0; plane < profile_.planes.size(); ++plane) {
    PlaneProfile& of = profile_.plane_profiles[plane];
    const PlaneShape& shape = profile_.planes[plane];
    if (IsCancelled()) return;
    const std::vector<float> rows = rows_->ReadPlane(shape);
    if (fit) FitPredictors(plane, rows, codes);
    if (IsCancelled()) return;
    std::optional<PlaneTransform> transform(std::in_place, profile_, plane);
    std::vector<float> restored = Predict(*transform, plane, codes);
    const std::vector<float> residual = Residual(rows, restored);
    if (fit) {
      const std::span<const float> metric =
          material_.metrics.empty() ? std::span<const float>() : material_.metrics[plane];
      FitBasis(residual, rows_->counted(), metric, options_.metric_shrinkage, of,
               variances_.empty() ? 0 : variances_[plane]);
      transform.emplace(profile_, plane);
    }
    if (IsCancelled()) return;
    std::vector<float> values(rows.size());
    transform->Analyze(residual, values);
    FitScales(plane, level, values);
    symbols.Code(profile_, plane, level, rows_->active(), exponents_[level][plane], carry_, values);
    transform->AddResidual(values, restored);
    codes.Add(plane, of, shape, restored);
    Report(fit ? "predictors" : "tables",
           static_cast<double>(plane) / static_cast<double>(profile_.planes.size()));
  }
}

// How far predictions from exact rows miss, after RoPE, where exact frames code the numbers.
void Fit::FitCells() {
  RestoredCodes codes(profile_.planes.size(), rows_->row_count());
  for (std::uint32_t plane = 0; plane < profile_.planes.size(); ++plane) {
    PlaneProfile& of = profile_.plane_profiles[plane];
    const PlaneShape& shape = profile_.planes[plane];
    const std::size_t components = shape.components();
    if (IsCancelled()) return;
    const std::vector<float> rows = rows_->ReadPlane(shape);
    std::vector<float> residual =
        Residual(rows, Predict(PlaneTransform(profile_, plane), plane, codes));
    rows_->Rotate(shape, residual);
    for (std::size_t c = 0; c < components; ++c) {
      double sum = 0;
      for (std::size_t row = 0; row < rows_->row_count(); ++row) {
        if (rows_->counts(row)) sum += std::abs(residual[row * components + c]);
      }
      // Of a normal distribution with this mean absolute value.
      const double deviation =
          std::max(1.2533 * sum / static_cast<double>(rows_->counted()), 1e-30);
      const double exponent = std::clamp(std::floor(std::log2(deviation)) - 2, -100.0, 100.0);
      const double index = 8 * (std::log2(deviation) - exponent + 8);
      of.cell_exponents[c] = static_cast<std::int8_t>(exponent);
      of.cell_scales[c] =
          static_cast<std::uint8_t>(std::clamp(index + 0.5, 0.0, double{kScaleIndexMax}));
    }
    codes.Add(plane, of, shape, rows);
    Report("cells", static_cast<double>(plane) / static_cast<double>(profile_.planes.size()));
  }
}

absl::StatusOr<ResidualProfile> Fit::Run() {
  KV_RETURN_IF_ERROR(Open());
  const std::size_t level_count = options_.levels.size();
  total_ = static_cast<double>(1 + 2 + 1 + static_cast<std::size_t>(options_.rounds) * level_count);
  FitFirstToken();
  ComputeExponents();
  done_ = 1;
  FitLevels();
  FitCells();
  if (IsCancelled()) return absl::CancelledError("fit: cancelled");
  ++done_;
  Report("done", 0);
  KV_RETURN_IF_ERROR(profile_.CheckConsistency());
  return std::move(profile_);
}

absl::StatusOr<ResidualProfile> Fit::RunOfDifferences(
    const ResidualProfile& whole, std::span<const FitRows::ReferencedRun> runs) {
  KV_RETURN_IF_ERROR(Open());
  total_ = static_cast<double>(1 + 2 +
                               static_cast<std::size_t>(options_.rounds) * options_.levels.size());
  ComputeExponents();
  done_ = 1;
  profile_.importance = {};
  rows_->TakeDifferences(runs);
  // Steps are in units of the same size.
  for (const PlaneProfile& plane : whole.plane_profiles) {
    variances_.push_back(VarianceOfBasis(plane));
  }
  FitLevels();
  if (IsCancelled()) return absl::CancelledError("fit: cancelled");
  Report("done", 0);
  KV_RETURN_IF_ERROR(profile_.CheckConsistency());
  return std::move(profile_);
}

void Fit::FitLevels() {
  const std::size_t level_count = options_.levels.size();
  for (int round = 0; round < options_.rounds; ++round) {
    SymbolFit symbols(profile_);
    if (round == 0) {
      SymbolFit of_fit(profile_);
      Pass(options_.fitted_level, true, of_fit);
      of_fit.SetTables(profile_);
      done_ += 2;
    }
    for (std::size_t level = 0; level < level_count; ++level) {
      Pass(level, false, symbols);
      ++done_;
    }
    symbols.SetTables(profile_);
  }
}

// Raw KV of a text as its blocks are restored at a level, its last part as it is.
absl::StatusOr<std::vector<std::byte>> Restored(const ResidualCodec& codec, const ModelSpec& spec,
                                                const KvSample& sample, Quality quality) {
  const KvGeometry of_block(spec);
  ModelSpec as_block = spec;
  as_block.block_tokens = static_cast<std::uint32_t>(sample.tokens.size());
  const KvGeometry of_text(as_block);
  const std::size_t block_tokens = spec.block_tokens;
  const std::size_t block_count = sample.tokens.size() / block_tokens;
  std::vector<std::byte> text(sample.raw.begin(), sample.raw.end());
  // copy(bytes of the text, bytes of the block)
  const auto for_each_piece = [&](std::size_t block, std::span<std::byte> raw, auto copy) {
    for (std::uint32_t layer = 0; layer < of_block.layer_count(); ++layer) {
      for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
        const std::size_t bytes = of_block.kind_bytes(layer, kind);
        copy(std::span(text).subspan(of_text.kind_begin(layer, kind) + block * bytes, bytes),
             raw.subspan(of_block.kind_begin(layer, kind), bytes));
      }
    }
  };
  std::vector<std::vector<std::byte>> raw(block_count,
                                          std::vector<std::byte>(of_block.raw_block_bytes()));
  std::vector<BlockToEncode> to_encode;
  for (std::size_t b = 0; b < block_count; ++b) {
    for_each_piece(b, raw[b], [](std::span<std::byte> of_text_bytes, std::span<std::byte> to) {
      std::copy(of_text_bytes.begin(), of_text_bytes.end(), to.begin());
    });
    to_encode.push_back({.first_position = static_cast<std::uint32_t>(b * block_tokens),
                         .session_tokens = static_cast<std::uint32_t>(sample.tokens.size()),
                         .tokens = sample.tokens.subspan(b * block_tokens, block_tokens),
                         .raw = raw[b]});
  }
  KV_ASSIGN_OR_RETURN(const std::vector<EncodedBlock> encoded, codec.Encode(to_encode, quality));
  std::vector<BlockToDecode> to_decode;
  for (std::size_t b = 0; b < block_count; ++b) {
    if (encoded[b].body.empty()) continue;  // it is kept as it is
    to_decode.push_back({.body = encoded[b].body,
                         .section_bytes = encoded[b].section_bytes,
                         .quality = quality,
                         .tokens = to_encode[b].tokens,
                         .raw = raw[b]});
  }
  KV_RETURN_IF_ERROR(codec.Decode(to_decode));
  for (std::size_t b = 0; b < block_count; ++b) {
    for_each_piece(b, raw[b], [](std::span<std::byte> of_text_bytes, std::span<std::byte> from) {
      std::copy(from.begin(), from.end(), of_text_bytes.begin());
    });
  }
  return text;
}

}  // namespace

std::uint64_t FitWorkingBytes(const ModelSpec& spec, const ResidualFitOptions& options,
                              std::uint64_t token_count) {
  // Matrices of doubles that are there at a time: of inputs by inputs, of inputs by components, and
  // of components by components, for eigenvectors.
  constexpr double kOfInputs = 2.5 * 8, kOfPredictions = 3 * 8, kOfBasis = 10 * 8;
  // Numbers of a token in the plane that is fitted, and of its codes in each.
  constexpr double kOfRows = 50, kOfCodes = 1;
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  double kept = 0, peak = 0, widest = 0, all = 0;
  for (std::uint32_t i = 0; i < planes.size(); ++i) {
    const double blocks = options.block_per_head ? planes[i].heads : 1;
    const auto components = static_cast<double>(planes[i].components());
    const double of_block = components / blocks;
    double inputs = 0;
    for (const std::uint32_t input : InputPlanes(planes, i, options.inputs)) {
      inputs += static_cast<double>(planes[input].components()) / blocks;
    }
    kept += components * (inputs + of_block);
    const double transform = 4 * components * (inputs + of_block);
    peak = std::max(peak, transform + kOfInputs * inputs * inputs +
                              kOfPredictions * inputs * of_block + kOfBasis * of_block * of_block);
    widest = std::max(widest, components);
    all += components;
  }
  return static_cast<std::uint64_t>(
      kept + peak + static_cast<double>(token_count) * (kOfRows * widest + kOfCodes * all));
}

absl::Status FitDifferences(const ModelSpec& spec, std::span<const KvSample> samples,
                            const FitMaterial& material, const ResidualFitOptions& options,
                            ResidualProfile& profile) {
  const DifferenceFitOptions& of = options.differences;
  KV_RETURN_IF_ERROR(CheckSamples(spec, samples));
  if (profile.planes != PlanesOf(spec)) {
    return absl::InvalidArgumentError("fit: profile: layers differ from those of the model");
  }
  if (of.run_tokens_min == 0) return absl::InvalidArgumentError("fit: run_tokens_min is 0");
  if (!(of.step_factor > 0)) {
    return absl::InvalidArgumentError("fit: step_factor must be above 0");
  }
  profile.differences.clear();
  std::vector<std::span<const TokenId>> texts;
  for (const KvSample& sample : samples) texts.push_back(sample.tokens);
  const std::vector<SharedRun> shared = FindSharedRuns(texts, of.run_tokens_min);
  std::size_t tokens = 0;
  for (const SharedRun& run : shared) tokens += run.token_count;
  if (of.tokens_min == 0 || tokens < std::max<std::size_t>(of.tokens_min, 64)) {
    return absl::OkStatus();
  }

  const auto finest = std::min_element(
      profile.levels.begin(), profile.levels.end(),
      [](const ResidualLevel& a, const ResidualLevel& b) { return a.step < b.step; });
  ModelSpec in_blocks = spec;
  in_blocks.block_tokens = kLanes;
  KV_ASSIGN_OR_RETURN(const auto codec, ResidualCodec::Create(in_blocks, ProfileId{}, profile));
  std::map<std::size_t, std::size_t> members;              // text -> among those that are coded
  std::map<std::size_t, std::vector<std::byte>> restored;  // text -> its KV
  std::vector<KvSample> to_code;
  std::vector<FitRows::ReferencedRun> runs;
  for (const SharedRun& run : shared) {
    const auto [member, is_new] = members.try_emplace(run.text, to_code.size());
    if (is_new) to_code.push_back(samples[run.text]);
    std::vector<std::byte>& raw = restored[run.earlier_text];
    if (raw.empty()) {
      KV_ASSIGN_OR_RETURN(raw,
                          Restored(*codec, in_blocks, samples[run.earlier_text], finest->quality));
    }
    runs.push_back({.sample = member->second,
                    .first_token = run.first_token,
                    .token_count = run.token_count,
                    .reference = {.tokens = samples[run.earlier_text].tokens, .raw = raw},
                    .offset = run.offset});
  }

  FitMaterial of_differences = material;
  if (of.importance_strength == 0) {
    of_differences.group_count = 0;
    of_differences.importance = {};
  }
  ResidualFitOptions inner = options;
  inner.inputs = of.inputs;
  inner.levels = profile.levels;
  inner.rounds = of.rounds;
  inner.energy_prior = of.energy_prior;
  inner.energy_carried = of.energy_carried;
  inner.table_tokens_max = 0;
  inner.vocabulary = {};
  for (ResidualLevel& level : inner.levels) {
    level.step *= of.step_factor;
    level.rate_weight = of.rate_weight;
    level.importance_strength = of.importance_strength;
    level.bits_per_component = level.mean_kl = level.kl_p99 = 0;
  }
  inner.fitted_level = std::min(inner.fitted_level, inner.levels.size() - 1);
  KV_ASSIGN_OR_RETURN(ResidualProfile fitted,
                      Fit(spec, to_code, of_differences, inner).RunOfDifferences(profile, runs));
  profile.differences.push_back(std::move(fitted));
  return profile.CheckConsistency();
}

absl::StatusOr<ResidualProfile> FitResidualProfile(const ModelSpec& spec,
                                                   std::span<const KvSample> samples,
                                                   const FitMaterial& material,
                                                   const ResidualFitOptions& options) {
  KV_ASSIGN_OR_RETURN(ResidualProfile profile, Fit(spec, samples, material, options).Run());
  ResidualFitOptions of_differences = options;
  of_differences.progress = nullptr;  // all is done, as far as it was told
  KV_RETURN_IF_ERROR(FitDifferences(spec, samples, material, of_differences, profile));
  return profile;
}

}  // namespace kvtrie
