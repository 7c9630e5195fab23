#include "storage/codec/token_table_fit.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

class TokenTableFitTest : public testing::Test {
 protected:
  TokenTableFitTest() : texts_(FitTexts(spec_)), rows_(spec_, SamplesOf(texts_)) {
    profile_ = PlainProfile(spec_);
    for (std::size_t row = 0; row < rows_.row_count(); ++row) {
      if (rows_.counts(row)) seen_.insert(rows_.tokens()[row]);
    }
    for (TokenId token = 1'000'000; token < 1'000'020; ++token) {
      unseen_.push_back(token);
      for (std::size_t c = 0; c < kWidth; ++c) {
        unseen_rows_.push_back(0.01f * static_cast<float>(token % 10) -
                               0.02f * static_cast<float>(c % 5));
      }
    }
  }

  // What the table says of a token, [K components, V components].
  std::vector<float> RowOf(TokenId token) const {
    const auto found = std::find(profile_.table_tokens.begin(), profile_.table_tokens.end(), token);
    if (found == profile_.table_tokens.end()) return {};
    const std::size_t entry =
        static_cast<std::size_t>(found - profile_.table_tokens.begin()) * kWidth;
    std::vector<float> row;
    for (std::size_t c = 0; c < kWidth; ++c) {
      const PlaneProfile& plane = profile_.plane_profiles[c / 16];
      row.push_back(plane.bias[c % 16] +
                    plane.input_scales[c % 16] * profile_.table_rows[entry + c]);
    }
    return row;
  }

  static constexpr std::size_t kWidth = 32;
  const ModelSpec spec_ = SyntheticSpec({{2, 2, 8, 8}});
  const std::vector<SyntheticText> texts_;
  const FitRows rows_;
  ResidualProfile profile_;
  std::set<TokenId> seen_;
  std::vector<TokenId> unseen_;
  std::vector<float> unseen_rows_;
};

TEST_F(TokenTableFitTest, SeenTokensHaveTheMeanOfTheirRows) {
  FitTokenTable(rows_, {}, 1u << 20, profile_);
  EXPECT_EQ(std::set<TokenId>(profile_.table_tokens.begin(), profile_.table_tokens.end()), seen_);
  const std::vector<float> k = rows_.ReadPlane(profile_.planes[0]);
  const TokenId token = *seen_.begin();
  double sum = 0, count = 0;
  for (std::size_t row = 0; row < rows_.row_count(); ++row) {
    if (!rows_.counts(row) || rows_.tokens()[row] != token) continue;
    sum += k[row * 16 + 3];
    ++count;
  }
  const double most = 127 * profile_.plane_profiles[0].input_scales[3];
  EXPECT_NEAR(RowOf(token)[3], std::clamp(sum / count, -most, most),
              profile_.plane_profiles[0].input_scales[3]);
}

TEST_F(TokenTableFitTest, TheVocabularyFillsWhatSamplesLeave) {
  FitTokenTable(rows_, {unseen_, unseen_rows_}, seen_.size() + 5, profile_);
  EXPECT_EQ(profile_.table_tokens.size(), seen_.size() + 5);
  EXPECT_TRUE(std::is_sorted(profile_.table_tokens.begin(), profile_.table_tokens.end()));
  for (std::size_t i = 0; i < 5; ++i) {
    const std::vector<float> row = RowOf(unseen_[i]);
    ASSERT_EQ(row.size(), kWidth);
    for (std::size_t c = 0; c < kWidth; ++c) {
      const float scale = profile_.plane_profiles[c / 16].input_scales[c % 16];
      EXPECT_NEAR(row[c], unseen_rows_[i * kWidth + c], 0.51f * scale);
    }
  }
  EXPECT_TRUE(RowOf(unseen_[5]).empty());
}

TEST_F(TokenTableFitTest, SamplesTellMoreOfATokenThanTheVocabulary) {
  FitTokenTable(rows_, {}, 1u << 20, profile_);
  const ResidualProfile of_samples = profile_;
  const std::vector<TokenId> again(seen_.begin(), seen_.end());
  const std::vector<float> zeros(again.size() * kWidth);
  FitTokenTable(rows_, {again, zeros}, 1u << 20, profile_);
  EXPECT_EQ(profile_.table_tokens, of_samples.table_tokens);
  EXPECT_EQ(profile_.table_rows, of_samples.table_rows);
}

TEST_F(TokenTableFitTest, TheCommonestStayWhereThereIsNoRoomForAll) {
  FitTokenTable(rows_, {unseen_, unseen_rows_}, 3, profile_);
  ASSERT_EQ(profile_.table_tokens.size(), 3u);
  const auto count_of = [&](TokenId token) {
    std::size_t count = 0;
    for (std::size_t row = 0; row < rows_.row_count(); ++row) {
      if (rows_.counts(row) && rows_.tokens()[row] == token) ++count;
    }
    return count;
  };
  std::size_t least = SIZE_MAX;
  for (const TokenId token : profile_.table_tokens) least = std::min(least, count_of(token));
  for (const TokenId token : seen_) {
    const bool is_in = std::find(profile_.table_tokens.begin(), profile_.table_tokens.end(),
                                 token) != profile_.table_tokens.end();
    if (!is_in) {
      EXPECT_LE(count_of(token), least);
    }
  }
}

}  // namespace
}  // namespace kvtrie
