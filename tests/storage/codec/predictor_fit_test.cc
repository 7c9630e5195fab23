#include "storage/codec/predictor_fit.h"

#include <cmath>

#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

// Layer 1's K follows from the planes of layer 0; as one block, and as one per head.
class PredictorFitTest : public testing::TestWithParam<std::uint32_t> {
 protected:
  PredictorFitTest() : texts_(FitTexts(spec_)), rows_(spec_, SamplesOf(texts_)) {
    profile_ = PlainProfile(spec_);
    PlaneProfile& plane_profile = profile_.plane_profiles[kPlane];
    const std::size_t block_components = 16 / GetParam();
    plane_profile.block_count = GetParam();
    plane_profile.inputs = {PredictorInput::kLayerBelow};
    plane_profile.basis.assign(16 * block_components, 0);
    for (std::size_t v = 0; v < 16; ++v) {
      plane_profile.basis[v * block_components + v % block_components] = 1;
    }
    codes_.emplace(profile_.planes.size(), rows_.row_count());
    for (std::uint32_t plane = 0; plane < kPlane; ++plane) {
      profile_.plane_profiles[plane].inputs = {};
      const std::vector<float> values = rows_.ReadPlane(profile_.planes[plane]);
      FitPredictor(rows_, values, *codes_, kRidge, plane, profile_);
      codes_->Add(plane, profile_.plane_profiles[plane], profile_.planes[plane], values);
    }
    values_ = rows_.ReadPlane(profile_.planes[kPlane]);
  }

  static constexpr std::uint32_t kPlane = 2;
  static constexpr double kRidge = 2e-3;
  const ModelSpec spec_ = SyntheticSpec({{2, 2, 8, 8}});
  const std::vector<SyntheticText> texts_;
  const FitRows rows_;
  ResidualProfile profile_;
  std::optional<RestoredCodes> codes_;
  std::vector<float> values_;
};

TEST_P(PredictorFitTest, CodesStandForMeanAndDeviation) {
  FitPredictor(rows_, values_, *codes_, kRidge, kPlane, profile_);
  const PlaneProfile& of = profile_.plane_profiles[kPlane];
  const std::size_t components = profile_.planes[kPlane].components();
  for (std::size_t c = 0; c < components; ++c) {
    double sum = 0, square = 0;
    for (std::size_t row = 0; row < rows_.row_count(); ++row) {
      if (!rows_.counts(row)) continue;
      sum += values_[row * components + c];
      square += std::pow(values_[row * components + c], 2);
    }
    const double mean = sum / static_cast<double>(rows_.counted());
    const double variance = square / static_cast<double>(rows_.counted()) - mean * mean;
    EXPECT_NEAR(of.bias[c], mean, 1e-5);
    EXPECT_NEAR(of.input_scales[c], 6 * std::sqrt(variance) / 127, 1e-5);
  }
}

TEST_P(PredictorFitTest, TheResidualIsSmallerThanTheRows) {
  FitPredictor(rows_, values_, *codes_, kRidge, kPlane, profile_);
  ASSERT_TRUE(profile_.CheckConsistency().ok()) << profile_.CheckConsistency();
  std::vector<float> predicted(values_.size());
  PlaneTransform(profile_, kPlane).Predict(*codes_, predicted);
  const std::size_t components = profile_.planes[kPlane].components();
  double residual = 0, energy = 0;
  for (std::size_t at = 0; at < values_.size(); ++at) {
    if (!rows_.counts(at / components)) continue;
    residual += std::pow(values_[at] - predicted[at], 2);
    energy += std::pow(values_[at], 2);
  }
  // 0.22 of deviations near 1 are noise; a head alone misses what comes from the other one.
  EXPECT_LT(residual, (GetParam() == 1 ? 0.1 : 0.7) * energy);
}

TEST_P(PredictorFitTest, RowsThatDoNotCountChangeNothing) {
  FitPredictor(rows_, values_, *codes_, kRidge, kPlane, profile_);
  const PlaneProfile first = profile_.plane_profiles[kPlane];
  const std::size_t components = profile_.planes[kPlane].components();
  for (std::size_t at = 0; at < values_.size(); ++at) {
    if (!rows_.counts(at / components)) values_[at] = 1000;
  }
  FitPredictor(rows_, values_, *codes_, kRidge, kPlane, profile_);
  const PlaneProfile& again = profile_.plane_profiles[kPlane];
  EXPECT_EQ(again.bias, first.bias);
  EXPECT_EQ(again.input_scales, first.input_scales);
  EXPECT_EQ(again.weights, first.weights);
  EXPECT_EQ(again.weight_scales, first.weight_scales);
}

INSTANTIATE_TEST_SUITE_P(Blocks, PredictorFitTest, testing::Values(1u, 2u));

}  // namespace
}  // namespace kvtrie
