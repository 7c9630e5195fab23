#include "storage/codec/plane_transform.h"

#include <limits>

#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRows = 32;

std::vector<float> DrawRows(std::size_t count, std::uint64_t seed) {
  TestRandom random(seed);
  std::vector<float> rows(count);
  for (float& x : rows) x = 4 * DrawNormal(random);
  return rows;
}

// Rows of all planes before `plane`, as codes.
RestoredCodes CodesBefore(const ResidualProfile& profile, std::uint32_t plane) {
  RestoredCodes codes(profile.planes.size(), kRows);
  for (std::uint32_t p = 0; p < plane; ++p) {
    codes.Add(p, profile.plane_profiles[p], profile.planes[p],
              DrawRows(kRows * profile.planes[p].components(), p + 1));
  }
  return codes;
}

ResidualProfile BlockedProfile() {
  ResidualFitOptions options = SmallFitOptions();
  options.block_per_head = true;
  return FitSynthetic(SyntheticSpec({{5, 2, 8, 6}}), options);
}

TEST(RestoredCodesTest, AreRowsInInputScalesAndBounded) {
  PlaneProfile plane;
  plane.bias = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  plane.input_scales.assign(9, 0.5f);
  const PlaneShape shape = {.layer = 0, .is_v = false, .heads = 1, .head_dim = 9};
  std::vector<float> rows = {
      1, 1.5f, 1.25f, 1.75f, -1e30f, 1e30f, 64.5f, -62.5f, std::numeric_limits<float>::quiet_NaN()};
  rows.resize(16 * 9, 1);
  RestoredCodes codes(1, 16);
  codes.Add(0, plane, shape, rows);
  const auto of = codes.Of(0);
  // Halves go to the even one; 128 is zero.
  EXPECT_EQ(std::vector<std::uint8_t>(of.begin(), of.begin() + 9),
            (std::vector<std::uint8_t>{128, 129, 128, 130, 1, 255, 255, 1, 1}));
}

TEST(RestoredCodesTest, KeepWhatLaterPlanesRead) {
  const ResidualProfile profile = FitSynthetic(SyntheticSpec({{9, 1, 4, 4}}));
  RestoredCodes codes(profile.planes.size(), 16);
  for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
    for (const std::uint32_t input :
         InputPlanes(profile.planes, p, profile.plane_profiles[p].inputs)) {
      EXPECT_FALSE(codes.Of(input).empty()) << p << " reads " << input;
    }
    codes.Add(p, profile.plane_profiles[p], profile.planes[p], std::vector<float>(64));
  }
  EXPECT_TRUE(codes.Of(4).empty()) << "nobody reads it any more";
}

// The formula of the format, in double: bias + weight_scale * sum of weight * (code - 128).
void ExpectPredictions(const ResidualProfile& profile) {
  for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
    const PlaneProfile& of = profile.plane_profiles[p];
    const std::size_t components = profile.planes[p].components();
    const std::size_t size = components / of.block_count;
    const RestoredCodes codes = CodesBefore(profile, p);
    std::vector<float> rows(kRows * components);
    PlaneTransform(profile, p).Predict(codes, rows);
    const auto inputs = InputPlanes(profile.planes, p, of.inputs);
    std::size_t in = 0;
    for (const std::uint32_t input : inputs) {
      in += profile.planes[input].components() / of.block_count;
    }
    for (std::size_t row = 0; row < kRows; ++row) {
      for (std::size_t c = 0; c < components; ++c) {
        std::int64_t sum = 0, magnitude = 0;
        std::size_t i = 0;
        for (const std::uint32_t input : inputs) {
          const std::size_t width = profile.planes[input].components() / of.block_count;
          for (std::size_t at = 0; at < width; ++at, ++i) {
            const int code = codes.Of(input)[(row * of.block_count + c / size) * width + at];
            sum += of.weights[c * in + i] * (code - 128);
            magnitude += 256 * std::abs(of.weights[c * in + i]);
          }
        }
        const double scale = of.weight_scales[c];
        // Three roundings of float32, of numbers that are no larger than this.
        const double rounding =
            0x1p-22 * (std::abs(of.bias[c]) + std::abs(scale) * static_cast<double>(magnitude));
        ASSERT_NEAR(rows[row * components + c], of.bias[c] + scale * static_cast<double>(sum),
                    rounding)
            << "plane " << p;
      }
    }
  }
}

TEST(PlaneTransformTest, PredictionsAreBiasAndWeightedCodes) {
  ExpectPredictions(FitSynthetic(SyntheticSpec({{5, 2, 8, 6}})));
}
TEST(PlaneTransformTest, PredictionsInBlocksReadTheirBlock) { ExpectPredictions(BlockedProfile()); }

TEST(PlaneTransformTest, AResidualIsTheSumOfBasisRows) {
  for (const bool blocked : {false, true}) {
    const ResidualProfile profile =
        blocked ? BlockedProfile() : FitSynthetic(SyntheticSpec({{5, 2, 8, 6}}));
    for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
      const PlaneProfile& of = profile.plane_profiles[p];
      const std::size_t components = profile.planes[p].components();
      const std::size_t size = components / of.block_count;
      const PlaneTransform transform(profile, p);
      const std::vector<float> values = DrawRows(kRows * components, 7);
      std::vector<float> rows(kRows * components, 0.5f);
      transform.AddResidual(values, rows);
      for (std::size_t row = 0; row < kRows; ++row) {
        for (std::size_t c = 0; c < components; ++c) {
          double expected = 0.5, magnitudes = 0.5;
          for (std::size_t v = 0; v < components; ++v) {
            const std::size_t at = v;
            if (at / size != c / size) continue;
            const double of_value = double{of.basis_scales[at]} * of.basis[at * size + c % size] *
                                    values[row * components + v];
            expected += of_value;
            magnitudes += std::abs(of_value);
          }
          ASSERT_NEAR(rows[row * components + c], expected,
                      0x1p-24 * static_cast<double>(size + 3) * magnitudes);
        }
      }
    }
  }
}

TEST(PlaneTransformTest, AnalysisUndoesTheResidual) {
  const ResidualProfile profile = BlockedProfile();
  for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
    const PlaneTransform transform(profile, p);
    const std::vector<float> values = DrawRows(kRows * profile.planes[p].components(), 7);
    std::vector<float> rows(values.size()), again(values.size());
    transform.AddResidual(values, rows);
    transform.Analyze(rows, again);
    // Two products and an inverse of a basis that is nearly orthogonal.
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], again[i], 1e-3);
  }
}

}  // namespace
}  // namespace kvtrie
