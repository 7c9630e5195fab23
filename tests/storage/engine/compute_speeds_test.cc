#include "storage/engine/compute_speeds.h"

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

void ReportOften(ComputeSpeeds& speeds, ModelSlot model, double seconds, int times = 400) {
  for (int i = 0; i < times; ++i) speeds.Report(model, seconds);
}

TEST(ComputeSpeedsTest, WithoutReportsAllModelsAreAlike) {
  ComputeSpeeds speeds;
  EXPECT_EQ(speeds.Relative(0), 1);
  speeds.Report(1, 1e-14);
  EXPECT_DOUBLE_EQ(speeds.Relative(1), 1);  // nothing to compare it with
  EXPECT_EQ(speeds.Relative(0), 1);
}

TEST(ComputeSpeedsTest, ModelsDifferAsTheirReportsDo) {
  ComputeSpeeds speeds;
  ReportOften(speeds, 1, 1e-14);
  ReportOften(speeds, 2, 4e-14);
  EXPECT_NEAR(speeds.Relative(2) / speeds.Relative(1), 4, 1e-6);
  EXPECT_NEAR(speeds.Relative(2) * speeds.Relative(1), 1, 1e-6);
  // Engines got faster.
  ReportOften(speeds, 2, 2e-14);
  EXPECT_NEAR(speeds.Relative(2) / speeds.Relative(1), 2, 1e-6);
}

TEST(ComputeSpeedsTest, OneReportMovesLittleHoweverWrongItIs) {
  ComputeSpeeds speeds;
  ReportOften(speeds, 1, 1e-14);
  ReportOften(speeds, 2, 1e-14);
  speeds.Report(2, 1e+3);
  EXPECT_GT(speeds.Relative(2), 1);
  EXPECT_LT(speeds.Relative(2) / speeds.Relative(1), 1.1);
  speeds.Report(2, 1e-30);
  EXPECT_NEAR(speeds.Relative(2) / speeds.Relative(1), 1, 0.01);
}

TEST(ComputeSpeedsTest, WhoeverLiesAlwaysGainsABoundedFactor) {
  ComputeSpeeds speeds;
  for (ModelSlot model = 1; model <= 9; ++model) ReportOften(speeds, model, 1e-14);
  ReportOften(speeds, 10, 1e+3, 10'000);
  EXPECT_DOUBLE_EQ(speeds.Relative(10), ComputeSpeeds::kRatioMax);
  for (ModelSlot model = 1; model <= 9; ++model) {
    EXPECT_GE(speeds.Relative(model), 1 / ComputeSpeeds::kRatioMax);
  }
}

// The first one of a model cannot be compared with its own, so with those of the others.
TEST(ComputeSpeedsTest, AFirstReportThatIsWrongIsMadeUpForSoon) {
  ComputeSpeeds speeds;
  ReportOften(speeds, 1, 1e-14);
  speeds.Report(2, 1e+3);
  ReportOften(speeds, 2, 1e-14, 20);
  EXPECT_LT(speeds.Relative(2) / speeds.Relative(1), 2);
}

}  // namespace
}  // namespace kvtrie
