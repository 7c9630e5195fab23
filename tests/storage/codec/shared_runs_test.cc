#include "storage/codec/shared_runs.h"

#include <vector>

#include "gtest/gtest.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

using Text = std::vector<TokenId>;

Text Draw(std::uint64_t seed, std::size_t count) {
  TestRandom random(seed);
  Text text;
  for (std::size_t i = 0; i < count; ++i) text.push_back(random.Below(1000));
  return text;
}

Text operator+(Text a, const Text& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<SharedRun> Find(const std::vector<Text>& texts, std::size_t tokens_min = 32) {
  const std::vector<std::span<const TokenId>> spans(texts.begin(), texts.end());
  return FindSharedRuns(spans, tokens_min);
}

TEST(SharedRunsTest, ADocumentBehindAnotherPrefixIsFound) {
  const Text document = Draw(1, 100);
  const auto runs = Find({Draw(2, 7) + document + Draw(3, 9), Draw(4, 5) + document + Draw(5, 50)});
  const std::vector<SharedRun> expected = {
      {.text = 1, .first_token = 5, .token_count = 100, .earlier_text = 0, .offset = 7}};
  EXPECT_EQ(runs, expected);
}

TEST(SharedRunsTest, ShorterRunsAreLeftOut) {
  for (const std::size_t length : {31u, 32u}) {
    const Text shared = Draw(1, length);
    const auto runs = Find({Draw(2, 7) + shared + Text{5000}, Draw(3, 9) + shared + Text{6000}});
    EXPECT_EQ(runs.size(), length == 32 ? 1u : 0u);
  }
}

// Its blocks are the same trie nodes, which are stored once anyway.
TEST(SharedRunsTest, ACommonPrefixIsNone) {
  const Text prefix = Draw(1, 80);
  const Text document = Draw(2, 40);
  const auto runs = Find({prefix + Draw(3, 10) + document, prefix + Draw(4, 20) + document});
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].first_token, 100u);
  EXPECT_EQ(runs[0].offset, 90u);
  // At the same place behind another prefix it is one.
  EXPECT_EQ(Find({Draw(5, 10) + document, Draw(6, 10) + document}).size(), 1u);
}

TEST(SharedRunsTest, RunsOfSeveralTextsFollowEachOther) {
  const Text a = Draw(1, 40), b = Draw(2, 50);
  const auto runs = Find({Draw(3, 3) + a, Draw(4, 4) + b, b + a});
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].earlier_text, 1u);
  EXPECT_EQ(runs[1].earlier_text, 0u);
  EXPECT_EQ(runs[1].first_token, 50u);
  EXPECT_EQ(runs[1].token_count, 40u);
}

TEST(SharedRunsTest, TextsOfOneTokenRepeatedEnd) {
  const auto runs = Find({Text(300, 7), Text{1} + Text(300, 7)});
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].token_count, 300u);
}

TEST(SharedRunsTest, NoTextsAndShortOnesAreFine) {
  EXPECT_TRUE(Find({}).empty());
  EXPECT_TRUE(Find({{}, {1, 2, 3}, {1, 2, 3}}).empty());
}

}  // namespace
}  // namespace kvtrie
