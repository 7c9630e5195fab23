#include "storage/codec/fit_material.h"

#include <Eigen/Dense>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/importance.h"
#include "storage/codec/raw_kv.h"
#include "storage/kv/sealed_bytes.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kVersion = 1;

// Tokens at both ends of a text differ from all others: the first are attended to for want of
// better, the last by few.
constexpr std::size_t kSkippedTokens = 8;
constexpr float kImportanceFloor = 1e-12f;

Eigen::Index Index(std::size_t size) { return static_cast<Eigen::Index>(size); }

void WriteFloats(ByteWriter& writer, const std::vector<float>& values) {
  writer.Write(static_cast<std::uint32_t>(values.size()));
  writer.WriteText({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}
std::vector<float> ReadFloats(ByteReader& reader) {
  const std::size_t count = reader.Read<std::uint32_t>();
  const auto bytes = reader.ReadBytes(count * sizeof(float));
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

// In bfloat16: what is known of queries comes from some texts, and has errors far larger.
void WriteShort(ByteWriter& writer, const std::vector<float>& values) {
  writer.Write(static_cast<std::uint32_t>(values.size()));
  for (const float value : values) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    writer.Write(static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
  }
}
std::vector<float> ReadShort(ByteReader& reader) {
  const std::size_t count = reader.Read<std::uint32_t>();
  const auto bytes = reader.ReadBytes(count * sizeof(std::uint16_t));
  std::vector<float> values(bytes.size() / sizeof(std::uint16_t));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t high = LoadLittle<std::uint16_t>(bytes.data() + 2 * i);
    values[i] = std::bit_cast<float>(high << 16);
  }
  return values;
}

}  // namespace

absl::Status CheckSamples(const ModelSpec& spec, std::span<const KvSample> samples) {
  std::size_t heads = 0;  // of all planes
  for (const PlaneShape& plane : PlanesOf(spec)) heads += plane.heads;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const KvSample& sample = samples[i];
    const auto bad = [&](absl::string_view what, std::size_t is, std::size_t must_be) {
      return absl::InvalidArgumentError(
          absl::StrCat("sample ", i, ": ", what, " is ", is, ", its tokens take ", must_be));
    };
    if (sample.tokens.empty() || sample.tokens.size() > kBlockTokensMax) {
      return absl::InvalidArgumentError(absl::StrCat("sample ", i, ": ", sample.tokens.size(),
                                                     " tokens, must be 1 to ", kBlockTokensMax));
    }
    ModelSpec of_sample = spec;
    of_sample.block_tokens = static_cast<std::uint32_t>(sample.tokens.size());
    if (absl::Status valid = of_sample.Validate(); !valid.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("sample ", i, ": ", valid.message()));
    }
    const std::size_t raw_bytes = KvGeometry(of_sample).raw_block_bytes();
    if (sample.raw.size() != raw_bytes) return bad("size of raw KV", sample.raw.size(), raw_bytes);
    const std::size_t gradients = heads * sample.tokens.size();
    if (!sample.importance.empty() && sample.importance.size() != gradients) {
      return bad("count of importance", sample.importance.size(), gradients);
    }
    if (std::any_of(sample.importance.begin(), sample.importance.end(),
                    [](float x) { return !(x >= 0) || std::isinf(x); })) {
      return absl::InvalidArgumentError(
          absl::StrCat("sample ", i, ": importance is negative or not finite"));
    }
  }
  return absl::OkStatus();
}

std::string FitMaterial::Encode(std::span<const PlaneShape> planes) const {
  ByteWriter writer = StartSealed(kVersion);
  writer.Write(static_cast<std::uint32_t>(metrics.size()));
  for (std::size_t plane = 0; plane < metrics.size(); ++plane) {
    const std::size_t size = planes[plane].head_dim;
    const std::size_t components = planes[plane].components();
    KV_CHECK(metrics[plane].size() == components * components);
    for (std::size_t head = 0; head < planes[plane].heads; ++head) {
      const float* const block = metrics[plane].data() + head * size * (components + 1);
      // As correlations, whose rounding hurts no component more than another.
      std::vector<float> roots(size);
      for (std::size_t i = 0; i < size; ++i) {
        roots[i] = std::sqrt(std::max(block[i * components + i], 1e-30f));
        writer.Write(roots[i]);
      }
      for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t j = 0; j < i; ++j) {
          const float correlation = block[i * components + j] / (roots[i] * roots[j]);
          writer.Write(
              static_cast<std::int8_t>(std::nearbyint(std::clamp(correlation, -1.0f, 1.0f) * 127)));
        }
      }
    }
  }
  writer.Write(group_count);
  writer.Write(importance.query_heads);
  writer.Write(importance.covariance_rank);
  WriteShort(writer, importance.query_means);
  WriteShort(writer, importance.query_factors);
  WriteFloats(writer, importance.normalizers);
  WriteFloats(writer, importance.weights);
  return Seal(std::move(writer));
}

absl::StatusOr<FitMaterial> FitMaterial::Decode(std::span<const PlaneShape> planes,
                                                std::string_view bytes) {
  KV_ASSIGN_OR_RETURN(ByteReader reader, Unseal("fit material", kVersion, bytes));
  FitMaterial material;
  const std::size_t metric_count = reader.Read<std::uint32_t>();
  if (metric_count != 0 && metric_count != planes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("fit material: ", metric_count, " metrics for ", planes.size(), " planes"));
  }
  for (std::size_t plane = 0; plane < metric_count && reader.ok(); ++plane) {
    const std::size_t size = planes[plane].head_dim;
    const std::size_t components = planes[plane].components();
    if (reader.remaining_bytes() < planes[plane].heads * (size * 4 + size * (size - 1) / 2)) break;
    std::vector<float>& metric = material.metrics.emplace_back(components * components);
    for (std::size_t head = 0; head < planes[plane].heads; ++head) {
      float* const block = metric.data() + head * size * (components + 1);
      std::vector<float> roots(size);
      for (std::size_t i = 0; i < size; ++i) {
        roots[i] = reader.Read<float>();
        block[i * components + i] = roots[i] * roots[i];
      }
      for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t j = 0; j < i; ++j) {
          const float product =
              static_cast<float>(reader.Read<std::int8_t>()) / 127 * roots[i] * roots[j];
          block[i * components + j] = product;
          block[j * components + i] = product;
        }
      }
    }
  }
  material.group_count = reader.Read<std::uint32_t>();
  material.importance.query_heads = reader.Read<std::uint32_t>();
  material.importance.covariance_rank = reader.Read<std::uint32_t>();
  material.importance.query_means = ReadShort(reader);
  material.importance.query_factors = ReadShort(reader);
  material.importance.normalizers = ReadFloats(reader);
  material.importance.weights = ReadFloats(reader);
  if (!reader.Done() || material.metrics.size() != metric_count) {
    return absl::InvalidArgumentError("fit material: not of this model, or damaged");
  }
  for (const auto& metric : material.metrics) {
    if (!AllFinite(metric)) return absl::InvalidArgumentError("fit material: not finite");
  }
  KV_RETURN_IF_ERROR(CheckImportance(planes, material.group_count, material.importance));
  return material;
}

namespace {

std::vector<std::uint32_t> TokensBehind(const KvSample& sample, std::size_t row_count) {
  std::vector<std::uint32_t> behind(row_count, 1);
  for (std::size_t t = 0; t < sample.tokens.size(); ++t) {
    behind[t] = static_cast<std::uint32_t>(sample.tokens.size() - t);
  }
  return behind;
}

// Rows of all planes of one sample, padded to whole products; extreme tokens are zero.
std::vector<std::vector<float>> RowsOf(const RawKv& raw_kv, std::span<const PlaneShape> planes,
                                       const KvSample& sample, std::size_t row_count) {
  const RopeAngles angles = raw_kv.AnglesAt(0);
  std::vector<std::vector<float>> rows;
  for (const PlaneShape& plane : planes) {
    std::vector<float>& to = rows.emplace_back(row_count * plane.components());
    raw_kv.ReadRows(sample.raw, plane.layer, plane.kind(), angles,
                    std::span(to).first(sample.tokens.size() * plane.components()));
    for (const std::uint32_t token : raw_kv.ExtremeTokens(sample.raw, plane.layer, plane.kind())) {
      std::fill_n(to.begin() + Index(token * plane.components()), plane.components(), 0.0f);
    }
  }
  return rows;
}

}  // namespace

absl::StatusOr<ImportanceModel> FitImportance(const ModelSpec& spec,
                                              std::span<const KvSample> samples,
                                              const QueryStatistics& queries,
                                              const ImportanceFitOptions& options) {
  KV_RETURN_IF_ERROR(CheckSamples(spec, samples));
  bool with_gradients = false;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].tokens.size() <= 2 * kSkippedTokens) {
      return absl::InvalidArgumentError(absl::StrCat("importance: sample ", i, " has only ",
                                                     samples[i].tokens.size(), " tokens"));
    }
    with_gradients |= !samples[i].importance.empty();
  }
  if (!with_gradients) {
    return absl::InvalidArgumentError("importance: no sample has gradients");
  }
  ResidualProfile profile;  // what the estimator reads of one
  profile.planes = PlanesOf(spec);
  profile.group_count = options.group_per_head ? profile.planes[0].heads : 1;
  ImportanceModel& model = profile.importance;
  model.query_heads = queries.query_heads;
  model.covariance_rank = options.covariance_rank;
  std::size_t mean_count = 0, covariance_count = 0;
  for (const PlaneShape& plane : profile.planes) {
    if (options.group_per_head && plane.heads != profile.group_count) {
      return absl::InvalidArgumentError("importance: layers differ in their number of KV heads");
    }
    if (plane.is_v) continue;
    if (queries.query_heads == 0 || queries.query_heads % plane.heads != 0) {
      return absl::InvalidArgumentError("importance: query heads are no multiple of KV heads");
    }
    mean_count += std::size_t{queries.query_heads} * plane.head_dim;
    covariance_count += std::size_t{queries.query_heads} * plane.head_dim * plane.head_dim;
    model.covariance_rank = std::min(model.covariance_rank, plane.head_dim);
  }
  if (queries.means.size() != mean_count || queries.covariances.size() != covariance_count) {
    return absl::InvalidArgumentError("importance: query statistics are not of this model");
  }

  // Leading factors of each covariance.
  model.query_means.assign(queries.means.begin(), queries.means.end());
  const float* covariance = queries.covariances.data();
  for (const PlaneShape& plane : profile.planes) {
    if (plane.is_v) continue;
    const std::size_t dim = plane.head_dim;
    for (std::size_t head = 0; head < queries.query_heads; ++head, covariance += dim * dim) {
      const Eigen::Map<const Eigen::MatrixXf> of_head(covariance, Index(dim), Index(dim));
      const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solved(of_head.cast<double>());
      for (std::size_t r = 0; r < model.covariance_rank; ++r) {
        const Eigen::Index at = Index(dim - 1 - r);
        const double root = std::sqrt(std::max(solved.eigenvalues()[at], 0.0));
        for (std::size_t i = 0; i < dim; ++i) {
          model.query_factors.push_back(
              static_cast<float>(root * solved.eigenvectors()(Index(i), at)));
        }
      }
    }
  }
  const ImportanceSizes sizes = SizesOf(profile.planes, profile.group_count, model);
  model.normalizers.assign(sizes.normalizers, 0);
  model.weights.assign(sizes.weights, 0);

  ModelSpec of_sample = spec;
  const double passes = 3;
  double done = 0;
  const auto for_each = [&](const ImportanceEstimator& estimator, auto use) {
    for (const KvSample& sample : samples) {
      of_sample.block_tokens = static_cast<std::uint32_t>(sample.tokens.size());
      const RawKv raw_kv(KvGeometry(of_sample), spec.rope);
      const std::size_t row_count =
          (sample.tokens.size() + kProductRows - 1) / kProductRows * kProductRows;
      use(estimator, sample, RowsOf(raw_kv, profile.planes, sample, row_count), row_count);
      if (options.progress)
        options.progress(++done / (passes * static_cast<double>(samples.size())));
    }
  };

  // A text's mean attention is 1 by these.
  std::vector<double> logs(sizes.normalizers);
  for_each(ImportanceEstimator(profile, RopePairs::OfLayers(spec)),
           [&](const ImportanceEstimator& estimator, const KvSample& sample, const auto& rows,
               std::size_t row_count) {
             const std::vector<double> of_text =
                 estimator.LogMeanAttention(rows, row_count, 1, sample.tokens.size());
             for (std::size_t i = 0; i < logs.size(); ++i) logs[i] += of_text[i];
           });
  for (std::size_t i = 0; i < logs.size(); ++i) {
    model.normalizers[i] = static_cast<float>(logs[i] / static_cast<double>(samples.size()));
  }

  const std::size_t count = ImportanceFeatureCount(profile.planes);
  const std::size_t fits = profile.planes.size() * profile.group_count;
  std::vector<Eigen::MatrixXd> gram(profile.planes.back().layer + 1,
                                    Eigen::MatrixXd::Zero(Index(count), Index(count)));
  std::vector<Eigen::VectorXd> cross(fits, Eigen::VectorXd::Zero(Index(count)));
  std::vector<std::vector<double>> predicted_levels(fits);
  const ImportanceEstimator estimator(profile, RopePairs::OfLayers(spec));
  const auto target = [&](const KvSample& sample, std::size_t plane, std::size_t group,
                          std::size_t token) {
    const std::size_t heads = profile.planes[plane].heads;
    std::size_t before = 0;
    for (std::size_t p = 0; p < plane; ++p) before += profile.planes[p].heads;
    float sum = 0;
    for (std::size_t head = 0; head < heads; ++head) {
      if (profile.group_count > 1 && head != group) continue;
      sum += sample.importance[(before + head) * sample.tokens.size() + token];
    }
    return std::log(sum + kImportanceFloor);
  };
  for_each(estimator, [&](const ImportanceEstimator& of, const KvSample& sample, const auto& rows,
                          std::size_t row_count) {
    if (sample.importance.empty()) return;
    const std::vector<std::vector<float>> features =
        of.Features(rows, TokensBehind(sample, row_count));
    const std::size_t used = sample.tokens.size() - 2 * kSkippedTokens;
    std::vector<Eigen::MatrixXf> of_layer;
    for (std::size_t layer = 0; layer < features.size(); ++layer) {
      const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>
          all(features[layer].data(), Index(row_count), Index(count));
      of_layer.push_back(all.middleRows(Index(kSkippedTokens), Index(used)));
      gram[layer] += (of_layer.back().transpose() * of_layer.back()).template cast<double>();
    }
    Eigen::VectorXf y(Index(used));
    for (std::size_t plane = 0; plane < profile.planes.size(); ++plane) {
      for (std::size_t group = 0; group < profile.group_count; ++group) {
        for (std::size_t t = 0; t < used; ++t) {
          y(Index(t)) = target(sample, plane, group, kSkippedTokens + t);
        }
        cross[plane * profile.group_count + group] +=
            (of_layer[profile.planes[plane].layer].transpose() * y).template cast<double>();
      }
    }
  });
  std::vector<Eigen::VectorXd> solved;
  for (std::size_t i = 0; i < fits; ++i) {
    Eigen::MatrixXd regular = gram[profile.planes[i / profile.group_count].layer];
    const double n = regular(Index(count - 1), Index(count - 1));
    // The constant is free of the ridge.
    for (std::size_t f = 0; f + 1 < count; ++f) regular(Index(f), Index(f)) += 1e-4 * n + 1e-9;
    solved.push_back(regular.ldlt().solve(cross[i]));
  }

  // Steps have a mean of their own; only what a token differs by is importance. Its level: the mean
  // of what is predicted, over the tokens and groups of a plane.
  std::vector<double> sums(profile.planes.size()), tokens(profile.planes.size());
  for_each(estimator, [&](const ImportanceEstimator& of, const KvSample& sample, const auto& rows,
                          std::size_t row_count) {
    const std::vector<std::vector<float>> features =
        of.Features(rows, TokensBehind(sample, row_count));
    for (std::size_t plane = 0; plane < profile.planes.size(); ++plane) {
      for (std::size_t row = kSkippedTokens; row < sample.tokens.size(); ++row) {
        const float* const f = features[profile.planes[plane].layer].data() + row * count;
        for (std::size_t group = 0; group < profile.group_count; ++group) {
          const Eigen::VectorXd& w = solved[plane * profile.group_count + group];
          double log = 0;
          for (std::size_t i = 0; i < count; ++i) log += w[Index(i)] * f[i];
          sums[plane] += std::exp(std::min(log, 60.0));
          ++tokens[plane];
        }
      }
    }
  });
  for (std::size_t i = 0; i < fits; ++i) {
    const std::size_t plane = i / profile.group_count;
    solved[i][Index(count - 1)] -= std::log(std::max(sums[plane] / tokens[plane], 1e-300));
    for (std::size_t f = 0; f < count; ++f) {
      model.weights[i * count + f] = static_cast<float>(solved[i][Index(f)]);
    }
  }
  if (!AllFinite(model.query_means) || !AllFinite(model.query_factors) ||
      !AllFinite(model.normalizers) || !AllFinite(model.weights)) {
    return absl::InvalidArgumentError("importance: query statistics are not finite");
  }
  return std::move(profile.importance);
}

}  // namespace kvtrie
