#include "storage/codec/residual_profile.h"

#include <functional>
#include <limits>
#include <string>

#include "tests/storage/codec/counted_allocations.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Everything that a profile may have.
ResidualProfile WholeProfile() {
  const ModelSpec spec = SyntheticSpec({{3, 2, 4, 2}});
  const std::vector<SyntheticText> texts = FitTexts(spec);
  ResidualFitOptions options = SmallFitOptions();
  options.block_per_head = true;
  return FitSynthetic(spec, options, MakeMaterial(spec, texts, true));
}

// A change, and how it is named.
using Fault = std::pair<const char*, std::function<void(ResidualProfile&)>>;

void ExpectNamed(const ResidualProfile& good, const std::vector<Fault>& faults) {
  for (const auto& [name, change] : faults) {
    ResidualProfile bad = good;
    change(bad);
    const absl::Status status = bad.CheckConsistency();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << name;
    EXPECT_NE(std::string(status.message()).find(name), std::string::npos)
        << name << ", not: " << status;
  }
}

void ExpectSame(const ResidualProfile& a, const ResidualProfile& b) {
  EXPECT_EQ(a.planes, b.planes);
  EXPECT_EQ(a.group_count, b.group_count);
  ASSERT_EQ(a.levels.size(), b.levels.size());
  for (std::size_t i = 0; i < a.levels.size(); ++i) {
    EXPECT_EQ(a.levels[i].quality, b.levels[i].quality);
    EXPECT_EQ(a.levels[i].step, b.levels[i].step);
    EXPECT_EQ(a.levels[i].rate_weight, b.levels[i].rate_weight);
    EXPECT_EQ(a.levels[i].importance_strength, b.levels[i].importance_strength);
  }
  EXPECT_EQ(a.class_frequencies, b.class_frequencies);
  EXPECT_EQ(a.exponent_frequencies, b.exponent_frequencies);
  EXPECT_EQ(a.expected, b.expected);
  EXPECT_EQ(a.offsets, b.offsets);
  EXPECT_EQ(a.carried, b.carried);
  EXPECT_EQ(a.prior, b.prior);
  ASSERT_EQ(a.plane_profiles.size(), b.plane_profiles.size());
  for (std::size_t i = 0; i < a.plane_profiles.size(); ++i) {
    const PlaneProfile &p = a.plane_profiles[i], &q = b.plane_profiles[i];
    EXPECT_EQ(p.block_count, q.block_count);
    EXPECT_EQ(p.inputs, q.inputs);
    EXPECT_EQ(p.bias, q.bias);
    EXPECT_EQ(p.input_scales, q.input_scales);
    EXPECT_EQ(p.weights, q.weights);
    EXPECT_EQ(p.weight_scales, q.weight_scales);
    EXPECT_EQ(p.basis, q.basis);
    EXPECT_EQ(p.basis_scales, q.basis_scales);
    EXPECT_EQ(p.exponent_table, q.exponent_table);
    EXPECT_EQ(p.scales, q.scales);
  }
  EXPECT_EQ(a.table_tokens, b.table_tokens);
  EXPECT_EQ(a.table_rows, b.table_rows);
  EXPECT_EQ(a.has_first_token, b.has_first_token);
  EXPECT_EQ(a.first_token, b.first_token);
  EXPECT_EQ(a.first_rows, b.first_rows);
  EXPECT_EQ(a.importance.query_heads, b.importance.query_heads);
  EXPECT_EQ(a.importance.covariance_rank, b.importance.covariance_rank);
  EXPECT_EQ(a.importance.query_means, b.importance.query_means);
  EXPECT_EQ(a.importance.query_factors, b.importance.query_factors);
  EXPECT_EQ(a.importance.normalizers, b.importance.normalizers);
  EXPECT_EQ(a.importance.weights, b.importance.weights);
}

TEST(ResidualProfileTest, BodiesComeBack) {
  for (const ResidualProfile& profile :
       {WholeProfile(), PlainProfile(SyntheticSpec({{2, 1, 6, 0}})),
        PlainProfile(SyntheticSpec({{1, 1, 1, 1}}))}) {
    const std::string body = profile.EncodeBody();
    const auto again = ResidualProfile::DecodeBody(body);
    ASSERT_TRUE(again.ok()) << again.status();
    ExpectSame(profile, *again);
    EXPECT_EQ(again->EncodeBody(), body);
  }
}

// A body without differences is the one with them, cut off there: bodies of before stay what they
// were. What holds a body knows how long it is.
TEST(ResidualProfileTest, DifferencesFollowTheRest) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 4, 2}});
  const ResidualProfile plain = PlainProfile(spec);
  const ResidualProfile profile = WithDifferences(plain, spec);
  const std::string before = plain.EncodeBody(), body = profile.EncodeBody();
  EXPECT_EQ(body.substr(0, before.size()), before);
  EXPECT_EQ(body[before.size()], 1);
  EXPECT_EQ(body.substr(before.size() + 1), profile.differences[0].EncodeBody());
  const auto again = ResidualProfile::DecodeBody(body);
  ASSERT_TRUE(again.ok()) << again.status();
  ExpectSame(*again, profile);
  ASSERT_EQ(again->differences.size(), 1u);
  ExpectSame(again->differences[0], profile.differences[0]);
  for (std::size_t length = before.size() + 1; length < body.size(); ++length) {
    EXPECT_TRUE(absl::IsDataLoss(ResidualProfile::DecodeBody(body.substr(0, length)).status()))
        << length;
  }
  EXPECT_TRUE(ResidualProfile::DecodeBody(body.substr(0, before.size())).ok());
  for (const std::string& more : {std::string("\0", 1), std::string("\2"), "\1" + before}) {
    EXPECT_TRUE(absl::IsDataLoss(ResidualProfile::DecodeBody(body + more).status()));
  }
}

TEST(ResidualProfileTest, DifferencesAreThoseOfTheProfile) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 4, 2}});
  const ResidualProfile good = WithDifferences(PlainProfile(spec), spec);
  ASSERT_TRUE(good.CheckConsistency().ok());
  const std::vector<Fault> kCases = {
      {"differences twice", [](auto& p) { p.differences.push_back(p.differences[0]); }},
      {"plane 1: not finite (of differences)",
       [](auto& p) { p.differences[0].plane_profiles[1].bias[0] = kNan; }},
      {"differences: planes",
       [](auto& p) {
         p.differences[0] = PlainProfile(SyntheticSpec({{2, 2, 4, 2}}));
       }},
      {"differences: exponent groups",
       [](auto& p) {
         p.differences[0].group_count = 1;
         p.differences[0].exponent_frequencies.assign(kExponentSymbols, 0);
       }},
      {"differences: levels",
       [](auto& p) { p.differences[0].levels[1].quality = Quality::kNearExact; }},
      {"differences: token table",
       [&](auto& p) {
         const ResidualProfile with_table = PlainProfile(spec);
         p.differences[0].table_tokens = with_table.table_tokens;
         p.differences[0].table_rows = with_table.table_rows;
       }},
      {"differences: first token",
       [](auto& p) {
         p.differences[0].has_first_token = true;
         p.differences[0].first_rows.assign(p.component_count(), 0);
       }},
      {"differences of differences",
       [&](auto& p) { p.differences[0] = WithDifferences(p.differences[0], spec); }},
  };
  ExpectNamed(good, kCases);
}

// A profile that has come back codes as the one that went.
TEST(ResidualProfileTest, BytesOfBlocksAreThoseOfTheProfileBefore) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 4, 2}});
  const ResidualProfile profile = WholeProfile();
  const auto again = ResidualProfile::DecodeBody(profile.EncodeBody());
  ASSERT_TRUE(again.ok());
  const SyntheticText text = MakeText(spec, 48, 99);
  const CodedText before = EncodeText(*MakeCodec(spec, profile), spec, text, Quality::kHigh);
  const CodedText after = EncodeText(*MakeCodec(spec, *again), spec, text, Quality::kHigh);
  for (std::size_t b = 0; b < 3; ++b) EXPECT_EQ(before.encoded[b].body, after.encoded[b].body);
}

TEST(ResidualProfileTest, EveryTruncationIsDamage) {
  const std::string body = WholeProfile().EncodeBody();
  for (std::size_t length = 0; length < body.size(); ++length) {
    // A copy, so that a sanitizer sees a read past its end.
    const std::string cut = body.substr(0, length);
    EXPECT_TRUE(absl::IsDataLoss(ResidualProfile::DecodeBody(cut).status())) << length;
  }
  EXPECT_TRUE(absl::IsDataLoss(ResidualProfile::DecodeBody(body + '\0').status()));
}

// Tables take most of a body; there every 17th bit stands for its neighbours.
TEST(ResidualProfileTest, BitFlipsAreDamageOrAnotherProfile) {
  const std::string body = WholeProfile().EncodeBody();
  std::size_t refused = 0;
  for (std::size_t bit = 0; bit < body.size() * 8; bit += bit < 2000 ? 1 : 17) {
    std::string changed = body;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    const auto profile = ResidualProfile::DecodeBody(changed);
    if (profile.ok()) {
      EXPECT_TRUE(profile->CheckConsistency().ok());
      EXPECT_EQ(profile->EncodeBody(), changed) << bit;
    } else {
      EXPECT_TRUE(absl::IsDataLoss(profile.status())) << bit;
      ++refused;
    }
  }
  EXPECT_GT(refused, 300u);
}

TEST(ResidualProfileTest, MemoryIsInProportionToTheBytesThatAreThere) {
  const std::string body = WholeProfile().EncodeBody();
  // A plane takes a byte at least before it is read, and 16 in memory; a message of the status.
  const auto expect_little = [](const std::string& bytes) {
    allocations.bytes = 0;
    ResidualProfile::DecodeBody(bytes).status().IgnoreError();
    EXPECT_LE(allocations.bytes, 24 * bytes.size() + 4096);
  };
  expect_little(body);
  for (std::size_t length = 0; length < body.size(); length += 13) {
    expect_little(body.substr(0, length));
  }
  // Every count as large as it can be.
  for (std::size_t at = 0; at + 4 <= body.size(); ++at) {
    for (const char byte : {'\xff', '\x7f', '\x01'}) {
      std::string huge = body;
      huge.replace(at, 4, std::string(4, byte));
      expect_little(huge);
      if (byte == '\x01') huge.replace(at, 4, std::string("\xff\xff\0\0", 4));
      expect_little(huge);
    }
  }
}

TEST(ResidualProfileTest, EveryRuleOfConsistencyNamesWhatIsWrong) {
  const ResidualProfile good = WholeProfile();
  ASSERT_TRUE(good.CheckConsistency().ok());
  const std::vector<Fault> kCases = {
      {"planes", [](auto& p) { p.planes.clear(); }},
      {"planes", [](auto& p) { p.planes[0].is_v = true; }},
      {"planes", [](auto& p) { p.planes[0].layer = 1; }},
      {"planes", [](auto& p) { p.planes[1].heads = 0; }},
      {"planes", [](auto& p) { p.planes[1].heads = 1025; }},
      {"planes", [](auto& p) { p.planes[1].heads = 1; }},
      {"planes", [](auto& p) { p.planes[2].head_dim = 0; }},
      {"planes", [](auto& p) { p.planes[2].head_dim = 4097; }},
      {"planes", [](auto& p) { p.planes[2].layer = 2; }},
      {"planes", [](auto& p) { p.planes[3].layer = 2; }},
      {"planes", [](auto& p) { p.planes[5].is_v = false; }},
      {"planes",
       [](auto& p) { p.planes[4] = {.layer = 2, .is_v = false, .heads = 1024, .head_dim = 65}; }},
      {"planes",
       [](auto& p) {
         p.planes.clear();
         for (std::uint32_t i = 0; i < 1025; ++i) {
           p.planes.push_back({.layer = i / 2, .is_v = i % 2 != 0, .heads = 16, .head_dim = 4096});
         }
       }},
      {"a plane without a profile", [](auto& p) { p.plane_profiles.pop_back(); }},
      {"exponent groups", [](auto& p) { p.group_count = 65; }},
      {"exponent groups", [](auto& p) { p.group_count = 3; }},
      {"levels", [](auto& p) { p.levels.clear(); }},
      {"levels", [](auto& p) { p.levels.resize(9, p.levels[0]); }},
      {"levels", [](auto& p) { p.levels.pop_back(); }},
      {"quality", [](auto& p) { p.levels[0].quality = Quality::kExact; }},
      {"quality", [](auto& p) { p.levels[2].quality = static_cast<Quality>(0); }},
      {"step", [](auto& p) { p.levels[1].step = 0; }},
      {"step", [](auto& p) { p.levels[1].step = -1; }},
      {"step", [](auto& p) { p.levels[1].step = kInfinity; }},
      {"step", [](auto& p) { p.levels[1].step = kNan; }},
      {"level", [](auto& p) { p.levels[1].rate_weight = kNan; }},
      {"level", [](auto& p) { p.levels[1].importance_strength = kInfinity; }},
      {"table", [](auto& p) { p.class_frequencies.pop_back(); }},
      {"table", [](auto& p) { p.exponent_frequencies.pop_back(); }},
      {"table", [](auto& p) { p.expected.push_back(1); }},
      {"table", [](auto& p) { p.offsets.pop_back(); }},
      {"table", [](auto& p) { p.carried.pop_back(); }},
      {"offsets", [](auto& p) { p.offsets[7] = kNan; }},
      {"energy", [](auto& p) { p.prior = 0; }},
      {"energy", [](auto& p) { p.carried[20] = 0; }},
      {"exponent tables",
       [](auto& p) { p.exponent_frequencies.resize(std::size_t{209} * kExponentSymbols); }},
      {"plane 2: blocks", [](auto& p) { p.plane_profiles[2].block_count = 4; }},
      {"plane 2: blocks", [](auto& p) { p.plane_profiles[2].block_count = 0; }},
      {"plane 1: exponent groups", [](auto& p) { p.plane_profiles[1].block_count = 1; }},
      {"plane 3: exponent table", [](auto& p) { p.plane_profiles[3].exponent_table = 6; }},
      {"plane 4: unknown input",
       [](auto& p) { p.plane_profiles[4].inputs[0] = static_cast<PredictorInput>(0); }},
      {"plane 4: unknown input",
       [](auto& p) { p.plane_profiles[4].inputs[0] = static_cast<PredictorInput>(6); }},
      {"plane 5: size of a matrix", [](auto& p) { p.plane_profiles[5].inputs.pop_back(); }},
      {"plane 0: size of a matrix", [](auto& p) { p.plane_profiles[0].bias.pop_back(); }},
      {"plane 0: size of a matrix", [](auto& p) { p.plane_profiles[0].input_scales.pop_back(); }},
      {"plane 0: size of a matrix", [](auto& p) { p.plane_profiles[0].weight_scales.pop_back(); }},
      {"plane 0: size of a matrix", [](auto& p) { p.plane_profiles[0].basis_scales.pop_back(); }},
      {"plane 0: size of a matrix", [](auto& p) { p.plane_profiles[0].basis.pop_back(); }},
      {"plane 3: size of a matrix", [](auto& p) { p.plane_profiles[3].weights.pop_back(); }},
      {"plane 3: not finite", [](auto& p) { p.plane_profiles[3].bias[1] = kInfinity; }},
      {"plane 3: not finite", [](auto& p) { p.plane_profiles[3].weight_scales[1] = kNan; }},
      {"plane 3: scales", [](auto& p) { p.plane_profiles[3].input_scales[1] = 0; }},
      {"plane 3: scales", [](auto& p) { p.plane_profiles[3].basis_scales[1] = -1; }},
      {"plane 3: weights", [](auto& p) { p.plane_profiles[3].weights[1] = 64; }},
      {"plane 3: weights", [](auto& p) { p.plane_profiles[3].weights[1] = -64; }},
      {"plane 3: levels", [](auto& p) { p.plane_profiles[3].scales.pop_back(); }},
      {"plane 3: size of a level", [](auto& p) { p.plane_profiles[3].scales[1].pop_back(); }},
      {"plane 3: scale index", [](auto& p) { p.plane_profiles[3].scales[1][0] = 160; }},
      {"plane 3: scale index", [](auto& p) { p.plane_profiles[3].scales[1][0] = 254; }},
      {"token table", [](auto& p) { std::swap(p.table_tokens[0], p.table_tokens[1]); }},
      {"token table", [](auto& p) { p.table_tokens[1] = p.table_tokens[0]; }},
      {"rows of the token table", [](auto& p) { p.table_rows.pop_back(); }},
      {"first token", [](auto& p) { p.first_rows.pop_back(); }},
      {"first token", [](auto& p) { p.has_first_token = false; }},
      {"first token", [](auto& p) { p.first_rows[3] = kNan; }},
      {"importance", [](auto& p) { p.importance.query_heads = 3; }},
      {"importance", [](auto& p) { p.importance.weights.pop_back(); }},
      {"importance", [](auto& p) { p.importance.weights[0] = kNan; }},
  };
  ExpectNamed(good, kCases);
}

// More inputs than a sum of 32 bits has room for.
TEST(ResidualProfileTest, TooManyInputsAreRefused) {
  ResidualProfile profile = PlainProfile(SyntheticSpec({{2, 1, 1, 1}}));
  profile.planes[0] = {.layer = 0, .is_v = false, .heads = 1024, .head_dim = 64};
  profile.planes[1] = {.layer = 0, .is_v = true, .heads = 1024, .head_dim = 64};
  for (std::size_t i = 0; i < 2; ++i) {
    PlaneProfile& plane = profile.plane_profiles[i];
    plane.block_count = 1024;
    plane.bias.assign(65536, 0);
    plane.input_scales.assign(65536, 1);
    plane.weight_scales.assign(65536, 1);
    plane.basis_scales.assign(65536, 1);
    plane.cell_exponents.assign(65536, 0);
    plane.cell_scales.assign(65536, 80);
    plane.basis.assign(std::size_t{65536} * 64, 0);
    for (auto& scales : plane.scales) scales.assign(65536, 80);
  }
  profile.plane_profiles[2].inputs = {PredictorInput::kLayerBelow, PredictorInput::kFirstLayer};
  const absl::Status status = profile.CheckConsistency();
  EXPECT_NE(std::string(status.message()).find("plane 2: too many inputs"), std::string::npos)
      << status;
}

TEST(InputPlanesTest, AreThoseThatAreDecodedBefore) {
  const std::vector<PlaneShape> planes = PlanesOf(SyntheticSpec({{4, 1, 2, 2}}));
  const auto inputs = [&](std::uint32_t plane, std::vector<PredictorInput> of) {
    return InputPlanes(planes, plane, of);
  };
  using Planes = std::vector<std::uint32_t>;
  EXPECT_EQ(inputs(0, {PredictorInput::kLayerBelow}), Planes{});
  EXPECT_EQ(inputs(1, {PredictorInput::kFirstLayer, PredictorInput::kSameLayerK}), (Planes{0}));
  EXPECT_EQ(inputs(2, {PredictorInput::kLayerBelow, PredictorInput::kTwoBelow}), (Planes{0, 1}));
  EXPECT_EQ(inputs(6, {PredictorInput::kLayerBelow}), (Planes{4, 5}));
  EXPECT_EQ(inputs(6, {PredictorInput::kSameLayerK}), Planes{});
  EXPECT_EQ(inputs(7, {PredictorInput::kTwoBelow, PredictorInput::kFirstLayer,
                       PredictorInput::kSameLayerK}),
            (Planes{2, 3, 0, 1, 6}));
  const std::vector<PlaneShape> latents = PlanesOf(SyntheticSpec({{3, 1, 2, 0}}));
  EXPECT_EQ(
      InputPlanes(latents, 2, std::vector{PredictorInput::kLayerBelow, PredictorInput::kTwoBelow}),
      (Planes{1, 0}));
}

}  // namespace
}  // namespace kvtrie
