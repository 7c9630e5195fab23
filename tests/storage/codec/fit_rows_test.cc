#include "storage/codec/fit_rows.h"

#include <algorithm>
#include <limits>

#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

// Samples of 20 and 5 tokens; token 7 of the first one has an infinite component.
class FitRowsTest : public testing::Test {
 protected:
  FitRowsTest() : texts_{MakeText(spec_, 20, 1), MakeText(spec_, 5, 2)} {
    const KvGeometry geometry(WithBlocks(spec_, 20));
    const float infinity = std::numeric_limits<float>::infinity();
    std::memcpy(texts_[0].raw.data() + geometry.kind_begin(1, KvKind::kV) +
                    7 * std::size_t{geometry.row_components(1, KvKind::kV)} * sizeof(float),
                &infinity, sizeof infinity);
    rows_.emplace(spec_, SamplesOf(texts_));
  }

  const ModelSpec spec_ = SyntheticSpec({{2, 2, 4, 3}}, DType::kFloat32);
  const std::vector<PlaneShape> planes_ = PlanesOf(spec_);
  std::vector<SyntheticText> texts_;
  std::optional<FitRows> rows_;
};

TEST_F(FitRowsTest, EachSampleHasGroupsOfItsOwn) {
  ASSERT_EQ(rows_->sample_count(), 2u);
  EXPECT_EQ(rows_->row_count(), 48u);
  EXPECT_EQ(rows_->first_row(0), 0u);
  EXPECT_EQ(rows_->first_row(1), 32u);
  ASSERT_EQ(rows_->tokens().size(), 48u);
  EXPECT_TRUE(
      std::equal(texts_[0].tokens.begin(), texts_[0].tokens.end(), rows_->tokens().begin()));
  EXPECT_TRUE(
      std::equal(texts_[1].tokens.begin(), texts_[1].tokens.end(), rows_->tokens().begin() + 32));
  EXPECT_TRUE(std::ranges::equal(rows_->tokens_of(1), texts_[1].tokens));
}

TEST_F(FitRowsTest, PaddingFirstTokensAndExtremesDoNotCount) {
  std::size_t counted = 0;
  for (std::size_t row = 0; row < 48; ++row) {
    const bool is_token = row < 20 || (row >= 32 && row < 37);
    EXPECT_EQ(rows_->counts(row), is_token && row != 0 && row != 7 && row != 32) << row;
    counted += rows_->counts(row) ? 1 : 0;
  }
  EXPECT_EQ(rows_->counted(), counted);
  EXPECT_EQ(rows_->active().size(), 3u);
  EXPECT_EQ(rows_->active()[2], 0b11110);
}

TEST_F(FitRowsTest, ReadsWhatCountsAndZeros) {
  for (const PlaneShape& plane : planes_) {
    const std::size_t components = plane.components();
    const std::vector<float> all = rows_->ReadPlane(plane);
    ASSERT_EQ(all.size(), 48 * components);
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t first = rows_->first_row(i), count = rows_->tokens_of(i).size();
      std::vector<float> sample(count * components), counted(count * components, -1);
      rows_->ReadSample(i, plane, sample);
      rows_->ReadCounted(i, plane, counted);
      const ModelSpec of_sample = WithBlocks(spec_, static_cast<std::uint32_t>(count));
      const RawKv raw_kv(KvGeometry(of_sample), spec_.rope);
      std::vector<float> expected(sample.size());
      raw_kv.ReadRows(texts_[i].raw, plane.layer, plane.kind(), raw_kv.AnglesAt(0), expected);
      EXPECT_EQ(sample, expected);
      for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t at = t * components; at < (t + 1) * components; ++at) {
          EXPECT_EQ(counted[at], rows_->counts(first + t) ? expected[at] : 0);
          EXPECT_EQ(all[first * components + at], counted[at]);
        }
      }
    }
    EXPECT_EQ(
        std::count(all.begin() + static_cast<std::ptrdiff_t>(37 * components), all.end(), 0.0f),
        static_cast<std::ptrdiff_t>(11 * components));
  }
}

TEST_F(FitRowsTest, RotatesToWhatRawKvHolds) {
  const PlaneShape& plane = planes_[2];
  std::vector<float> rows = rows_->ReadPlane(plane);
  const std::vector<float> before = rows;
  rows_->Rotate(plane, rows);
  const KvGeometry geometry(WithBlocks(spec_, 5));
  const std::byte* const raw = texts_[1].raw.data() + geometry.kind_begin(1, KvKind::kK);
  bool turned = false;
  for (std::size_t at = plane.components(); at < 5 * plane.components(); ++at) {
    float expected;
    std::memcpy(&expected, raw + at * sizeof expected, sizeof expected);
    const std::size_t row_at = 32 * plane.components() + at;
    EXPECT_NEAR(rows[row_at], expected, 1e-5);
    turned |= std::abs(before[row_at] - expected) > 0.01f;
  }
  EXPECT_TRUE(turned);
}

// Tokens 4 to 15 of a text are those of another one from 20 on; K lies at other positions there.
TEST_F(FitRowsTest, DifferencesAreOfRowsBeforeRope) {
  const SyntheticText other = MakeText(spec_, 40, 7);
  const std::vector<SyntheticText> texts = {texts_[0],
                                            ShareTokens(spec_, other, 20, 12, 4, 18, 8, 0)};
  FitRows rows(spec_, SamplesOf(texts));
  SyntheticText broken = other;
  const KvGeometry geometry(WithBlocks(spec_, 40));
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(broken.raw.data() + geometry.kind_begin(0, KvKind::kV) +
                  22 * std::size_t{geometry.row_components(0, KvKind::kV)} * sizeof(float),
              &infinity, sizeof infinity);
  const FitRows::ReferencedRun run = {.sample = 1,
                                      .first_token = 4,
                                      .token_count = 12,
                                      .reference = {.tokens = broken.tokens, .raw = broken.raw},
                                      .offset = 20};
  rows.TakeDifferences({&run, 1});
  EXPECT_EQ(rows.counted(), 11u);
  for (std::size_t row = 0; row < rows.row_count(); ++row) {
    // Token 6 has a reference that is not finite.
    EXPECT_EQ(rows.counts(row), row >= 32 + 4 && row < 32 + 16 && row != 32 + 6) << row;
  }
  for (const PlaneShape& plane : planes_) {
    for (const float difference : rows.ReadPlane(plane)) EXPECT_NEAR(difference, 0, 2e-6f);
  }
}

}  // namespace
}  // namespace kvtrie
