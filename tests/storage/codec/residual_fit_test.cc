#include "storage/codec/residual_fit.h"

#include <limits>
#include <numeric>
#include <string>

#include "storage/codec/profile_header.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// All components count the same, in the same units whatever is predicted.
FitMaterial UnitMetrics(const ModelSpec& spec, float weight = 1) {
  FitMaterial material;
  for (const PlaneShape& plane : PlanesOf(spec)) {
    const std::size_t components = plane.components();
    std::vector<float>& metric = material.metrics.emplace_back(components * components);
    for (std::size_t c = 0; c < components; ++c) metric[c * (components + 1)] = weight;
  }
  return material;
}

std::size_t BytesOfNewText(const ModelSpec& spec, const ResidualProfile& profile) {
  const ModelSpec blocks = WithBlocks(spec, 128);
  const CodedText coded =
      EncodeText(*MakeCodec(blocks, profile), blocks, MakeText(spec, 256, 99), Quality::kHigh);
  return coded.encoded[1].body.size();
}

TEST(ResidualFitTest, IsTheSameEachTime) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 8, 4}});
  const std::vector<SyntheticText> texts = FitTexts(spec);
  const FitMaterial material = MakeMaterial(spec, texts, false);
  EXPECT_EQ(FitSynthetic(spec, SmallFitOptions(), material).EncodeBody(),
            FitSynthetic(spec, SmallFitOptions(), material).EncodeBody());
}

TEST(ResidualFitTest, PredictionsReduceWhatNewTextsTake) {
  const ModelSpec spec = SyntheticSpec();
  const FitMaterial material = UnitMetrics(spec);
  ResidualFitOptions options = SmallFitOptions();
  const std::size_t with_all = BytesOfNewText(spec, FitSynthetic(spec, options, material));
  options.inputs = {PredictorInput::kLayerBelow};
  const std::size_t with_below = BytesOfNewText(spec, FitSynthetic(spec, options, material));
  options.inputs = {};
  const std::size_t with_none = BytesOfNewText(spec, FitSynthetic(spec, options, material));
  options.table_tokens_max = 0;
  const std::size_t without_table = BytesOfNewText(spec, FitSynthetic(spec, options, material));
  // K of layers 1 to 3 follows from the layer below, V from K of its layer: deviations near 1
  // become 0.2, which is 2.3 bits of each of 128 * 112 components.
  EXPECT_LT(with_all, with_none * 7 / 10);
  EXPECT_LT(with_all, with_below);
  EXPECT_LT(with_below, with_none);
  EXPECT_LT(with_none, without_table);
}

TEST(ResidualFitTest, AMetricDecidesWhereErrorsGo) {
  const ModelSpec spec = WithBlocks(SyntheticSpec({{3, 2, 8, 8}}), 128);
  const auto error_of = [&](const FitMaterial& material, std::uint32_t plane) {
    const auto codec = MakeCodec(spec, FitSynthetic(spec, SmallFitOptions(), material));
    const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 256, 99), Quality::kHigh);
    std::vector<std::byte> raw(coded.raw[1].size());
    const BlockToDecode block = coded.ToDecode(1, Quality::kHigh, raw);
    EXPECT_TRUE(codec->Decode({&block, 1}).ok());
    const auto from = ValuesOf(spec, coded.raw[1]), to = ValuesOf(spec, raw);
    double sum = 0;
    for (std::size_t i = 0; i < from[plane].size(); ++i) {
      sum += (double{from[plane][i]} - to[plane][i]) * (from[plane][i] - to[plane][i]);
    }
    return std::sqrt(sum / static_cast<double>(from[plane].size()));
  };
  // A weight of 16 is a step of a quarter. Steps of 0.25 and values of some 0.25 are coarse, so the
  // error falls by less than that.
  const FitMaterial even = UnitMetrics(spec, 4);
  FitMaterial uneven = even;
  for (float& w : uneven.metrics[3]) w *= 16;
  EXPECT_NEAR(error_of(even, 3) / error_of(uneven, 3), 4, 0.8);
  EXPECT_NEAR(error_of(even, 2) / error_of(uneven, 2), 1, 0.1);
}

TEST(ResidualFitTest, EveryTableIsSharesOf4096) {
  const ModelSpec spec = SyntheticSpec();
  const std::vector<SyntheticText> texts = FitTexts(spec);
  const ResidualProfile profile =
      FitSynthetic(spec, SmallFitOptions(), MakeMaterial(spec, texts, false));
  const auto sums_up = [](const std::vector<std::uint16_t>& frequencies, std::size_t symbols) {
    ASSERT_FALSE(frequencies.empty());
    for (std::size_t at = 0; at < frequencies.size(); at += symbols) {
      const auto begin = frequencies.begin() + static_cast<std::ptrdiff_t>(at);
      EXPECT_EQ(std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(symbols), 0), 4096);
    }
  };
  sums_up(profile.class_frequencies, kResidualSymbols);
  sums_up(profile.exponent_frequencies, kExponentSymbols);
  // What may come can be coded: zero, an escape, and each exponent.
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    EXPECT_GT(profile.class_frequencies[c * kResidualSymbols + kSymbolMax], 0);
    EXPECT_GT(profile.class_frequencies[c * kResidualSymbols + kEscape], 0);
  }
  for (const std::uint16_t frequency : profile.exponent_frequencies) EXPECT_GT(frequency, 0);
  for (const float offset : profile.offsets) EXPECT_LE(std::abs(offset), 0.45f);
}

TEST(ResidualFitTest, TheTokenTableHoldsTheCommonestTokens) {
  const ModelSpec spec = SyntheticSpec({{2, 1, 4, 4}});
  ResidualFitOptions options = SmallFitOptions();
  options.table_tokens_max = 5;
  SyntheticText text = MakeText(spec, 200, 1);
  for (std::uint32_t t = 1; t < 200; ++t) text.tokens[t] = t % 2 == 0 ? 10 : 100 + t % 20;
  const std::vector<KvSample> samples = {text.Sample()};
  const auto profile = FitResidualProfile(spec, samples, {}, options);
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->table_tokens, (std::vector<TokenId>{10, 101, 103, 105, 107}));
  EXPECT_EQ(profile->table_rows.size(), 5u * 8);
}

TEST(ResidualFitTest, AFirstTokenThatDiffersIsNotConstant) {
  const ModelSpec spec = SyntheticSpec({{2, 1, 4, 4}});
  EXPECT_TRUE(FitSynthetic(spec).has_first_token);
  std::vector<SyntheticText> texts = FitTexts(spec);
  const float one = 100;
  std::memcpy(texts[2].raw.data() + 4, &one, 4);
  const auto profile = FitResidualProfile(spec, SamplesOf(texts), {}, SmallFitOptions());
  ASSERT_TRUE(profile.ok());
  EXPECT_FALSE(profile->has_first_token);
  EXPECT_TRUE(profile->first_rows.empty());
}

TEST(ResidualFitTest, ExtremesOfSamplesAreLeftOut) {
  const ModelSpec spec = SyntheticSpec({{2, 2, 4, 4}});
  std::vector<SyntheticText> texts = FitTexts(spec);
  const ResidualProfile before = FitSynthetic(spec);
  // Token 50 of one text is not finite, token 51 beyond all range.
  const float values[] = {kNan, 1e30f};
  std::memcpy(texts[1].raw.data() + 50 * 8 * 4, &values[0], 4);
  std::memcpy(texts[1].raw.data() + 51 * 8 * 4, &values[1], 4);
  const auto profile = FitResidualProfile(spec, SamplesOf(texts), {}, SmallFitOptions());
  ASSERT_TRUE(profile.ok()) << profile.status();
  for (std::size_t p = 0; p < before.planes.size(); ++p) {
    for (std::size_t c = 0; c < before.planes[p].components(); ++c) {
      EXPECT_NEAR(profile->plane_profiles[p].bias[c], before.plane_profiles[p].bias[c], 0.05);
    }
  }
}

TEST(ResidualFitTest, ChannelsThatAreConstantOrZeroFit) {
  const ModelSpec spec = SyntheticSpec({{2, 1, 4, 4}});
  std::vector<SyntheticText> texts = FitTexts(spec);
  for (SyntheticText& text : texts) {
    const KvGeometry geometry(WithBlocks(spec, static_cast<std::uint32_t>(text.tokens.size())));
    for (std::size_t t = 0; t < text.tokens.size(); ++t) {
      const float values[] = {17, 0};
      std::memcpy(text.raw.data() + geometry.kind_begin(1, KvKind::kV) + t * 16, values, 8);
    }
    std::fill_n(text.raw.begin() + static_cast<std::ptrdiff_t>(geometry.kind_begin(1, KvKind::kK)),
                geometry.kind_bytes(1, KvKind::kK), std::byte{0});
  }
  const auto profile = FitResidualProfile(spec, SamplesOf(texts), {}, SmallFitOptions());
  ASSERT_TRUE(profile.ok()) << profile.status();
  const CodedText coded = EncodeText(*MakeCodec(spec, *profile), spec, texts[0], Quality::kHigh);
  std::vector<std::byte> raw(coded.raw[1].size());
  const BlockToDecode block = coded.ToDecode(1, Quality::kHigh, raw);
  ASSERT_TRUE(MakeCodec(spec, *profile)->Decode({&block, 1}).ok());
  const auto from = ValuesOf(spec, coded.raw[1]), to = ValuesOf(spec, raw);
  for (std::size_t t = 0; t < 16; ++t) {
    EXPECT_NEAR(to[3][t * 4], 17, 0.5);
    EXPECT_NEAR(to[3][t * 4 + 1], 0, 0.5);
    EXPECT_NEAR(to[2][t * 4], 0, 0.5);
  }
}

TEST(ResidualFitTest, ProgressGrowsFromTheStartToAllOfIt) {
  const ModelSpec spec = SyntheticSpec();
  const std::vector<SyntheticText> texts = FitTexts(spec);
  std::vector<double> shares;
  std::string last;
  ResidualFitOptions options = SmallFitOptions();
  options.progress = [&](double done_share, std::string_view what) {
    shares.push_back(done_share);
    last = what;
  };
  ASSERT_TRUE(
      FitResidualProfile(spec, SamplesOf(texts), MakeMaterial(spec, texts, false), options).ok());
  ASSERT_GE(shares.size(), 10u);
  EXPECT_LE(shares.size(), 101u);
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_GE(shares.front(), 0);
  EXPECT_LT(shares.front(), 0.2);
  EXPECT_DOUBLE_EQ(shares.back(), 1);
  EXPECT_EQ(last, "done");
  for (std::size_t i = 1; i < shares.size(); ++i) EXPECT_LT(shares[i] - shares[i - 1], 0.2);
}

TEST(ResidualFitTest, WhatDoesNotFitIsNamed) {
  const ModelSpec spec = SyntheticSpec();
  const std::vector<SyntheticText> texts = FitTexts(spec);
  std::vector<KvSample> samples;
  ResidualFitOptions options;
  FitMaterial material;
  const auto expect_named = [&](const std::string& what, auto change) {
    samples = SamplesOf(texts);
    options = SmallFitOptions();
    material = {};
    change();
    const absl::Status status = FitResidualProfile(spec, samples, material, options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << what << status;
    EXPECT_NE(std::string(status.message()).find(what), std::string::npos)
        << what << ", not: " << status;
  };
  expect_named("no samples", [&] { samples.clear(); });
  expect_named("64 tokens", [&] {
    samples.resize(1);
    static const SyntheticText few = MakeText(SyntheticSpec(), 64, 1);
    samples[0] = few.Sample();
  });
  expect_named("sample 3", [&] { samples[3].raw = samples[3].raw.first(8); });
  expect_named("sample 3", [&] { samples[3].tokens = {}; });
  expect_named("levels", [&] { options.levels.clear(); });
  expect_named("levels", [&] { options.levels.resize(9, options.levels[0]); });
  expect_named("level 1: quality", [&] { options.levels[1].quality = Quality::kUnrated; });
  expect_named("level 1: has the quality of level 0",
               [&] { options.levels[1].quality = options.levels[0].quality; });
  expect_named("level 1: step", [&] { options.levels[1].step = 0; });
  expect_named("level 1: step", [&] { options.levels[1].step = kNan; });
  expect_named("level 2: rate_weight", [&] { options.levels[2].rate_weight = -1; });
  expect_named("level 2: importance_strength",
               [&] { options.levels[2].importance_strength = kNan; });
  expect_named("fitted_level", [&] { options.fitted_level = 3; });
  expect_named("rounds", [&] { options.rounds = 0; });
  expect_named("ridge", [&] { options.ridge = 0; });
  expect_named("ridge", [&] { options.ridge = kNan; });
  expect_named("metric_shrinkage", [&] { options.metric_shrinkage = -1; });
  expect_named("metrics", [&] { material.metrics.resize(3); });
  expect_named("metrics", [&] {
    material = UnitMetrics(spec);
    material.metrics[2].pop_back();
  });
  expect_named("metrics are not finite", [&] {
    material = UnitMetrics(spec);
    material.metrics[2][5] = kNan;
  });
  expect_named("importance", [&] {
    material = MakeMaterial(spec, texts, false);
    material.importance.query_means.pop_back();
  });
  expect_named("group_count 2", [&] { material = MakeMaterial(spec, texts, true); });
  expect_named("group_count 3", [&] {
    options.block_per_head = true;
    material.group_count = 3;
  });
  const ModelSpec differing = SyntheticSpec({{1, 2, 8, 8}, {1, 4, 8, 8}});
  const std::vector<SyntheticText> of_differing = FitTexts(differing);
  options = SmallFitOptions();
  options.block_per_head = true;
  const absl::Status status =
      FitResidualProfile(differing, SamplesOf(of_differing), {}, options).status();
  EXPECT_NE(std::string(status.message()).find("block_per_head"), std::string::npos) << status;
}

// Four texts, and 80 tokens of each behind another prefix.
std::vector<SyntheticText> SharedTexts(const ModelSpec& spec) {
  std::vector<SyntheticText> texts = FitTexts(spec);
  for (std::uint64_t i = 0; i < 4; ++i) {
    texts.push_back(ShareTokens(spec, texts[i], 20, 80, 12, 92, 50 + i, 0.05f));
  }
  return texts;
}

std::size_t BytesAgainst(const ModelSpec& spec, const ResidualProfile& profile) {
  const SyntheticText other = MakeText(spec, 96, 99);
  const SharedBlocks shared(spec, other, ShareTokens(spec, other, 16, 64, 32, 96, 98, 0.05f));
  const auto encoded = MakeCodec(spec, profile)->Encode(shared.blocks, Quality::kHigh);
  EXPECT_TRUE(encoded.ok());
  EXPECT_EQ((*encoded)[4].referenced_tokens, profile.differences.empty() ? 0u : 16u);
  return (*encoded)[3].body.size() + (*encoded)[4].body.size();
}

TEST(ResidualFitTest, DifferencesAreFittedToWhatTextsShare) {
  const ModelSpec spec = SyntheticSpec({{4, 2, 16, 16}});
  const std::vector<SyntheticText> texts = SharedTexts(spec);
  ResidualFitOptions options = SmallFitOptions();
  options.differences.tokens_min = 320;
  options.differences.step_factor = 0.5f;
  const auto profile = FitResidualProfile(spec, SamplesOf(texts), {}, options);
  ASSERT_TRUE(profile.ok()) << profile.status();
  ASSERT_EQ(profile->differences.size(), 1u);
  EXPECT_EQ(profile->differences[0].levels[0].step, profile->levels[0].step / 2);
  EXPECT_EQ(profile->differences[0].levels[1].step, profile->levels[1].step / 2);
  EXPECT_EQ(profile->differences[0].group_count, 0u);
  EXPECT_TRUE(ResidualProfile::DecodeBody(profile->EncodeBody()).ok());

  // The rest is that of a fit without.
  ResidualProfile without = *profile;
  without.differences.clear();
  options.differences.tokens_min = 321;
  const auto too_few = FitResidualProfile(spec, SamplesOf(texts), {}, options);
  ASSERT_TRUE(too_few.ok());
  EXPECT_EQ(too_few->EncodeBody(), without.EncodeBody());
  options.differences.tokens_min = 0;
  EXPECT_TRUE(FitResidualProfile(spec, SamplesOf(texts), {}, options)->differences.empty());
  // Residuals of 0.2 became differences of 0.05, at a step of a quarter of a residual's deviation.
  options.differences.tokens_min = 320;
  options.differences.step_factor = 1;
  const auto same_steps = FitResidualProfile(spec, SamplesOf(texts), {}, options);
  ASSERT_TRUE(same_steps.ok());
  EXPECT_LT(BytesAgainst(spec, *same_steps), BytesAgainst(spec, without) / 2);
  EXPECT_LT(BytesAgainst(spec, *same_steps), BytesAgainst(spec, *profile));
}

TEST(ResidualFitTest, DifferencesCanBeAddedToAProfile) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 8, 8}});
  const std::vector<SyntheticText> texts = SharedTexts(spec);
  const FitMaterial material = MakeMaterial(spec, texts, false);
  ResidualFitOptions options = SmallFitOptions();
  for (ResidualLevel& level : options.levels) level.importance_strength = 0.5f;
  options.differences.tokens_min = 100;
  options.differences.importance_strength = 0.5f;
  const auto whole = FitResidualProfile(spec, SamplesOf(texts), material, options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ResidualProfile profile = *whole;
  profile.differences.clear();
  ASSERT_TRUE(FitDifferences(spec, SamplesOf(texts), material, options, profile).ok());
  EXPECT_EQ(profile.EncodeBody(), whole->EncodeBody());
  ASSERT_EQ(profile.differences.size(), 1u);
  EXPECT_EQ(profile.differences[0].group_count, 1u);
  EXPECT_EQ(profile.differences[0].importance.query_heads, 0u);
  // Texts that share nothing take it away again.
  ASSERT_TRUE(FitDifferences(spec, SamplesOf(FitTexts(spec)), material, options, profile).ok());
  EXPECT_TRUE(profile.differences.empty());
}

TEST(ResidualFitTest, ProgressOfDifferencesGrowsToAllOfIt) {
  const ModelSpec spec = SyntheticSpec();
  const std::vector<SyntheticText> texts = SharedTexts(spec);
  ResidualProfile profile = FitSynthetic(spec);
  ResidualFitOptions options = SmallFitOptions();
  options.differences.tokens_min = 100;
  std::vector<double> shares;
  options.progress = [&](double done_share, std::string_view) { shares.push_back(done_share); };
  ASSERT_TRUE(FitDifferences(spec, SamplesOf(texts), {}, options, profile).ok());
  ASSERT_GE(shares.size(), 10u);
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_DOUBLE_EQ(shares.back(), 1);
}

TEST(ResidualFitTest, WhatIsWrongOfDifferencesIsNamed) {
  const ModelSpec spec = SyntheticSpec({{2, 1, 4, 4}});
  const std::vector<SyntheticText> texts = SharedTexts(spec);
  const ResidualProfile fitted = FitSynthetic(spec);
  const auto expect_named = [&](const std::string& what, auto change) {
    ResidualProfile profile = fitted;
    ResidualFitOptions options = SmallFitOptions();
    options.differences.tokens_min = 100;
    change(options, profile);
    const absl::Status status = FitDifferences(spec, SamplesOf(texts), {}, options, profile);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << what << status;
    EXPECT_NE(std::string(status.message()).find(what), std::string::npos) << status;
  };
  expect_named("run_tokens_min",
               [](auto& options, auto&) { options.differences.run_tokens_min = 0; });
  expect_named("step_factor", [](auto& options, auto&) { options.differences.step_factor = 0; });
  expect_named("step_factor", [](auto& options, auto&) { options.differences.step_factor = kNan; });
  expect_named("rounds", [](auto& options, auto&) { options.differences.rounds = 0; });
  expect_named("rate_weight", [](auto& options, auto&) { options.differences.rate_weight = -1; });
  expect_named("layers", [](auto&, auto& profile) { profile.planes.pop_back(); });
}

}  // namespace
}  // namespace kvtrie
