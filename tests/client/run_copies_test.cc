#include "client/run_copies.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr std::uint32_t kBlockTokens = 4;

// Without RoPE, so that each token's bytes tell where they come from: 2 bytes of K, 1 of V.
ModelSpec Spec() {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "x";
  spec.dtype = DType::kUint8;
  spec.kv_groups = {{.layer_runs = {{1, 1, 2, 1}}, .window_tokens = 0}};
  spec.rope.pairing = RopePairing::kNone;
  spec.block_tokens = kBlockTokens;
  return spec;
}
constexpr std::size_t kBlockBytes = 3 * kBlockTokens;

TrieNodeId Node(std::uint8_t number) {
  TrieNodeId id;
  id.bytes.fill(number);
  return id;
}

// The block of a source session whose token t has the bytes t.
std::vector<std::byte> SourceBlock(std::uint32_t first_position) {
  std::vector<std::byte> raw;
  for (std::uint32_t t = 0; t < kBlockTokens; ++t) {
    raw.insert(raw.end(), 2, static_cast<std::byte>(first_position + t));
  }
  for (std::uint32_t t = 0; t < kBlockTokens; ++t) {
    raw.push_back(static_cast<std::byte>(first_position + t));
  }
  return raw;
}

class RunCopiesTest : public testing::Test {
 protected:
  RunCopiesTest() : tokens_(32), memory_(8, std::vector<std::byte>(kBlockBytes, std::byte{0xee})) {
    std::iota(tokens_.begin(), tokens_.end(), 1000u);
    blocks_.assign(memory_.begin(), memory_.end());
  }

  v1::ReusableRun* AddRun(std::uint32_t first_token, std::uint32_t token_count,
                          std::uint32_t first_position) {
    v1::ReusableRun* run = runs_.Add();
    run->set_first_token(first_token);
    run->set_token_count(token_count);
    run->set_first_position(first_position);
    run->set_node_offset(first_position % kBlockTokens);
    const std::uint32_t blocks = (first_position % kBlockTokens + token_count + 3) / kBlockTokens;
    for (std::uint32_t i = 0; i < blocks; ++i) {
      run->mutable_node_ids()->append(
          Node(static_cast<std::uint8_t>(first_position / kBlockTokens + i)).view());
    }
    return run;
  }
  absl::StatusOr<RunCopies> Plan(std::uint32_t skip_tokens) {
    return RunCopies::Plan(
        spec_, runs_, {.tokens = tokens_, .blocks = blocks_, .first_block = first_}, skip_tokens);
  }
  static FetchedBlock Loaded(Quality quality = Quality::kExact) {
    FetchedBlock fetched;
    fetched.state = FetchedBlock::State::kLoaded;
    fetched.quality = quality;
    return fetched;
  }
  // All sources come.
  RunsReport Complete(RunCopies& copies) {
    for (std::size_t i = 0; i < copies.sources().size(); ++i) {
      copies.Take(i, Loaded(), SourceBlock(copies.sources()[i].first_position));
    }
    return copies.TakeReport();
  }
  // Of the prompt's tokens, in K and V alike: the position that they came from; 0xee: none.
  std::vector<int> Places() const {
    std::vector<int> places;
    for (const auto& block : memory_) {
      for (std::uint32_t t = 0; t < kBlockTokens; ++t) {
        EXPECT_EQ(block[2 * t], block[2 * t + 1]);
        EXPECT_EQ(block[2 * t], block[2 * kBlockTokens + t]);
        places.push_back(static_cast<int>(block[2 * t]));
      }
    }
    return places;
  }
  std::string Refusal(std::uint32_t skip_tokens = 0) {
    const auto copies = Plan(skip_tokens);
    EXPECT_TRUE(absl::IsInvalidArgument(copies.status())) << copies.status();
    return std::string(copies.status().message());
  }

  const ModelSpec spec_ = Spec();
  google::protobuf::RepeatedPtrField<v1::ReusableRun> runs_;
  std::vector<TokenId> tokens_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::span<std::byte>> blocks_;
  std::uint32_t first_ = 0;
};

TEST_F(RunCopiesTest, EveryTokenComesFromItsPlaceInTheSource) {
  for (std::uint32_t first = 4; first < 9; ++first) {
    for (std::uint32_t position = 20; position < 25; ++position) {
      for (const std::uint32_t skip : {0u, 1u, 5u, 12u}) {
        SCOPED_TRACE(absl::StrCat(first, " from ", position, " without ", skip));
        runs_.Clear();
        AddRun(first, 11, position);
        AddRun(first + 12, 9, 60);
        for (auto& block : memory_) std::fill(block.begin(), block.end(), std::byte{0xee});
        auto copies = Plan(skip);
        ASSERT_TRUE(copies.ok()) << copies.status();
        const RunsReport report = Complete(*copies);
        std::vector<int> wanted(32, 0xee);
        for (std::uint32_t t = skip; t < 11; ++t)
          wanted[first + t] = static_cast<int>(position + t);
        for (std::uint32_t t = skip; t < 9; ++t) wanted[first + 12 + t] = static_cast<int>(60 + t);
        EXPECT_EQ(Places(), wanted);
        std::size_t count = 0;
        for (std::size_t t = 0; t < 32; ++t) {
          EXPECT_EQ(report.reused[t], wanted[t] != 0xee) << t;
          count += wanted[t] != 0xee ? 1 : 0;
        }
        EXPECT_EQ(report.reused_tokens, count);
        EXPECT_EQ(report.first_reused_block.has_value(), count != 0);
        if (count != 0) {
          EXPECT_EQ(report.first_reused_block, (first + skip) / kBlockTokens);
        }
      }
    }
  }
}

TEST_F(RunCopiesTest, SourcesSayAllTokensOnlyWhereThePromptDoes) {
  AddRun(6, 10, 21);  // of blocks 20, 24, 28: 3, 4 and 3 tokens
  const auto copies = Plan(3);
  ASSERT_TRUE(copies.ok());
  ASSERT_THAT(copies->sources(), SizeIs(2));  // the first holds skipped tokens only
  EXPECT_EQ(copies->sources()[0].node, Node(6));
  EXPECT_EQ(copies->sources()[0].first_position, 24u);
  EXPECT_THAT(copies->sources()[0].tokens, ElementsAre(1009, 1010, 1011, 1012));
  EXPECT_THAT(copies->sources()[1].tokens, IsEmpty());
  EXPECT_EQ(copies->sources()[1].token_count, 3u);
}

TEST_F(RunCopiesTest, WhatHasNoMemoryIsNotFetchedAndNotReused) {
  AddRun(2, 28, 20);
  first_ = 2;
  blocks_.resize(3);  // tokens 8 to 19
  blocks_[1] = {};
  auto copies = Plan(0);
  ASSERT_TRUE(copies.ok());
  for (const RunCopies::Source& source : copies->sources()) {
    EXPECT_LT(source.first_token, 20u);
    EXPECT_GT(source.first_token + source.token_count, 8u);
  }
  const RunsReport report = Complete(*copies);
  for (std::uint32_t t = 0; t < 32; ++t) {
    EXPECT_EQ(report.reused[t], (t >= 8 && t < 12) || (t >= 16 && t < 20)) << t;
  }
}

TEST_F(RunCopiesTest, AMissLeavesItsTokensAndNamesItsReason) {
  AddRun(4, 12, 20);
  auto copies = Plan(0);
  ASSERT_TRUE(copies.ok());
  ASSERT_THAT(copies->sources(), SizeIs(3));
  FetchedBlock missed;
  missed.state = FetchedBlock::State::kMissed;
  missed.status = absl::NotFoundError("gone");
  copies->Take(0, missed, {});
  copies->Take(1, Loaded(Quality::kHigh), SourceBlock(24));
  copies->Take(2, Loaded(Quality::kNearExact), SourceBlock(28));
  const RunsReport report = copies->TakeReport();
  EXPECT_EQ(report.reused_tokens, 8u);
  EXPECT_EQ(report.first_reused_block, 2u);
  EXPECT_EQ(report.runs[0].source_quality, Quality::kHigh);
  EXPECT_EQ(report.runs[0].reused_tokens, 8u);
  EXPECT_TRUE(absl::IsNotFound(report.runs[0].status));
  EXPECT_EQ(Places()[4], 0xee);
}

TEST_F(RunCopiesTest, AnswersThatCannotBeAreRefusedWithTheirField) {
  AddRun(4, 8, 20);
  AddRun(11, 8, 40);
  EXPECT_THAT(Refusal(), HasSubstr("reusable_runs[1].tokens 11"));
  runs_.RemoveLast();
  AddRun(28, 5, 40);
  EXPECT_THAT(Refusal(), HasSubstr("within the 32"));
  runs_.RemoveLast();
  AddRun(12, 0, 40);
  EXPECT_THAT(Refusal(), HasSubstr("reusable_runs[1].tokens"));
  runs_.RemoveLast();
  AddRun(0xffffffff, 0xffffffff, 40);
  EXPECT_THAT(Refusal(), HasSubstr("reusable_runs[1].tokens"));
  runs_.RemoveLast();
  AddRun(12, 8, 40)->set_node_offset(1);
  EXPECT_THAT(Refusal(), HasSubstr("reusable_runs[1].node_offset: 1"));
  runs_.RemoveLast();
  AddRun(12, 8, 40)->mutable_node_ids()->resize(31);
  EXPECT_THAT(Refusal(), HasSubstr("reusable_runs[1].node_ids: 31"));
  runs_.RemoveLast();
  EXPECT_THAT(Refusal(33), HasSubstr("skip_tokens: 33"));
  blocks_[3] = blocks_[3].first(5);
  EXPECT_THAT(Refusal(), HasSubstr("blocks: memory of 5"));
}

TEST_F(RunCopiesTest, AModelThatCannotBeMovedIsRefused) {
  ModelSpec spec = Spec();
  spec.layout_tag = "own";
  EXPECT_TRUE(absl::IsFailedPrecondition(
      RunCopies::Plan(spec, runs_, {.tokens = tokens_, .blocks = blocks_}, 0).status()));
}

}  // namespace
}  // namespace kvtrie
