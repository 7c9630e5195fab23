#include "storage/codec/importance.h"

#include <algorithm>
#include <cmath>

#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr std::size_t kDistances = std::size(kImportanceDistances);

constexpr std::uint32_t kQueryHeadsMax = 1024;

// Heads of the layer with the most, for which there are features; other layers leave theirs zero.
std::size_t HeadsMax(std::span<const PlaneShape> planes) {
  std::size_t heads = 0;
  for (const PlaneShape& plane : planes) heads = std::max<std::size_t>(heads, plane.heads);
  return heads;
}

std::size_t LayerCount(std::span<const PlaneShape> planes) { return planes.back().layer + 1; }

// Expected attention: mean over heads and each KV head, per distance. Energies: K and V, whole and
// of each head.
std::size_t AttentionFeatures(std::size_t heads) { return kDistances * (1 + heads); }
std::size_t LayerFeatures(std::size_t heads) { return AttentionFeatures(heads) + 2 * (1 + heads); }

// A layer's own, the attention features' mean over layers, those below, those above; the log of the
// tokens behind and its square; and 1.
std::size_t FeatureCount(std::size_t heads) {
  return LayerFeatures(heads) + 3 * AttentionFeatures(heads) + 3;
}

// Turns a head's vector by `distance` positions against RoPE's direction: a query turned so,
// against K before RoPE, is the query and K that far apart.
void Turn(std::span<float> vector, const RopePairs& rope, double distance) {
  const std::size_t pairs = rope.frequencies.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const std::size_t a = rope.interleaved ? 2 * i : i;
    const std::size_t b = rope.interleaved ? 2 * i + 1 : i + pairs;
    const double angle = distance * rope.frequencies[i];
    const double x = vector[a], y = vector[b];
    vector[a] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
    vector[b] = static_cast<float>(y * std::cos(angle) + x * std::sin(angle));
  }
}

// Of the natural logarithm of an importance.
std::int32_t ExponentOfLog(float log_importance, float strength) {
  const float quarters = 2 * strength * log_importance / std::log(2.0f);
  // A number that is none, of weights beyond reason, is the least important.
  constexpr auto kMost = static_cast<float>(kExponentMax);
  return static_cast<std::int32_t>(std::nearbyint(std::min(kMost, std::max(-kMost, quarters))));
}

}  // namespace

std::int32_t ExponentOf(float importance, float strength) {
  return importance > 0 ? ExponentOfLog(std::log(importance), strength) : 0;
}

void SetExponents(std::span<const float> importance, std::size_t first_row,
                  std::uint32_t group_count, float strength,
                  std::vector<std::vector<std::int32_t>>& exponents) {
  for (std::size_t t = 0; t < importance.size(); ++t) {
    const std::int32_t exponent = ExponentOf(importance[t], strength);
    const std::size_t row = first_row + t;
    for (std::vector<std::int32_t>& of_plane : exponents) {
      for (std::size_t group = 0; group < group_count; ++group) {
        of_plane[(row / kLanes * group_count + group) * kLanes + row % kLanes] = exponent;
      }
    }
  }
}

std::uint32_t TokensBehind(std::uint32_t position, std::uint32_t session_tokens) {
  return session_tokens > position ? session_tokens - position : 1;
}

std::vector<RopePairs> RopePairs::OfLayers(const ModelSpec& spec) {
  const KvGeometry geometry(spec);
  const RopeSpec& rope = spec.rope;
  const bool known = rope.pairing != RopePairing::kNone && rope.scaling.empty() && rope.theta > 0;
  std::vector<RopePairs> layers(geometry.layer_count());
  for (std::uint32_t layer = 0; layer < layers.size(); ++layer) {
    const std::uint32_t head_dim = geometry.head_dim(layer, KvKind::kK);
    const std::uint32_t dims = rope.rotary_dims == 0 ? head_dim : rope.rotary_dims;
    if (!known || dims > head_dim || dims % 2 != 0) continue;
    layers[layer].interleaved = rope.pairing == RopePairing::kInterleaved;
    for (std::uint32_t i = 0; i < dims; i += 2) {
      layers[layer].frequencies.push_back(std::pow(rope.theta, -static_cast<double>(i) / dims));
    }
  }
  return layers;
}

ImportanceSizes SizesOf(std::span<const PlaneShape> planes, std::uint32_t group_count,
                        const ImportanceModel& model) {
  if (model.query_heads == 0) return {};
  ImportanceSizes sizes;
  for (const PlaneShape& plane : planes) {
    if (plane.is_v) continue;
    sizes.query_means += std::size_t{model.query_heads} * plane.head_dim;
    sizes.query_factors += std::size_t{model.query_heads} * model.covariance_rank * plane.head_dim;
    sizes.normalizers += kDistances * model.query_heads;
  }
  sizes.weights = planes.size() * group_count * FeatureCount(HeadsMax(planes));
  return sizes;
}

absl::Status CheckImportance(std::span<const PlaneShape> planes, std::uint32_t group_count,
                             const ImportanceModel& model) {
  const auto all_finite = [](const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(),
                       [](float value) { return std::isfinite(value); });
  };
  if (model.query_heads > kQueryHeadsMax)
    return absl::InvalidArgumentError("importance: query heads");
  for (const PlaneShape& plane : planes) {
    if (model.query_heads > 0 && model.query_heads % plane.heads != 0) {
      return absl::InvalidArgumentError("importance: query heads are no multiple of KV heads");
    }
    if (!plane.is_v && model.covariance_rank > plane.head_dim) {
      return absl::InvalidArgumentError("importance: rank of query covariances");
    }
  }
  const ImportanceSizes sizes = SizesOf(planes, group_count, model);
  if (model.query_means.size() != sizes.query_means ||
      model.query_factors.size() != sizes.query_factors ||
      model.normalizers.size() != sizes.normalizers || model.weights.size() != sizes.weights) {
    return absl::InvalidArgumentError("importance: sizes are not those of the model");
  }
  if (!all_finite(model.query_means) || !all_finite(model.query_factors) ||
      !all_finite(model.normalizers) || !all_finite(model.weights)) {
    return absl::InvalidArgumentError("importance: not finite");
  }
  return absl::OkStatus();
}

std::size_t ImportanceFeatureCount(std::span<const PlaneShape> planes) {
  return FeatureCount(HeadsMax(planes));
}

std::vector<float> ScoreMatrix(const ResidualProfile& profile, const RopePairs& rope,
                               std::uint32_t layer, std::uint32_t head) {
  const ImportanceModel& model = profile.importance;
  const std::size_t rank = model.covariance_rank;
  const float* mean = model.query_means.data();
  const float* factor = model.query_factors.data();
  const PlaneShape* k = nullptr;
  for (const PlaneShape& plane : profile.planes) {
    if (plane.is_v) continue;
    k = &plane;
    if (plane.layer == layer) break;
    mean += model.query_heads * plane.head_dim;
    factor += model.query_heads * rank * plane.head_dim;
  }
  const std::size_t dim = k->head_dim;
  const std::size_t queries = model.query_heads / k->heads;  // that read one KV head
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const std::size_t columns = kDistances * queries * (1 + rank);
  std::vector<float> matrix(dim * columns);
  std::size_t column = 0;
  std::vector<float> turned(dim);
  for (const std::uint32_t distance : kImportanceDistances) {
    for (std::size_t q = 0; q < queries; ++q) {
      const std::size_t query = head * queries + q;
      for (std::size_t r = 0; r < 1 + rank; ++r, ++column) {
        const float* const from =
            r == 0 ? mean + query * dim : factor + (query * rank + r - 1) * dim;
        std::copy_n(from, dim, turned.begin());
        Turn(turned, rope, distance);
        // A factor's square is halved, as the exponent of a normal distribution says.
        const float weight = r == 0 ? scale : scale * std::sqrt(0.5f);
        for (std::size_t i = 0; i < dim; ++i) matrix[i * columns + column] = turned[i] * weight;
      }
    }
  }
  return matrix;
}

ImportanceEstimator::ImportanceEstimator(const ResidualProfile& profile,
                                         std::span<const RopePairs> rope)
    : planes_(profile.planes), group_count_(profile.group_count), model_(profile.importance) {
  for (const PlaneShape& plane : planes_) {
    if (plane.is_v) continue;
    std::vector<FloatProduct>& heads = layers_.emplace_back();
    for (std::uint32_t head = 0; head < plane.heads; ++head) {
      const std::vector<float> matrix = ScoreMatrix(profile, rope[plane.layer], plane.layer, head);
      heads.emplace_back(plane.head_dim, matrix.size() / plane.head_dim, matrix);
    }
  }
}

void ImportanceEstimator::Scores(std::size_t layer, std::size_t head, std::span<const float> k_rows,
                                 const PlaneShape& k, std::size_t row_count,
                                 std::vector<float>& scores) const {
  const std::size_t rank = model_.covariance_rank;
  const std::size_t queries = model_.query_heads / k.heads;
  const std::size_t columns = kDistances * queries * (1 + rank);
  std::vector<float> head_rows(row_count * k.head_dim), products(row_count * columns);
  for (std::size_t row = 0; row < row_count; ++row) {
    std::copy_n(k_rows.data() + row * k.components() + head * k.head_dim, k.head_dim,
                head_rows.data() + row * k.head_dim);
  }
  layers_[layer][head].Run(head_rows, products);
  scores.resize(row_count * kDistances * queries);
  const float* from = products.data();
  const float* const normalizers =
      model_.normalizers.data() + layer * kDistances * model_.query_heads + head * queries;
  float* to = scores.data();
  for (std::size_t row = 0; row < row_count; ++row) {
    for (std::size_t d = 0; d < kDistances; ++d) {
      for (std::size_t q = 0; q < queries; ++q) {
        float score = *from++ - normalizers[d * model_.query_heads + q];
        for (std::size_t r = 0; r < rank; ++r, ++from) score += *from * *from;
        *to++ = score;
      }
    }
  }
}

std::vector<double> ImportanceEstimator::LogMeanAttention(
    const std::vector<std::vector<float>>& rows, std::size_t row_count, std::size_t begin,
    std::size_t end) const {
  std::vector<double> logs(model_.normalizers.size());
  std::vector<float> scores;
  for (std::size_t plane = 0; plane < planes_.size(); ++plane) {
    const PlaneShape& k = planes_[plane];
    if (k.is_v) continue;
    const std::size_t queries = model_.query_heads / k.heads;
    for (std::size_t head = 0; head < k.heads; ++head) {
      Scores(k.layer, head, rows[plane], k, row_count, scores);
      const std::size_t width = kDistances * queries;
      for (std::size_t i = 0; i < width; ++i) {
        double most = -1e300, sum = 0;
        for (std::size_t row = begin; row < end; ++row) {
          most = std::max<double>(most, scores[row * width + i]);
        }
        for (std::size_t row = begin; row < end; ++row) {
          sum += std::exp(scores[row * width + i] - most);
        }
        const std::size_t d = i / queries, q = i % queries;
        logs[(k.layer * kDistances + d) * model_.query_heads + head * queries + q] =
            most + std::log(sum / static_cast<double>(end - begin));
      }
    }
  }
  return logs;
}

void ImportanceEstimator::AddLayer(std::size_t layer, std::span<const float> k_rows,
                                   const PlaneShape& k, std::span<const float> v_rows,
                                   const PlaneShape* v, std::size_t row_count,
                                   std::span<float> own) const {
  const std::size_t heads_max = HeadsMax(planes_);
  const std::size_t feature_count = LayerFeatures(heads_max);
  const std::size_t queries = model_.query_heads / k.heads;
  std::vector<float> scores;
  std::fill(own.begin(), own.end(), 0.0f);
  for (std::size_t head = 0; head < k.heads; ++head) {
    Scores(layer, head, k_rows, k, row_count, scores);
    const float* score = scores.data();
    for (std::size_t row = 0; row < row_count; ++row) {
      float* const to = own.data() + row * feature_count;
      for (std::size_t d = 0; d < kDistances; ++d) {
        float attention = 0;
        for (std::size_t q = 0; q < queries; ++q) {
          attention += std::exp(std::clamp(*score++, kScoreMin, kScoreMax));
        }
        to[d * (1 + heads_max)] += attention;
        to[d * (1 + heads_max) + 1 + head] =
            std::log(attention / static_cast<float>(queries) + kAttentionFloor);
      }
    }
  }
  for (std::size_t row = 0; row < row_count; ++row) {
    float* const to = own.data() + row * feature_count;
    for (std::size_t d = 0; d < kDistances; ++d) {
      float& sum = to[d * (1 + heads_max)];
      sum = std::log(sum / static_cast<float>(model_.query_heads) + kAttentionFloor);
    }
    std::size_t at = AttentionFeatures(heads_max);
    for (const auto& [rows, shape] : {std::pair(k_rows, &k), std::pair(v_rows, v)}) {
      float total = 0;
      for (std::size_t head = 0; shape != nullptr && head < shape->heads; ++head) {
        const float* const from = rows.data() + row * shape->components() + head * shape->head_dim;
        float energy = 0;
        for (std::size_t i = 0; i < shape->head_dim; ++i) energy += from[i] * from[i];
        to[at + 1 + head] = std::log(energy + kEnergyFloor);
        total += energy;
      }
      to[at] = std::log(total + kEnergyFloor);
      at += 1 + heads_max;
    }
  }
}

std::vector<std::vector<float>> ImportanceEstimator::Features(
    const std::vector<std::vector<float>>& rows,
    std::span<const std::uint32_t> tokens_behind) const {
  const std::size_t row_count = tokens_behind.size();
  const std::size_t heads_max = HeadsMax(planes_);
  const std::size_t own_count = LayerFeatures(heads_max);
  const std::size_t shared_count = AttentionFeatures(heads_max);
  const std::size_t layer_count = LayerCount(planes_);

  std::vector<std::vector<float>> own(layer_count);
  for (std::size_t plane = 0; plane < planes_.size(); ++plane) {
    if (planes_[plane].is_v) continue;
    const bool has_v = plane + 1 < planes_.size() && planes_[plane + 1].is_v;
    own[planes_[plane].layer].resize(row_count * own_count);
    AddLayer(planes_[plane].layer, rows[plane], planes_[plane],
             has_v ? std::span<const float>(rows[plane + 1]) : std::span<const float>(),
             has_v ? &planes_[plane + 1] : nullptr, row_count, own[planes_[plane].layer]);
  }
  std::vector<float> mean(row_count * shared_count);
  for (const auto& layer : own) {
    for (std::size_t row = 0; row < row_count; ++row) {
      for (std::size_t f = 0; f < shared_count; ++f) {
        mean[row * shared_count + f] +=
            layer[row * own_count + f] / static_cast<float>(layer_count);
      }
    }
  }

  const std::size_t count = FeatureCount(heads_max);
  std::vector<std::vector<float>> features(layer_count);
  for (std::size_t layer = 0; layer < layer_count; ++layer) {
    const std::vector<float>& below = own[layer == 0 ? 0 : layer - 1];
    const std::vector<float>& above = own[std::min(layer + 1, layer_count - 1)];
    features[layer].resize(row_count * count);
    for (std::size_t row = 0; row < row_count; ++row) {
      float* to = features[layer].data() + row * count;
      to = std::copy_n(own[layer].data() + row * own_count, own_count, to);
      to = std::copy_n(mean.data() + row * shared_count, shared_count, to);
      to = std::copy_n(below.data() + row * own_count, shared_count, to);
      to = std::copy_n(above.data() + row * own_count, shared_count, to);
      const float behind = std::log(static_cast<float>(std::max(tokens_behind[row], 1u)));
      *to++ = behind;
      *to++ = behind * behind;
      *to = 1;
    }
  }
  return features;
}

std::vector<std::vector<std::int32_t>> ImportanceEstimator::Exponents(
    const std::vector<std::vector<float>>& features, std::size_t row_count, float strength) const {
  const std::size_t count = ImportanceFeatureCount(planes_);
  std::vector<std::vector<std::int32_t>> exponents(planes_.size());
  const float* weights = model_.weights.data();
  for (std::size_t plane = 0; plane < planes_.size(); ++plane, weights += group_count_ * count) {
    exponents[plane].resize(row_count * group_count_);
    for (std::size_t row = 0; row < row_count; ++row) {
      const float* const of_row = features[planes_[plane].layer].data() + row * count;
      for (std::size_t group = 0; group < group_count_; ++group) {
        float log_importance = 0;
        for (std::size_t f = 0; f < count; ++f)
          log_importance += weights[group * count + f] * of_row[f];
        const std::size_t at = (row / kLanes * group_count_ + group) * kLanes + row % kLanes;
        exponents[plane][at] = ExponentOfLog(log_importance, strength);
      }
    }
  }
  return exponents;
}

}  // namespace kvtrie
