#include "storage/codec/symbol_fit.h"

#include <cmath>
#include <numeric>

#include "storage/codec/rans.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRowGroups = 64;

std::span<const std::uint16_t> ClassTable(const ResidualProfile& profile, std::size_t c) {
  return std::span(profile.class_frequencies).subspan(c * kResidualSymbols, kResidualSymbols);
}

// Values of one plane of four components: normal ones, of the size that their scale says.
class SymbolFitTest : public testing::Test {
 protected:
  SymbolFitTest() : profile_(PlainProfile(SyntheticSpec({{1, 1, 4, 4}}))) {
    profile_.plane_profiles[0].scales[0] = {64, 64, 64, kNotCoded};  // one step
    TestRandom random(1);
    for (std::size_t i = 0; i < kRowGroups * kLanes * 4; ++i) {
      values_.push_back(profile_.levels[0].step * DrawNormal(random));
    }
  }

  std::vector<float> Code(SymbolFit& fit, LaneMask active = 0xFFFF) {
    std::vector<float> values = values_;
    const std::vector<LaneMask> all(kRowGroups, active);
    std::vector<ResidualCarry> carry(kRowGroups);
    fit.Code(profile_, 0, 0, all, {}, carry, values);
    return values;
  }

  ResidualProfile profile_;
  std::vector<float> values_;
};

TEST_F(SymbolFitTest, FirstTablesAreWholeAndPeakAtZero) {
  SetFirstTables(profile_);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    const auto table = ClassTable(profile_, c);
    EXPECT_EQ(std::accumulate(table.begin(), table.end(), 0u), kRansFrequencySum) << c;
    EXPECT_EQ(std::max_element(table.begin(), table.end()) - table.begin(), kSymbolMax) << c;
  }
  for (std::size_t i = 1; i < profile_.expected.size(); ++i) {
    EXPECT_GE(profile_.expected[i], profile_.expected[i - 1]);
  }
}

TEST_F(SymbolFitTest, ValuesBecomeWhatADecoderRestores) {
  SymbolFit fit(profile_);
  const std::vector<float> restored = Code(fit);
  const float step = profile_.levels[0].step;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    if (i % 4 == 3) {
      ASSERT_EQ(restored[i], 0) << "it is not coded";
    } else {
      ASSERT_LE(std::abs(restored[i] - values_[i]), 1.1f * step);
    }
  }
}

TEST_F(SymbolFitTest, TablesTakeTheSharesThatWereSeen) {
  SymbolFit fit(profile_);
  Code(fit);
  fit.SetTables(profile_);
  // Most values of one step are coded in the class of that scale, or near it.
  const auto table = ClassTable(profile_, 32);
  EXPECT_EQ(std::accumulate(table.begin(), table.end(), 0u), kRansFrequencySum);
  // Of a normal variable, rounded: 0 is seen in 38 %, and a little more with a price on bits.
  const double zero = table[kSymbolMax] / double{kRansFrequencySum};
  EXPECT_GT(zero, 0.3);
  EXPECT_LT(zero, 0.6);
  EXPECT_EQ(table[kSymbolMax + 1], table[kSymbolMax - 1]) << "signs are alike";
  EXPECT_EQ(table[kSymbolMax + 20], 0u) << "what was not seen is escaped";
  EXPECT_GT(table[kEscape], 0u);
}

TEST_F(SymbolFitTest, RowsThatAreNotActiveDoNotCount) {
  SymbolFit none(profile_), first_tables(profile_);
  ResidualProfile of_none = profile_, of_nothing = profile_;
  Code(none, 0);
  none.SetTables(of_none);
  first_tables.SetTables(of_nothing);
  EXPECT_EQ(of_none.class_frequencies, of_nothing.class_frequencies);
  EXPECT_EQ(of_none.expected, of_nothing.expected);
}

}  // namespace
}  // namespace kvtrie
