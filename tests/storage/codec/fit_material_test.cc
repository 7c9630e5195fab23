#include "storage/codec/fit_material.h"

#include <limits>
#include <string>

#include "storage/codec/importance.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

bool Names(const absl::Status& status, const std::string& what) {
  return absl::IsInvalidArgument(status) &&
         std::string(status.message()).find(what) != std::string::npos;
}

// Metrics that join the components of one head.
std::vector<std::vector<float>> MakeMetrics(const std::vector<PlaneShape>& planes) {
  std::vector<std::vector<float>> metrics;
  TestRandom random(3);
  for (const PlaneShape& plane : planes) {
    const std::size_t components = plane.components(), dim = plane.head_dim;
    std::vector<float>& metric = metrics.emplace_back(components * components);
    for (std::size_t head = 0; head < plane.heads; ++head) {
      std::vector<float> factors(dim * 2 * dim);
      for (float& x : factors) x = DrawNormal(random);
      for (std::size_t i = 0; i < dim; ++i) {
        for (std::size_t j = 0; j < dim; ++j) {
          float sum = 0;
          for (std::size_t f = 0; f < 2 * dim; ++f) {
            sum += factors[i * 2 * dim + f] * factors[j * 2 * dim + f];
          }
          metric[(head * dim + i) * components + head * dim + j] = sum;
        }
      }
    }
  }
  return metrics;
}

FitMaterial MakeWholeMaterial(const ModelSpec& spec) {
  const std::vector<SyntheticText> texts = FitTexts(spec);
  FitMaterial material = MakeMaterial(spec, texts, false);
  material.metrics = MakeMetrics(PlanesOf(spec));
  return material;
}

TEST(PlanesOfTest, AreKAndVOfEachLayerThatHasThem) {
  EXPECT_EQ(PlanesOf(SyntheticSpec({{1, 2, 8, 4}, {1, 1, 6, 0}})),
            (std::vector<PlaneShape>{{.layer = 0, .is_v = false, .heads = 2, .head_dim = 8},
                                     {.layer = 0, .is_v = true, .heads = 2, .head_dim = 4},
                                     {.layer = 1, .is_v = false, .heads = 1, .head_dim = 6}}));
}

// Within half a unit of the last of bfloat16's 8 bits.
void ExpectNearInBfloat16(const std::vector<float>& restored, const std::vector<float>& values) {
  ASSERT_EQ(restored.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(restored[i], values[i], std::abs(values[i]) / 256);
  }
}

TEST(FitMaterialTest, ComesBackWithMetricsInEightBitsAndQueriesInBfloat16) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 8, 4}});
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  const FitMaterial material = MakeWholeMaterial(spec);
  const auto again = FitMaterial::Decode(planes, material.Encode(planes));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->group_count, 1u);
  EXPECT_EQ(again->importance.query_heads, material.importance.query_heads);
  EXPECT_EQ(again->importance.covariance_rank, material.importance.covariance_rank);
  ExpectNearInBfloat16(again->importance.query_means, material.importance.query_means);
  ExpectNearInBfloat16(again->importance.query_factors, material.importance.query_factors);
  EXPECT_EQ(again->importance.normalizers, material.importance.normalizers);
  EXPECT_EQ(again->importance.weights, material.importance.weights);
  ASSERT_EQ(again->metrics.size(), planes.size());
  for (std::size_t p = 0; p < planes.size(); ++p) {
    const std::size_t components = planes[p].components();
    for (std::size_t i = 0; i < components; ++i) {
      for (std::size_t j = 0; j < components; ++j) {
        const auto at = [&](std::size_t a, std::size_t b) {
          return material.metrics[p][a * components + b];
        };
        // Correlations are in 1/127; half of one, and the rounding of float32.
        const double roots = std::sqrt(double{at(i, i)} * at(j, j));
        EXPECT_NEAR(again->metrics[p][i * components + j], at(i, j), roots * (0.5 / 127 + 1e-6));
        EXPECT_EQ(again->metrics[p][i * components + j], again->metrics[p][j * components + i]);
      }
    }
  }
  EXPECT_TRUE(FitMaterial::Decode(planes, FitMaterial{}.Encode(planes)).ok());
}

TEST(FitMaterialTest, EveryTruncationAndBitFlipIsRefused) {
  const ModelSpec spec = SyntheticSpec({{2, 1, 2, 2}});
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  const std::string bytes = MakeWholeMaterial(spec).Encode(planes);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(FitMaterial::Decode(planes, bytes.substr(0, length)).ok());
  }
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(FitMaterial::Decode(planes, damaged).ok()) << bit;
  }
}

TEST(FitMaterialTest, MaterialOfAnotherModelIsRefused) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 8, 8}});
  FitMaterial material = MakeWholeMaterial(spec);
  const auto decode_for = [&](const std::vector<LayerRun>& runs) {
    return FitMaterial::Decode(PlanesOf(SyntheticSpec(runs)), material.Encode(PlanesOf(spec)))
        .status();
  };
  const std::vector<std::vector<LayerRun>> others = {{{2, 2, 8, 8}}, {{4, 2, 8, 8}},
                                                     {{3, 1, 8, 8}}, {{3, 2, 8, 4}},
                                                     {{3, 2, 4, 8}}, {{3, 3, 8, 8}}};
  EXPECT_TRUE(decode_for({{3, 2, 8, 8}}).ok());
  for (const auto& runs : others) EXPECT_TRUE(absl::IsInvalidArgument(decode_for(runs)));
  // Without metrics the importance model alone has to tell; its size knows nothing of V.
  material.metrics.clear();
  for (const std::size_t i : {0u, 1u, 2u, 4u, 5u}) {
    EXPECT_TRUE(absl::IsInvalidArgument(decode_for(others[i]))) << i;
  }
}

TEST(CheckSamplesTest, NamesTheSampleAndWhatIsWrong) {
  const ModelSpec spec = SyntheticSpec({{2, 2, 4, 4}});
  const SyntheticText text = MakeText(spec, 20, 1);
  const auto check = [&](auto change) {
    std::vector<KvSample> samples = {text.Sample(), text.Sample()};
    change(samples[1]);
    return CheckSamples(spec, samples);
  };
  EXPECT_TRUE(check([](KvSample&) {}).ok());
  EXPECT_TRUE(check([](KvSample& s) { s.importance = {}; }).ok());
  EXPECT_TRUE(Names(check([](KvSample& s) { s.tokens = {}; }), "sample 1: 0 tokens"));
  EXPECT_TRUE(Names(check([](KvSample& s) { s.tokens = s.tokens.first(19); }), "raw KV"));
  EXPECT_TRUE(Names(check([](KvSample& s) { s.raw = s.raw.first(100); }), "sample 1: size"));
  EXPECT_TRUE(
      Names(check([](KvSample& s) { s.importance = s.importance.first(3); }), "importance"));
  std::vector<float> importance = text.importance;
  importance[5] = kNan;
  EXPECT_TRUE(Names(check([&](KvSample& s) { s.importance = importance; }), "not finite"));
  importance[5] = -1;
  EXPECT_TRUE(Names(check([&](KvSample& s) { s.importance = importance; }), "negative"));
  const std::vector<TokenId> many(1025, 1);
  EXPECT_TRUE(Names(check([&](KvSample& s) { s.tokens = many; }), "1025 tokens"));
}

// [layer][row][feature]; rows are padded to whole products.
std::vector<std::vector<float>> FeaturesOf(const ModelSpec& spec, const ResidualProfile& profile,
                                           const SyntheticText& text) {
  const std::size_t row_count =
      (text.tokens.size() + kProductRows - 1) / kProductRows * kProductRows;
  const ModelSpec of_text = WithBlocks(spec, static_cast<std::uint32_t>(text.tokens.size()));
  const RawKv raw_kv(KvGeometry(of_text), spec.rope);
  std::vector<std::vector<float>> rows;
  for (const PlaneShape& plane : profile.planes) {
    std::vector<float>& to = rows.emplace_back(row_count * plane.components());
    raw_kv.ReadRows(text.raw, plane.layer, plane.kind(), raw_kv.AnglesAt(0),
                    std::span(to).first(text.tokens.size() * plane.components()));
  }
  std::vector<std::uint32_t> behind(row_count, 1);
  for (std::size_t t = 0; t < text.tokens.size(); ++t) {
    behind[t] = static_cast<std::uint32_t>(text.tokens.size() - t);
  }
  return ImportanceEstimator(profile, RopePairs::OfLayers(spec)).Features(rows, behind);
}

// Importance that is planted as a linear function of features is found, up to a constant.
TEST(FitImportanceTest, RecoversAPlantedDependence) {
  const ModelSpec spec = SyntheticSpec({{2, 2, 8, 8}});
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  const SyntheticQueries queries = MakeQueries(spec, 4);
  std::vector<SyntheticText> texts;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) texts.push_back(MakeText(spec, 200, seed));
  // What the estimator sees, from a fit with importance that means nothing.
  const ImportanceFitOptions options = {.group_per_head = true, .covariance_rank = 2};
  const auto first = FitImportance(spec, SamplesOf(texts), queries.Statistics(), options);
  ASSERT_TRUE(first.ok()) << first.status();
  ResidualProfile profile;
  profile.planes = planes;
  profile.group_count = 2;
  profile.importance = *first;
  const std::size_t count = ImportanceFeatureCount(planes);
  constexpr std::size_t kAttentionFeatures = std::size(kImportanceDistances) * (1 + 2);
  // One feature of attention, one of energy, what comes behind, and one per plane and head.
  const auto planted = [&](std::size_t plane, std::size_t head, const float* f) {
    return -3.0 + 0.5 * f[1 + head] + 0.25 * f[kAttentionFeatures + 1] - 0.5 * f[count - 3] +
           0.1 * static_cast<double>(plane);
  };
  for (SyntheticText& text : texts) {
    const auto features = FeaturesOf(spec, profile, text);
    text.importance.clear();
    for (std::size_t p = 0; p < planes.size(); ++p) {
      for (std::size_t head = 0; head < 2; ++head) {
        for (std::size_t t = 0; t < 200; ++t) {
          const float* const f = features[planes[p].layer].data() + t * count;
          text.importance.push_back(static_cast<float>(std::exp(planted(p, head, f))));
        }
      }
    }
  }
  const auto found =
      FitImportance(spec, SamplesOf(std::span(texts).first(5)), queries.Statistics(), options);
  ASSERT_TRUE(found.ok()) << found.status();
  // On a text that it has not seen.
  const auto features = FeaturesOf(spec, profile, texts[5]);
  for (std::size_t p = 0; p < planes.size(); ++p) {
    for (std::size_t head = 0; head < 2; ++head) {
      double sum = 0, square = 0, variance = 0, planted_sum = 0;
      for (std::size_t t = 8; t < 192; ++t) {
        const float* const f = features[planes[p].layer].data() + t * count;
        const float* const w = found->weights.data() + (p * 2 + head) * count;
        double predicted = 0;
        for (std::size_t i = 0; i < count; ++i) predicted += double{w[i]} * f[i];
        const double difference = predicted - planted(p, head, f);
        sum += difference;
        square += difference * difference;
        planted_sum += planted(p, head, f);
        variance += planted(p, head, f) * planted(p, head, f);
      }
      constexpr double kCount = 184;
      const double error = square / kCount - sum * sum / kCount / kCount;
      const double spread = variance / kCount - planted_sum * planted_sum / kCount / kCount;
      EXPECT_LT(error, 0.01 * spread) << "plane " << p << " head " << head;
    }
  }
}

// Steps have a mean of their own, so importance has none: whatever its unit, it is 1 on the mean of
// the tokens that it was fitted to, the first few left out.
TEST(FitImportanceTest, ImportanceIsOneOnTheMean) {
  const ModelSpec spec = SyntheticSpec();
  std::vector<SyntheticText> texts = FitTexts(spec);
  for (SyntheticText& text : texts) {
    for (float& x : text.importance) x *= 1e6f;
  }
  ResidualProfile profile;
  profile.planes = PlanesOf(spec);
  profile.group_count = 2;
  profile.importance = MakeMaterial(spec, texts, true).importance;
  const std::size_t count = ImportanceFeatureCount(profile.planes);
  std::vector<double> sums(profile.planes.size());
  double tokens = 0;
  for (const SyntheticText& text : texts) {
    const auto features = FeaturesOf(spec, profile, text);
    for (std::size_t t = 8; t < text.tokens.size(); ++t) {
      for (std::size_t i = 0; i < 2 * profile.planes.size(); ++i) {
        const float* const f = features[profile.planes[i / 2].layer].data() + t * count;
        double log = 0;
        for (std::size_t k = 0; k < count; ++k) {
          log += double{profile.importance.weights[i * count + k]} * f[k];
        }
        sums[i / 2] += std::exp(log);
      }
      tokens += 2;
    }
  }
  for (const double sum : sums) EXPECT_NEAR(sum / tokens, 1, 1e-4);
}

TEST(FitImportanceTest, RanksFitTheSmallestLayer) {
  const ModelSpec spec = SyntheticSpec({{1, 2, 4, 4}, {1, 2, 16, 8}});
  const std::vector<SyntheticText> texts = FitTexts(spec);
  const SyntheticQueries queries = MakeQueries(spec, 2);
  const auto model = FitImportance(spec, SamplesOf(texts), queries.Statistics(),
                                   {.group_per_head = false, .covariance_rank = 8});
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->covariance_rank, 4u);
  EXPECT_TRUE(CheckImportance(PlanesOf(spec), 1, *model).ok());
}

TEST(FitImportanceTest, WhatDoesNotFitIsNamed) {
  const ModelSpec spec = SyntheticSpec();
  std::vector<SyntheticText> texts = FitTexts(spec);
  SyntheticQueries queries = MakeQueries(spec, 4);
  const auto fit = [&](const std::vector<KvSample>& samples) {
    return FitImportance(spec, samples, queries.Statistics(), {}).status();
  };
  std::vector<KvSample> samples = SamplesOf(texts);
  EXPECT_TRUE(fit(samples).ok());
  EXPECT_TRUE(Names(fit({}), "gradients"));
  for (KvSample& sample : samples) sample.importance = {};
  EXPECT_TRUE(Names(fit(samples), "gradients"));
  samples = SamplesOf(texts);
  samples[2].raw = samples[2].raw.first(10);
  EXPECT_TRUE(Names(fit(samples), "sample 2"));
  const SyntheticText one = MakeText(spec, 16, 1);
  samples = SamplesOf(texts);
  samples[1] = one.Sample();
  EXPECT_TRUE(Names(fit(samples), "sample 1"));
  samples = SamplesOf(texts);
  queries.query_heads = 3;
  EXPECT_TRUE(Names(fit(samples), "query heads"));
  queries.query_heads = 2;
  EXPECT_TRUE(Names(fit(samples), "query statistics"));
  queries.query_heads = 4;
  queries.means[0] = kNan;
  EXPECT_TRUE(Names(fit(samples), "not finite"));
  queries = MakeQueries(SyntheticSpec({{1, 2, 8, 8}, {1, 4, 8, 8}}), 4);
  const SyntheticText differing = MakeText(SyntheticSpec({{1, 2, 8, 8}, {1, 4, 8, 8}}), 40, 1);
  EXPECT_TRUE(Names(FitImportance(SyntheticSpec({{1, 2, 8, 8}, {1, 4, 8, 8}}),
                                  std::vector<KvSample>{differing.Sample()}, queries.Statistics(),
                                  {.group_per_head = true, .covariance_rank = 1})
                        .status(),
                    "KV heads"));
}

}  // namespace
}  // namespace kvtrie
