#include "storage/codec/importance.h"

#include <limits>
#include <numbers>

#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRows = 32;
constexpr std::size_t kDistances = std::size(kImportanceDistances);

struct Model {
  ResidualProfile profile;
  std::vector<RopePairs> rope;
  std::vector<std::vector<float>> rows;  // [plane][row][component]
};

Model MakeModel(const ModelSpec& spec, std::uint32_t query_heads, std::uint32_t rank,
                std::uint32_t group_count = 1) {
  Model model;
  model.profile.planes = PlanesOf(spec);
  model.profile.group_count = group_count;
  ImportanceModel& importance = model.profile.importance;
  importance.query_heads = query_heads;
  importance.covariance_rank = rank;
  const ImportanceSizes sizes = SizesOf(model.profile.planes, group_count, importance);
  TestRandom random(5);
  for (auto [values, count, scale] :
       {std::tuple(&importance.query_means, sizes.query_means, 1.0f),
        std::tuple(&importance.query_factors, sizes.query_factors, 0.3f),
        std::tuple(&importance.normalizers, sizes.normalizers, 1.0f),
        std::tuple(&importance.weights, sizes.weights, 0.1f)}) {
    for (std::size_t i = 0; i < count; ++i) values->push_back(scale * DrawNormal(random));
  }
  model.rope = RopePairs::OfLayers(spec);
  for (const PlaneShape& plane : model.profile.planes) {
    std::vector<float>& to = model.rows.emplace_back(kRows * plane.components());
    for (float& x : to) x = DrawNormal(random);
  }
  return model;
}

// log E exp(q.k / sqrt(d)) of a query with this mean and covariance factors, `distance` tokens
// behind the key, less the normalizer: the definition, in double, from keys that RoPE has turned.
double LogAttention(const Model& model, const PlaneShape& k, std::size_t mean_at, std::size_t query,
                    std::size_t distance, std::size_t row, std::size_t head) {
  const ImportanceModel& importance = model.profile.importance;
  const std::size_t dim = k.head_dim;
  // Both positions may move alike; the key stands at 0, and so the query is turned.
  const auto dot = [&](const float* query_vector) {
    std::vector<double> turned(query_vector, query_vector + dim);
    const RopePairs& rope = model.rope[k.layer];
    const std::size_t pairs = rope.frequencies.size();
    for (std::size_t i = 0; i < pairs; ++i) {
      const std::size_t a = rope.interleaved ? 2 * i : i;
      const std::size_t b = rope.interleaved ? 2 * i + 1 : i + pairs;
      const double angle =
          static_cast<double>(kImportanceDistances[distance]) * rope.frequencies[i];
      const double x = turned[a], y = turned[b];
      turned[a] = x * std::cos(angle) - y * std::sin(angle);
      turned[b] = x * std::sin(angle) + y * std::cos(angle);
    }
    double sum = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      sum += turned[i] * model.rows[mean_at][row * k.components() + head * dim + i];
    }
    return sum;
  };
  std::size_t means = 0, factors = 0;
  for (const PlaneShape& plane : model.profile.planes) {
    if (plane.is_v || plane.layer >= k.layer) continue;
    means += importance.query_heads * plane.head_dim;
    factors += importance.query_heads * importance.covariance_rank * plane.head_dim;
  }
  double log = dot(importance.query_means.data() + means + query * dim) /
               std::sqrt(static_cast<double>(dim));
  for (std::uint32_t r = 0; r < importance.covariance_rank; ++r) {
    const double p = dot(importance.query_factors.data() + factors +
                         (query * importance.covariance_rank + r) * dim);
    log += p * p / (2 * static_cast<double>(dim));
  }
  return log -
         importance.normalizers[(k.layer * kDistances + distance) * importance.query_heads + query];
}

void ExpectAttention(const ModelSpec& spec, std::uint32_t query_heads, std::uint32_t rank) {
  const Model model = MakeModel(spec, query_heads, rank);
  const ImportanceEstimator estimator(model.profile, model.rope);
  const auto features = estimator.Features(model.rows, std::vector<std::uint32_t>(kRows, 9));
  const auto means = estimator.LogMeanAttention(model.rows, kRows, 2, 30);
  const std::size_t count = ImportanceFeatureCount(model.profile.planes);
  std::size_t heads_max = 0;
  for (const PlaneShape& plane : model.profile.planes) {
    heads_max = std::max<std::size_t>(heads_max, plane.heads);
  }
  for (std::size_t p = 0; p < model.profile.planes.size(); ++p) {
    const PlaneShape& k = model.profile.planes[p];
    if (k.is_v) continue;
    ASSERT_EQ(features[k.layer].size(), kRows * count);
    const std::size_t queries = query_heads / k.heads;
    for (std::size_t d = 0; d < kDistances; ++d) {
      std::vector<double> sums(query_heads);
      for (std::size_t row = 0; row < kRows; ++row) {
        const float* const of_row = features[k.layer].data() + row * count + d * (1 + heads_max);
        double of_all = 0;
        for (std::size_t head = 0; head < k.heads; ++head) {
          double of_head = 0;
          for (std::size_t q = 0; q < queries; ++q) {
            const double score = LogAttention(model, k, p, head * queries + q, d, row, head);
            of_head += std::exp(std::clamp(score, -15.0, 12.0));
            if (row >= 2 && row < 30) sums[head * queries + q] += std::exp(score) / 28;
          }
          ASSERT_NEAR(of_row[1 + head], std::log(of_head / static_cast<double>(queries) + 1e-4),
                      2e-5);
          of_all += of_head;
        }
        ASSERT_NEAR(of_row[0], std::log(of_all / query_heads + 1e-4), 2e-5);
      }
      for (std::size_t query = 0; query < query_heads; ++query) {
        ASSERT_NEAR(means[(k.layer * kDistances + d) * query_heads + query], std::log(sums[query]),
                    2e-5);
      }
    }
  }
}

TEST(ImportanceTest, ExpectedAttentionIsThatOfItsDefinition) {
  ExpectAttention(SyntheticSpec({{3, 2, 8, 8}}), 4, 3);
}
TEST(ImportanceTest, ExpectedAttentionOfInterleavedPartialRope) {
  ModelSpec spec = SyntheticSpec({{2, 2, 8, 4}});
  spec.rope.pairing = RopePairing::kInterleaved;
  spec.rope.rotary_dims = 4;
  ExpectAttention(spec, 2, 1);
}
TEST(ImportanceTest, ExpectedAttentionOfLayersThatTurnInOtherDimensions) {
  ExpectAttention(SyntheticSpec({{1, 2, 8, 8}, {1, 2, 4, 8}, {1, 2, 12, 8}}), 4, 2);
}
TEST(ImportanceTest, ExpectedAttentionWithoutRopeAndWithoutV) {
  ModelSpec spec = SyntheticSpec({{2, 1, 6, 0}});
  spec.rope = {};
  ExpectAttention(spec, 3, 0);
}
TEST(ImportanceTest, ExpectedAttentionOfLayersThatDiffer) {
  ExpectAttention(SyntheticSpec({{1, 1, 8, 8}, {2, 4, 8, 4}}), 4, 2);
}

TEST(ImportanceTest, FeaturesAreEnergiesNeighboursAndWhatComesBehind) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 8, 4}});
  const Model model = MakeModel(spec, 2, 1);
  const ImportanceEstimator estimator(model.profile, model.rope);
  std::vector<std::uint32_t> behind(kRows);
  for (std::uint32_t i = 0; i < kRows; ++i) behind[i] = i;
  const auto features = estimator.Features(model.rows, behind);
  const std::size_t count = ImportanceFeatureCount(model.profile.planes);
  constexpr std::size_t kAttention = kDistances * 3, kOwn = kAttention + 6;
  ASSERT_EQ(count, kOwn + 3 * kAttention + 3);
  for (std::size_t layer = 0; layer < 3; ++layer) {
    for (std::size_t row = 0; row < kRows; ++row) {
      const float* const of_row = features[layer].data() + row * count;
      for (std::size_t kind = 0; kind < 2; ++kind) {
        const PlaneShape& plane = model.profile.planes[2 * layer + kind];
        double total = 1e-6;
        for (std::size_t head = 0; head < 2; ++head) {
          double energy = 1e-6;
          for (std::size_t i = 0; i < plane.head_dim; ++i) {
            const double x =
                model.rows[2 * layer + kind][row * plane.components() + head * plane.head_dim + i];
            energy += x * x;
          }
          total += energy - 1e-6;
          EXPECT_NEAR(of_row[kAttention + kind * 3 + 1 + head], std::log(energy), 1e-5);
        }
        EXPECT_NEAR(of_row[kAttention + kind * 3], std::log(total), 1e-5);
      }
      const auto own = [&](std::size_t of, std::size_t f) { return features[of][row * count + f]; };
      for (std::size_t f = 0; f < kAttention; ++f) {
        EXPECT_NEAR(of_row[kOwn + f], (own(0, f) + own(1, f) + own(2, f)) / 3, 1e-4);
        EXPECT_EQ(of_row[kOwn + kAttention + f], own(layer == 0 ? 0 : layer - 1, f));
        EXPECT_EQ(of_row[kOwn + 2 * kAttention + f], own(layer == 2 ? 2 : layer + 1, f));
      }
      const double log = std::log(std::max<double>(behind[row], 1));
      EXPECT_NEAR(of_row[count - 3], log, 1e-6);
      EXPECT_NEAR(of_row[count - 2], log * log, 1e-5);
      EXPECT_EQ(of_row[count - 1], 1);
    }
  }
}

TEST(ImportanceTest, ExponentsAreTheRootOfImportanceInQuarterOctaves) {
  Model model = MakeModel(SyntheticSpec({{2, 2, 8, 8}}), 2, 1, 2);
  const std::size_t count = ImportanceFeatureCount(model.profile.planes);
  std::vector<float>& weights = model.profile.importance.weights;
  std::fill(weights.begin(), weights.end(), 0.0f);
  // A constant for each plane and group: log importance in octaves.
  constexpr float kOctaves[] = {0, 1, -1, 2.6f, 3, 100, -100, 0.3f};
  for (std::size_t i = 0; i < 8; ++i) {
    weights[(i + 1) * count - 1] = kOctaves[i] * std::numbers::ln2_v<float>;
  }
  const ImportanceEstimator estimator(model.profile, model.rope);
  const auto features = estimator.Features(model.rows, std::vector<std::uint32_t>(kRows, 1));
  const auto expect = [&](float strength, const std::vector<std::int32_t>& expected) {
    const auto exponents = estimator.Exponents(features, kRows, strength);
    for (std::size_t plane = 0; plane < 4; ++plane) {
      ASSERT_EQ(exponents[plane].size(), kRows * 2);
      for (std::size_t i = 0; i < kRows * 2; ++i) {
        ASSERT_EQ(exponents[plane][i], expected[2 * plane + i / 16 % 2]) << plane << " " << i;
      }
    }
  };
  expect(1, {0, 2, -2, 5, 6, 8, -8, 1});
  expect(0.5f, {0, 1, -1, 3, 3, 8, -8, 0});
  expect(0, std::vector<std::int32_t>(8, 0));
}

TEST(ImportanceTest, ExponentsAreBoundedWhateverTheRowsAre) {
  Model model = MakeModel(SyntheticSpec({{2, 2, 8, 8}}), 4, 3, 2);
  for (float& w : model.profile.importance.weights) w *= 100;
  for (auto& rows : model.rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] *= i % 3 == 0 ? 0 : 0x1p49f;
  }
  const auto expect_bounded = [&](const ImportanceEstimator& estimator) {
    const auto features = estimator.Features(model.rows, std::vector<std::uint32_t>(kRows, 1));
    for (const auto& plane : estimator.Exponents(features, kRows, 3)) {
      for (const std::int32_t e : plane) {
        EXPECT_LE(std::abs(e), kExponentMax);
      }
    }
  };
  expect_bounded(ImportanceEstimator(model.profile, model.rope));
  // Finite numbers whose products are not.
  for (float& x : model.profile.importance.query_means) x = 3e38f;
  for (float& x : model.profile.importance.weights) x = 3e38f;
  expect_bounded(ImportanceEstimator(model.profile, model.rope));
}

TEST(ImportanceTest, CheckNamesWhatIsNotOfTheModel) {
  const Model model = MakeModel(SyntheticSpec({{2, 2, 8, 8}}), 4, 2);
  const auto check = [&](auto change) {
    ImportanceModel importance = model.profile.importance;
    change(importance);
    return CheckImportance(model.profile.planes, 1, importance);
  };
  EXPECT_TRUE(check([](ImportanceModel&) {}).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.query_heads = 3; })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.query_heads = 1u << 31; })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.query_heads = 0; })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.covariance_rank = 9; })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.covariance_rank = 1; })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.query_means.pop_back(); })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.normalizers.push_back(0); })));
  EXPECT_TRUE(absl::IsInvalidArgument(check([](auto& m) { m.weights.pop_back(); })));
  EXPECT_TRUE(absl::IsInvalidArgument(
      check([](auto& m) { m.weights[0] = std::numeric_limits<float>::infinity(); })));
  EXPECT_TRUE(CheckImportance(model.profile.planes, 0, {}).ok());
}

TEST(RopePairsTest, AreThoseThatRawKvUnrotates) {
  ModelSpec spec = SyntheticSpec({{1, 2, 8, 8}});
  EXPECT_EQ(RopePairs::OfLayers(spec)[0].frequencies.size(), 4u);
  EXPECT_FALSE(RopePairs::OfLayers(spec)[0].interleaved);
  EXPECT_EQ(RopePairs::OfLayers(spec)[0].frequencies[0], 1);
  EXPECT_NEAR(RopePairs::OfLayers(spec)[0].frequencies[2], 0.01, 1e-15);
  spec.rope.rotary_dims = 4;
  EXPECT_EQ(RopePairs::OfLayers(spec)[0].frequencies.size(), 2u);
  EXPECT_NEAR(RopePairs::OfLayers(spec)[0].frequencies[1], 0.01, 1e-15);
  // A layer with too few dimensions is not turned.
  spec.kv_groups[0].layer_runs.push_back({1, 2, 2, 8});
  EXPECT_TRUE(RopePairs::OfLayers(spec)[1].frequencies.empty());
  EXPECT_FALSE(RawKv(KvGeometry(spec), spec.rope).unrotates_k(1));
  spec.rope.rotary_dims = 0;
  EXPECT_EQ(RopePairs::OfLayers(spec)[0].frequencies.size(), 4u);
  EXPECT_EQ(RopePairs::OfLayers(spec)[1].frequencies.size(), 1u);
  for (const RopeSpec& unknown : std::vector<RopeSpec>{
           {},
           {.pairing = RopePairing::kHalfSplit, .theta = 1e4, .rotary_dims = 0, .scaling = "x"},
           {.pairing = RopePairing::kHalfSplit, .theta = 0, .rotary_dims = 0, .scaling = {}}}) {
    spec.rope = unknown;
    EXPECT_TRUE(RopePairs::OfLayers(spec)[0].frequencies.empty());
    EXPECT_FALSE(RawKv(KvGeometry(spec), spec.rope).unrotates_k(0));
  }
}

}  // namespace
}  // namespace kvtrie
