#include "storage/codec/basis_fit.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr std::size_t kComponents = 4, kRows = 5000;

PlaneProfile PlaneOf(std::uint32_t block_count) {
  PlaneProfile plane;
  plane.block_count = block_count;
  plane.basis.resize(kComponents * kComponents / block_count);
  plane.basis_scales.resize(kComponents);
  return plane;
}

// Independent components with these deviations, but for the last two, which are joined.
std::vector<float> DrawResidual() {
  TestRandom random(1);
  std::vector<float> rows;
  for (std::size_t row = 0; row < kRows; ++row) {
    const float joined = DrawNormal(random);
    rows.insert(rows.end(), {0.5f * DrawNormal(random), 4 * DrawNormal(random), 2 * joined,
                             2 * joined + 0.1f * DrawNormal(random)});
  }
  return rows;
}

// [value][component] of one block.
double BasisAt(const PlaneProfile& plane, std::size_t value, std::size_t component) {
  const std::size_t size = kComponents / plane.block_count;
  return double{plane.basis_scales[value]} * plane.basis[value * size + component];
}

TEST(BasisFitTest, WithoutAMetricValuesAreInUnitsOfTheDeviation) {
  const std::vector<float> residual = DrawResidual();
  double square = 0;
  for (const float x : residual) square += double{x} * x;
  const double deviation = std::sqrt(square / static_cast<double>(residual.size()));
  PlaneProfile plane = PlaneOf(1);
  FitBasis(residual, kRows, {}, 0.1, plane);
  // The largest first: component 1; then what the last two share, and so on.
  EXPECT_NEAR(std::abs(BasisAt(plane, 0, 1)), deviation, 0.02 * deviation);
  EXPECT_NEAR(BasisAt(plane, 0, 0), 0, 0.05 * deviation);
  EXPECT_NEAR(BasisAt(plane, 1, 2) / BasisAt(plane, 1, 3), 1, 0.05);
  EXPECT_NEAR(std::abs(BasisAt(plane, 2, 0)), deviation, 0.02 * deviation);
  EXPECT_NEAR(BasisAt(plane, 3, 2) / BasisAt(plane, 3, 3), -1, 0.05);
}

TEST(BasisFitTest, TheUnitCanBeThatOfAnotherFit) {
  PlaneProfile plane = PlaneOf(1);
  FitBasis(DrawResidual(), kRows, {}, 0, plane, 9);
  EXPECT_NEAR(std::abs(BasisAt(plane, 0, 1)), 3, 0.05);
  EXPECT_NEAR(VarianceOfBasis(plane), 9, 0.1);
}

TEST(BasisFitTest, AnErrorCostsTheSameInEachDirection) {
  const std::vector<float> metric = {4, 1, 0, 0, 1, 2, 0, 0, 0, 0, 9, 0, 0, 0, 0, 1};
  PlaneProfile plane = PlaneOf(1);
  FitBasis(DrawResidual(), kRows, metric, 0, plane);
  for (std::size_t a = 0; a < kComponents; ++a) {
    for (std::size_t b = 0; b < kComponents; ++b) {
      double cost = 0;
      for (std::size_t i = 0; i < kComponents; ++i) {
        for (std::size_t j = 0; j < kComponents; ++j) {
          cost += BasisAt(plane, a, i) * metric[i * kComponents + j] * BasisAt(plane, b, j);
        }
      }
      EXPECT_NEAR(cost, a == b ? 1 : 0, 0.05) << a << " " << b;
    }
  }
}

TEST(BasisFitTest, ShrinkageMakesAMetricMoreEven) {
  const std::vector<float> metric = {9, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  const auto length = [&](double shrinkage) {
    PlaneProfile plane = PlaneOf(1);
    FitBasis(DrawResidual(), kRows, metric, shrinkage, plane);
    double most = 0;  // of what any value says of component 0
    for (std::size_t v = 0; v < kComponents; ++v) {
      most = std::max(most, std::abs(BasisAt(plane, v, 0)));
    }
    return most;
  };
  EXPECT_NEAR(length(0), 1 / 3.0, 0.01);
  // (9 + 3) / 2: the mean is 3.
  EXPECT_NEAR(length(1), 1 / std::sqrt(6.0), 0.01);
}

TEST(BasisFitTest, BlocksDoNotMix) {
  PlaneProfile both = PlaneOf(2);
  FitBasis(DrawResidual(), kRows, {}, 0, both);
  std::vector<float> changed = DrawResidual();
  for (std::size_t at = 0; at < changed.size(); ++at) {
    if (at % kComponents >= 2) changed[at] = -changed[at] * static_cast<float>(at % 3);
  }
  const std::vector<float> metric = {1, 0, 5, 5, 0, 1, 5, 5, 5, 5, 1, 0, 5, 5, 0, 1};
  PlaneProfile a = PlaneOf(2), b = PlaneOf(2);
  FitBasis(DrawResidual(), kRows, metric, 0, a);
  FitBasis(changed, kRows, metric, 0, b);
  EXPECT_EQ(std::vector<std::int8_t>(a.basis.begin(), a.basis.begin() + 4),
            std::vector<std::int8_t>(b.basis.begin(), b.basis.begin() + 4));
  EXPECT_EQ(a.basis_scales[0], b.basis_scales[0]);
  // Block 1 has the joined components.
  EXPECT_NEAR(BasisAt(both, 2, 0) / BasisAt(both, 2, 1), 1, 0.05);
}

}  // namespace
}  // namespace kvtrie
