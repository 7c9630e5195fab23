#include "storage/codec/residual_fit.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/importance.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/profile_header.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/residual_entropy.h"
#include "storage/codec/residual_level.h"
#include "storage/codec/symbol_fit.h"

namespace kvtrie {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr std::size_t kChunkRows = 4096;  // of a product over all samples

// Codes reach that many standard deviations of what they stand for.
constexpr float kInputDeviations = 6;
// A value whose scale is below 2^-5 steps is zero in practice, important tokens included.
constexpr int kScaleIndexMin = 24;

constexpr double kReportedShare = 0.01;

Eigen::Index Index(std::size_t size) { return static_cast<Eigen::Index>(size); }

class Fit {
 public:
  Fit(const ModelSpec& spec, std::span<const KvSample> samples, const FitMaterial& material,
      const ResidualFitOptions& options)
      : spec_(spec), samples_(samples), material_(material), options_(options) {}

  absl::StatusOr<ResidualProfile> Run();

 private:
  absl::Status CheckOptions() const;
  absl::Status CheckMaterial() const;
  absl::Status Open();
  void FitFirstToken();
  void FitTokenTable();
  void ComputeExponents();

  // One level over all samples. `fit`: predictions and bases too.
  void Pass(std::size_t level, bool fit, SymbolFit& symbols);
  void ReadPlane(std::uint32_t plane, std::vector<float>& rows) const;
  void FitPrediction(std::uint32_t plane, const std::vector<float>& rows,
                     const RestoredCodes& codes);
  void FitBasis(std::uint32_t plane, const std::vector<float>& residual);
  void FitScales(std::uint32_t plane, std::size_t level, const std::vector<float>& values);
  void FitCells();
  void Report(std::string_view what, double share_of_step);

  bool counts(std::size_t row) const { return (active_[row / kLanes] >> row % kLanes & 1) != 0; }

  const ModelSpec spec_;
  const std::span<const KvSample> samples_;
  const FitMaterial& material_;
  const ResidualFitOptions& options_;

  ResidualProfile profile_;
  std::vector<std::unique_ptr<RawKv>> raw_kv_;  // [sample], some shared
  std::vector<std::size_t> raw_kv_of_;
  std::vector<RopeAngles> angles_;
  std::vector<std::size_t> first_row_;  // [sample]
  std::size_t row_count_ = 0;
  std::size_t counted_rows_ = 0;
  std::vector<LaneMask> active_;                                   // [group of 16 rows]
  std::vector<TokenId> tokens_;                                    // [row], of padding too
  std::vector<std::vector<std::vector<std::int32_t>>> exponents_;  // [level][plane]
  std::vector<ResidualCarry> carry_;                               // [group]
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

absl::Status Fit::Open() {
  KV_RETURN_IF_ERROR(CheckOptions());
  profile_.planes = PlanesOf(spec_);
  KV_RETURN_IF_ERROR(CheckMaterial());
  if (samples_.empty()) return absl::InvalidArgumentError("fit: no samples");
  KV_RETURN_IF_ERROR(CheckSamples(spec_, samples_));
  std::map<std::size_t, std::size_t> raw_kv_of_length;
  for (const KvSample& sample : samples_) {
    ModelSpec of_sample = spec_;
    of_sample.block_tokens = static_cast<std::uint32_t>(sample.tokens.size());
    const auto [known, is_new] = raw_kv_of_length.try_emplace(sample.tokens.size(), raw_kv_.size());
    if (is_new) raw_kv_.push_back(std::make_unique<RawKv>(KvGeometry(of_sample), spec_.rope));
    raw_kv_of_.push_back(known->second);
    angles_.push_back(raw_kv_[known->second]->AnglesAt(0));
    first_row_.push_back(row_count_);
    row_count_ += (sample.tokens.size() + kLanes - 1) / kLanes * kLanes;
  }

  active_.assign(row_count_ / kLanes, 0);
  tokens_.assign(row_count_, 0);
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    std::vector<bool> extreme(samples_[i].tokens.size());
    extreme[0] = true;  // kept apart, see ResidualCodec
    for (const PlaneShape& plane : profile_.planes) {
      for (const std::uint32_t token :
           raw_kv_[raw_kv_of_[i]]->ExtremeTokens(samples_[i].raw, plane.layer, plane.kind())) {
        extreme[token] = true;
      }
    }
    for (std::size_t t = 0; t < extreme.size(); ++t) {
      const std::size_t row = first_row_[i] + t;
      tokens_[row] = samples_[i].tokens[t];
      if (extreme[t]) continue;
      active_[row / kLanes] = static_cast<LaneMask>(active_[row / kLanes] | 1u << row % kLanes);
      ++counted_rows_;
    }
  }
  if (counted_rows_ < 64)
    return absl::InvalidArgumentError("fit: samples have fewer than 64 tokens");

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
  return absl::OkStatus();
}

void Fit::ReadPlane(std::uint32_t plane, std::vector<float>& rows) const {
  const PlaneShape& shape = profile_.planes[plane];
  const std::size_t components = shape.components();
  rows.assign(row_count_ * components, 0);
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    raw_kv_[raw_kv_of_[i]]->ReadRows(
        samples_[i].raw, shape.layer, shape.kind(), angles_[i],
        std::span(rows).subspan(first_row_[i] * components,
                                samples_[i].tokens.size() * components));
  }
  for (std::size_t row = 0; row < row_count_; ++row) {
    if (!counts(row)) std::fill_n(rows.begin() + Index(row * components), components, 0.0f);
  }
}

// The commonest first token, if its K and V are the same everywhere.
void Fit::FitFirstToken() {
  std::map<TokenId, std::size_t> seen;
  for (const KvSample& sample : samples_) ++seen[sample.tokens[0]];
  const auto commonest = std::max_element(
      seen.begin(), seen.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<double> sums(profile_.component_count()), squares(sums.size());
  std::vector<float> rows;
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    if (samples_[i].tokens[0] != commonest->first) continue;
    std::size_t at = 0;
    for (const PlaneShape& plane : profile_.planes) {
      rows.resize(samples_[i].tokens.size() * plane.components());
      raw_kv_[raw_kv_of_[i]]->ReadRows(samples_[i].raw, plane.layer, plane.kind(), angles_[i],
                                       rows);
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

// Layer 0 depends on the token alone: its rows are a table over the vocabulary, of which the
// profile holds the tokens that come most often.
void Fit::FitTokenTable() {
  std::map<TokenId, std::size_t> seen;
  for (std::size_t row = 0; row < row_count_; ++row) {
    if (counts(row)) ++seen[tokens_[row]];
  }
  std::vector<std::pair<std::size_t, TokenId>> by_count;
  for (const auto& [token, count] : seen) by_count.emplace_back(count, token);
  std::sort(by_count.begin(), by_count.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  by_count.resize(std::min(by_count.size(), options_.table_tokens_max));
  for (const auto& [count, token] : by_count) profile_.table_tokens.push_back(token);
  std::sort(profile_.table_tokens.begin(), profile_.table_tokens.end());

  const auto place = [&](TokenId token) {
    const auto found =
        std::lower_bound(profile_.table_tokens.begin(), profile_.table_tokens.end(), token);
    return found == profile_.table_tokens.end() || *found != token
               ? profile_.table_tokens.size()
               : static_cast<std::size_t>(found - profile_.table_tokens.begin());
  };
  std::size_t width = 0;
  for (const PlaneShape& plane : profile_.planes)
    width += plane.layer == 0 ? plane.components() : 0;
  profile_.table_rows.assign(profile_.table_tokens.size() * width, 0);
  std::size_t first = 0;
  std::vector<float> rows;
  for (std::uint32_t i = 0; i < profile_.planes.size() && profile_.planes[i].layer == 0; ++i) {
    const std::size_t components = profile_.planes[i].components();
    ReadPlane(i, rows);
    std::vector<double> sums(profile_.table_tokens.size() * components);
    std::vector<double> counts_of(profile_.table_tokens.size());
    for (std::size_t row = 0; row < row_count_; ++row) {
      const std::size_t entry = counts(row) ? place(tokens_[row]) : counts_of.size();
      if (entry == counts_of.size()) continue;
      ++counts_of[entry];
      for (std::size_t c = 0; c < components; ++c) {
        sums[entry * components + c] += rows[row * components + c];
      }
    }
    const PlaneProfile& plane = profile_.plane_profiles[i];
    for (std::size_t entry = 0; entry < counts_of.size(); ++entry) {
      for (std::size_t c = 0; c < components; ++c) {
        const double mean = sums[entry * components + c] / counts_of[entry];
        const double code = (mean - plane.bias[c]) / plane.input_scales[c];
        profile_.table_rows[entry * width + first + c] =
            static_cast<std::int8_t>(std::nearbyint(std::clamp(code, -127.0, 127.0)));
      }
    }
    first += components;
  }
}

void Fit::ComputeExponents() {
  exponents_.assign(options_.levels.size(), {});
  for (auto& of_level : exponents_) {
    of_level.assign(profile_.planes.size(),
                    std::vector<std::int32_t>(row_count_ * profile_.group_count));
  }
  if (profile_.importance.query_heads == 0) return;
  const ImportanceEstimator estimator(profile_, RopePairs::OfLayers(spec_));
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    const std::size_t rows = (samples_[i].tokens.size() + kLanes - 1) / kLanes * kLanes;
    std::vector<std::vector<float>> planes;
    for (const PlaneShape& plane : profile_.planes) {
      std::vector<float>& to = planes.emplace_back(rows * plane.components());
      raw_kv_[raw_kv_of_[i]]->ReadRows(
          samples_[i].raw, plane.layer, plane.kind(), angles_[i],
          std::span(to).first(samples_[i].tokens.size() * plane.components()));
      for (std::size_t row = 0; row < samples_[i].tokens.size(); ++row) {
        if (counts(first_row_[i] + row)) continue;
        std::fill_n(to.begin() + Index(row * plane.components()), plane.components(), 0.0f);
      }
    }
    std::vector<std::uint32_t> tokens_behind(rows, 1);
    for (std::size_t t = 0; t < samples_[i].tokens.size(); ++t) {
      tokens_behind[t] = static_cast<std::uint32_t>(samples_[i].tokens.size() - t);
    }
    const std::vector<std::vector<float>> features = estimator.Features(planes, tokens_behind);
    for (std::size_t level = 0; level < options_.levels.size(); ++level) {
      const auto of_sample =
          estimator.Exponents(features, rows, options_.levels[level].importance_strength);
      for (std::size_t plane = 0; plane < of_sample.size(); ++plane) {
        std::copy(of_sample[plane].begin(), of_sample[plane].end(),
                  exponents_[level][plane].begin() + Index(first_row_[i] * profile_.group_count));
      }
    }
    Report("importance", static_cast<double>(i) / static_cast<double>(samples_.size()));
  }
}

// Ridge regression on codes, as the decoder will have them.
void Fit::FitPrediction(std::uint32_t plane, const std::vector<float>& rows,
                        const RestoredCodes& codes) {
  PlaneProfile& of = profile_.plane_profiles[plane];
  const std::size_t components = profile_.planes[plane].components();
  const std::size_t block_components = components / of.block_count;
  std::vector<double> mean(components), square(components);
  for (std::size_t row = 0; row < row_count_; ++row) {
    if (!counts(row)) continue;
    for (std::size_t c = 0; c < components; ++c) {
      const double x = rows[row * components + c];
      mean[c] += x;
      square[c] += x * x;
    }
  }
  const auto n = static_cast<double>(counted_rows_);
  for (std::size_t c = 0; c < components; ++c) {
    mean[c] /= n;
    const double variance = std::max(square[c] / n - mean[c] * mean[c], 0.0);
    of.bias[c] = static_cast<float>(mean[c]);
    const double scale = std::sqrt(variance) * kInputDeviations / 127;
    of.input_scales[c] = static_cast<float>(std::max(scale, 1e-12));
  }
  of.weight_scales.assign(components, 0);

  const std::vector<std::uint32_t> inputs = InputPlanes(profile_.planes, plane, of.inputs);
  std::size_t in = 0;
  for (const std::uint32_t input : inputs) {
    in += profile_.planes[input].components() / of.block_count;
  }
  of.weights.assign(components * in, 0);
  if (in == 0) return;

  for (std::size_t b = 0; b < of.block_count; ++b) {
    // In units of the inputs' deviations, so that the ridge treats them alike.
    Eigen::MatrixXd gram = Eigen::MatrixXd::Zero(Index(in), Index(in));
    Eigen::MatrixXd cross = Eigen::MatrixXd::Zero(Index(in), Index(block_components));
    Matrix x(kChunkRows, in), y(kChunkRows, block_components);
    Matrix chunk_gram(in, in), chunk_cross(in, block_components);
    std::size_t filled = 0;
    const auto add_chunk = [&] {
      const std::span<const float> x_rows(x.data(), filled * in);
      const std::span<const float> y_rows(y.data(), filled * block_components);
      TransposedProduct(x_rows, in, x_rows, in, {chunk_gram.data(), in * in});
      TransposedProduct(x_rows, in, y_rows, block_components,
                        {chunk_cross.data(), in * block_components});
      gram += chunk_gram.cast<double>();
      cross += chunk_cross.cast<double>();
      filled = 0;
    };
    for (std::size_t row = 0; row < row_count_; ++row) {
      if (!counts(row)) continue;
      Eigen::Index at = 0;
      for (const std::uint32_t input : inputs) {
        const std::size_t width = profile_.planes[input].components() / of.block_count;
        const std::uint8_t* const from =
            codes.Of(input).data() + (row * of.block_count + b) * width;
        for (std::size_t i = 0; i < width; ++i) {
          x(Index(filled), at++) = (static_cast<float>(from[i]) - 128) * (kInputDeviations / 127);
        }
      }
      for (std::size_t c = 0; c < block_components; ++c) {
        const std::size_t component = b * block_components + c;
        y(Index(filled), Index(c)) = rows[row * components + component] - of.bias[component];
      }
      if (++filled == kChunkRows) add_chunk();
    }
    add_chunk();
    gram.diagonal().array() += options_.ridge * gram.trace() / static_cast<double>(in);
    const Eigen::MatrixXd solved = gram.ldlt().solve(cross);  // [in][block component]
    for (std::size_t c = 0; c < block_components; ++c) {
      const auto column = solved.col(Index(c));
      const double scale =
          std::max(column.cwiseAbs().maxCoeff() / IntegerProduct::kWeightMax, 1e-30);
      const std::size_t component = b * block_components + c;
      of.weight_scales[component] = static_cast<float>(scale * (kInputDeviations / 127));
      for (std::size_t i = 0; i < in; ++i) {
        of.weights[component * in + i] =
            static_cast<std::int8_t>(std::nearbyint(column(Index(i)) / scale));
      }
    }
  }
}

// The residual's principal components in the metric: where an error costs the same in every
// direction.
void Fit::FitBasis(std::uint32_t plane, const std::vector<float>& residual) {
  PlaneProfile& of = profile_.plane_profiles[plane];
  const std::size_t components = profile_.planes[plane].components();
  const std::size_t size = components / of.block_count;
  double mean_variance = 0;
  for (const float value : residual) mean_variance += double{value} * value;
  mean_variance /= static_cast<double>(counted_rows_ * components);

  for (std::size_t b = 0; b < of.block_count; ++b) {
    Eigen::MatrixXd covariance = Eigen::MatrixXd::Zero(Index(size), Index(size));
    Matrix chunk(kChunkRows, size), chunk_covariance(size, size);
    for (std::size_t row = 0; row < row_count_; row += kChunkRows) {
      const std::size_t count = std::min(kChunkRows, row_count_ - row);
      for (std::size_t i = 0; i < count; ++i) {
        std::copy_n(residual.data() + (row + i) * components + b * size, size,
                    chunk.data() + i * size);
      }
      const std::span<const float> rows(chunk.data(), count * size);
      TransposedProduct(rows, size, rows, size, {chunk_covariance.data(), size * size});
      covariance += chunk_covariance.cast<double>();
    }
    covariance /= static_cast<double>(counted_rows_);

    Eigen::MatrixXd metric(Index(size), Index(size));
    if (material_.metrics.empty()) {
      metric.setIdentity();
      metric /= std::max(mean_variance, 1e-30);
    } else {
      for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t j = 0; j < size; ++j) {
          metric(Index(i), Index(j)) =
              material_.metrics[plane][(b * size + i) * components + b * size + j];
        }
      }
      const double shrinkage = options_.metric_shrinkage;
      metric.diagonal().array() += shrinkage * metric.trace() / static_cast<double>(size);
      metric /= 1 + shrinkage;
    }
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> of_metric(metric);
    const Eigen::VectorXd floor =
        of_metric.eigenvalues().cwiseMax(of_metric.eigenvalues().maxCoeff() * 1e-9).cwiseMax(1e-30);
    const Eigen::MatrixXd root =
        of_metric.eigenvectors() * floor.cwiseSqrt().asDiagonal();  // metric = root root^T
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> principal(root.transpose() * covariance *
                                                                   root);
    // Values = residual . analysis; the largest come first.
    const Eigen::MatrixXd analysis = root * principal.eigenvectors().rowwise().reverse();
    const Eigen::MatrixXd basis = analysis.inverse();
    for (std::size_t v = 0; v < size; ++v) {
      const auto row = basis.row(Index(v));
      const double scale = std::max(row.cwiseAbs().maxCoeff() / 127, 1e-30);
      of.basis_scales[b * size + v] = static_cast<float>(scale);
      for (std::size_t c = 0; c < size; ++c) {
        of.basis[(b * size + v) * size + c] =
            static_cast<std::int8_t>(std::nearbyint(row(Index(c)) / scale));
      }
    }
  }
}

void Fit::FitScales(std::uint32_t plane, std::size_t level, const std::vector<float>& values) {
  std::vector<std::uint8_t>& scales = profile_.plane_profiles[plane].scales[level];
  std::fill(scales.begin(), scales.end(), kNotCoded);
  const std::size_t width = profile_.planes[plane].components();
  for (std::size_t v = 0; v < width; ++v) {
    double square = 0;
    for (std::size_t row = 0; row < row_count_; ++row) {
      if (counts(row)) square += double{values[row * width + v]} * values[row * width + v];
    }
    const double steps =
        std::sqrt(square / static_cast<double>(counted_rows_)) / profile_.levels[level].step;
    const double index = 8 * (std::log2(std::max(steps, 1e-9)) + 8);
    if (index < kScaleIndexMin) continue;
    scales[v] = static_cast<std::uint8_t>(std::min(index + 0.5, double{kScaleIndexMax}));
  }
}

void Fit::Pass(std::size_t level, bool fit, SymbolFit& symbols) {
  carry_.assign(active_.size(), {});
  RestoredCodes codes(profile_.planes.size(), row_count_);
  std::vector<float> rows;
  for (std::uint32_t plane = 0; plane < profile_.planes.size(); ++plane) {
    PlaneProfile& of = profile_.plane_profiles[plane];
    const PlaneShape& shape = profile_.planes[plane];
    ReadPlane(plane, rows);
    if (fit) {
      FitPrediction(plane, rows, codes);
      if (plane == 0) {
        for (std::uint32_t i = 1; i < profile_.planes.size() && profile_.planes[i].layer == 0;
             ++i) {
          std::vector<float> of_first_layer;
          ReadPlane(i, of_first_layer);
          FitPrediction(i, of_first_layer, codes);
        }
        FitTokenTable();
      }
    }
    std::vector<float> restored(rows.size());
    std::optional<PlaneTransform> transform(std::in_place, profile_, plane);
    transform->Predict(codes, restored);
    if (shape.layer == 0) PredictFromTokens(profile_, plane, tokens_, restored);
    std::vector<float> residual(rows.size());
    for (std::size_t row = 0; row < row_count_; ++row) {
      if (!counts(row)) continue;
      for (std::size_t c = 0; c < shape.components(); ++c) {
        const std::size_t at = row * shape.components() + c;
        residual[at] = rows[at] - restored[at];
      }
    }
    if (fit) {
      FitBasis(plane, residual);
      transform.emplace(profile_, plane);
    }
    std::vector<float> values(row_count_ * shape.components());
    transform->Analyze(residual, values);
    FitScales(plane, level, values);
    symbols.Code(profile_, plane, level, active_, exponents_[level][plane], carry_, values);
    transform->AddResidual(values, restored);
    codes.Add(plane, of, shape, restored);
    Report(fit ? "predictors" : "tables",
           static_cast<double>(plane) / static_cast<double>(profile_.planes.size()));
  }
}

// How far predictions from exact rows miss, after RoPE, where exact frames code the numbers.
void Fit::FitCells() {
  RestoredCodes codes(profile_.planes.size(), row_count_);
  std::vector<float> rows;
  for (std::uint32_t plane = 0; plane < profile_.planes.size(); ++plane) {
    PlaneProfile& of = profile_.plane_profiles[plane];
    const PlaneShape& shape = profile_.planes[plane];
    const std::size_t components = shape.components();
    ReadPlane(plane, rows);
    std::vector<float> residual(rows.size());
    PlaneTransform(profile_, plane).Predict(codes, residual);
    if (shape.layer == 0) PredictFromTokens(profile_, plane, tokens_, residual);
    for (std::size_t i = 0; i < rows.size(); ++i) residual[i] = rows[i] - residual[i];
    for (std::size_t i = 0; i < samples_.size(); ++i) {
      raw_kv_[raw_kv_of_[i]]->RotateRows(
          std::span(residual).subspan(first_row_[i] * components,
                                      samples_[i].tokens.size() * components),
          shape.layer, shape.kind(), angles_[i]);
    }
    for (std::size_t c = 0; c < components; ++c) {
      double sum = 0;
      for (std::size_t row = 0; row < row_count_; ++row) {
        if (counts(row)) sum += std::abs(residual[row * components + c]);
      }
      // Of a normal distribution with this mean absolute value.
      const double deviation = std::max(1.2533 * sum / static_cast<double>(counted_rows_), 1e-30);
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
  FitCells();
  ++done_;
  Report("done", 0);
  KV_RETURN_IF_ERROR(profile_.CheckConsistency());
  return std::move(profile_);
}

}  // namespace

absl::StatusOr<ResidualProfile> FitResidualProfile(const ModelSpec& spec,
                                                   std::span<const KvSample> samples,
                                                   const FitMaterial& material,
                                                   const ResidualFitOptions& options) {
  return Fit(spec, samples, material, options).Run();
}

}  // namespace kvtrie
