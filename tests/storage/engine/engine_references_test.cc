#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/codec/profile_header.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/rocksdb_meta_store.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A document under one prefix, coded, and the same under another: its second block is coded against
// the second of the first.
class EngineReferencesTest : public CodedFixture {
 protected:
  void OpenAndPut(bool with_member = true) {
    OpenWithProfile();
    MustPutFrames(Original(), Fine());
    if (!with_member) return;
    MustPutCopy(copy_);
  }
  void MustPutCopy(std::span<const TokenId> tokens) {
    MustPutFrames(PathOf(tokens.first(kTestBlockTokens)), Residual(Quality::kHigh));
    const auto results = PutMember({ReferenceTo(Original(), 1, Fine())}, tokens);
    ASSERT_EQ(results.size(), 1u);
    ASSERT_TRUE(results[0].ok()) << results[0].status();
    AwaitNoOpenPuts();
  }
  // Three copies; coding one of them anew takes so long.
  void OpenAndPutCopies(std::chrono::seconds each) {
    OpenAndPut();
    for (const std::uint64_t seed : {3, 4}) MustPutCopy(CopyBehind(seed));
    fake_codec_->refuse = [this, each](std::uint32_t) {
      clock_.Advance(each);
      return false;
    };
  }
  // Of the second block of the copy.
  PutResults PutMember(const std::vector<FrameReference>& references, Rung rung = Rung::kCoded,
                       bool offer = true) {
    return PutMember(references, copy_, rung, offer);
  }
  PutResults PutMember(const std::vector<FrameReference>& references,
                       std::span<const TokenId> tokens, Rung rung = Rung::kCoded,
                       bool offer = true) {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    put.quality = Quality::kHigh;
    for (const FrameReference& reference : references) {
      if (offer) put.references.push_back({reference.node, rung});
    }
    return PutFrames(put, Referenced(Quality::kHigh, references));
  }

  PathView Original() const { return PathOf(original_); }
  PathView Copy() const { return PathOf(copy_); }
  static FrameKind Fine() { return Residual(Quality::kNearExact); }
  CodecId CodecOfMember() {
    const auto frames = FramesAt(Copy(), Quality::kUnrated);
    return frames.size() == 2 && frames[1] ? frames[1]->codec : CodecId{};
  }
  void ExpectMemberReads() {
    const auto frames = FramesAt(Copy(), Quality::kHigh);
    ASSERT_EQ(frames.size(), 2u);
    ASSERT_TRUE(frames[1].has_value());
    EXPECT_EQ(frames[1]->codec, CodecId::kReferenced);
    const auto raw = RawBytes(*frames[1]);
    ASSERT_TRUE(raw.ok()) << raw.status();
    EXPECT_EQ(*raw, DecodedBytes(Copy(), 1, Referenced(Quality::kHigh, {})));
  }
  // The second block of the original behind another first one.
  std::vector<TokenId> CopyBehind(std::uint64_t seed) const {
    std::vector<TokenId> tokens = SessionTokens(seed, kTestBlockTokens);
    tokens.insert(tokens.end(), original_.begin() + kTestBlockTokens, original_.end());
    return tokens;
  }
  // With what is neither held nor needed.
  void Fill(int blocks) {
    for (int i = 0; i < blocks; ++i) Put(SessionTokens(1000 + filled_++, kTestBlockTokens));
  }

  std::uint64_t filled_ = 0;
  const std::vector<TokenId> original_ = SessionTokens(1, 2 * kTestBlockTokens);
  const std::vector<TokenId> copy_ = CopyBehind(2);
};

TEST_F(EngineReferencesTest, AMemberIsDecodedWithItsReference) {
  OpenAndPut();
  ExpectMemberReads();
  ExpectSound();
  Reopen();
  ExpectMemberReads();
  ExpectSound();
}

// Who asks for frames has not got what it was coded against.
TEST_F(EngineReferencesTest, AMemberIsServedAsARawFrame) {
  OpenAndPut();
  const auto frames = FramesAt(Copy(), Quality::kHigh);
  ASSERT_TRUE(frames[1].has_value());
  const auto loaded = ReadBlock(*frames[1], ReadAs::kFrame);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->view.codec(), CodecId::kRaw);
  EXPECT_TRUE(std::ranges::equal(loaded->view.body(),
                                 DecodedBytes(Copy(), 1, Referenced(Quality::kHigh, {}))));
  EXPECT_EQ(frames[1]->loaded_bytes(ReadAs::kFrame), loaded->bytes.view.size());
  // But to those who say that they decode it.
  const auto stored = ReadBlock(*frames[1], ReadAs::kStored);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->view.codec(), CodecId::kReferenced);
  EXPECT_EQ(frames[1]->loaded_bytes(ReadAs::kStored), frames[1]->at.record_bytes);
}

TEST_F(EngineReferencesTest, WhatThePutWasNotOfferedIsRefused) {
  OpenAndPut(/*with_member=*/false);
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  const auto results =
      PutMember({ReferenceTo(Original(), 1, Fine())}, Rung::kCoded, /*offer=*/false);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(absl::IsInvalidArgument(results[0].status()));
  EXPECT_THAT(std::string(results[0].status().message()), HasSubstr("not offered"));
  ExpectSound();
}

TEST_F(EngineReferencesTest, ReferencesThatAreNotThereOrOnAnotherRungAreRefused) {
  OpenAndPut(/*with_member=*/false);
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  FrameReference unknown = ReferenceTo(Original(), 1, Fine());
  unknown.node.bytes[3] ^= 1;
  for (const auto& [reference, rung] :
       {std::pair(unknown, Rung::kCoded), {ReferenceTo(Original(), 1, Fine()), Rung::kExact}}) {
    const auto results = PutMember({reference}, rung);
    ASSERT_EQ(results.size(), 1u);
    EXPECT_TRUE(absl::IsFailedPrecondition(results[0].status())) << results[0].status();
  }
  ExpectSound();
}

// Its node is there, with a frame on the same rung: of other KV.
TEST_F(EngineReferencesTest, AReferenceThatBecameAnotherFrameMeanwhileIsRefused) {
  OpenAndPut(/*with_member=*/false);
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  const FrameReference reference = ReferenceTo(Original(), 1, Fine());
  PutAnnouncement put;
  put.path = Copy();
  put.quality = Quality::kHigh;
  put.references = {{reference.node, Rung::kCoded, FramesAt(Original(), Quality::kHigh)[1]->at}};
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  MustPutFrames(Original(), Residual(Quality::kHigh));
  ASSERT_EQ(ReferenceTo(Original(), 1, Fine()).node, reference.node);

  const auto results = PutFrames(put, Referenced(Quality::kHigh, {reference}));
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(results[0].status())) << results[0].status();
  EXPECT_THAT(std::string(results[0].status().message()), HasSubstr("not stored so any more"));
  ExpectSound();
}

TEST_F(EngineReferencesTest, APutIsToldWhatItsBlocksCanBeCodedAgainst) {
  OpenWithProfile();
  const auto document = SessionTokens(7, 4 * kTestBlockTokens);
  const auto session = [&](std::uint64_t seed, std::size_t before) {
    auto tokens = SessionTokens(seed, before);
    tokens.insert(tokens.end(), document.begin(), document.end());
    return tokens;
  };
  const auto begin = [&](const std::vector<TokenId>& tokens, bool want = true) {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    put.quality = Quality::kHigh;
    put.want_references = want;
    auto begun = engine_->BeginPut(tenant_, put);
    EXPECT_TRUE(begun.ok()) << begun.status();
    return *std::move(begun);
  };
  const auto first = session(1, kTestBlockTokens);
  MustPutFrames(PathOf(first), Fine());
  const auto second = session(2, kTestBlockTokens + 5);
  EXPECT_TRUE(begin(second, /*want=*/false)->coding_plan().references.empty());
  {
    const auto put = begin(second);
    const CodingPlan& plan = put->coding_plan();
    const auto nodes = NodesOf(LookupAt(PathOf(first), Quality::kHigh));
    ASSERT_EQ(plan.references.size(), 4u);  // the last 5 tokens fill no block
    EXPECT_TRUE(plan.finer_blocks.empty());
    const BlockReferences& of_third = plan.references.at(2);
    EXPECT_THAT(of_third.nodes, testing::ElementsAre(nodes[1], nodes[2]));
    EXPECT_THAT(of_third.runs, testing::ElementsAre(ReferenceRun{0, 5, 0, kTestBlockTokens - 5},
                                                    ReferenceRun{5, kTestBlockTokens - 5, 1, 0}));
  }
  AwaitNoOpenPuts();

  // Where the text stands twice, at no more than the level: the third copy is to be finer.
  Selection all;
  all.all = true;
  ASSERT_TRUE(engine_->Delete(tenant_, all).ok());
  for (const std::uint64_t seed : {1, 2}) {
    MustPutFrames(PathOf(session(seed, kTestBlockTokens)), Residual(Quality::kHigh));
  }
  const auto put = begin(session(3, kTestBlockTokens));
  EXPECT_TRUE(put->coding_plan().references.empty());
  EXPECT_EQ(put->coding_plan().finer_level, Quality::kNearExact);
  EXPECT_THAT(put->coding_plan().finer_blocks, testing::ElementsAre(1, 2, 3, 4));
}

TEST_F(EngineReferencesTest, ThereAreNoChains) {
  OpenAndPut();
  // A third copy, against the member.
  const auto third = SessionTokens(3, kTestBlockTokens);
  const auto member = ReferenceTo(Copy(), 1, Referenced(Quality::kHigh, {}));
  PutAnnouncement put;
  put.path = PathOf(third);
  put.quality = Quality::kHigh;
  put.references = {{member.node, Rung::kCoded}};
  auto results = PutFrames(put, Referenced(Quality::kHigh, {member}));
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(results[0].status()));
  EXPECT_THAT(std::string(results[0].status().message()), HasSubstr("itself coded against"));
  ExpectSound();
}

TEST_F(EngineReferencesTest, AReferenceDoesNotBecomeAMember) {
  OpenWithProfile();
  MustPutFrames(Original(), Residual(Quality::kHigh));
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Fine());
  ASSERT_TRUE(PutMember({ReferenceTo(Original(), 1, Residual(Quality::kHigh))})[0].ok());
  const std::vector<TokenId> third = CopyBehind(3);
  MustPutFrames(PathOf(third), Fine());
  const auto other = ReferenceTo(PathOf(third), 1, Fine());
  PutAnnouncement put;
  put.path = Original();
  put.first_block = 1;
  put.quality = Quality::kNearExact;
  put.references = {{other.node, Rung::kCoded}};
  const auto results = PutFrames(put, Referenced(Quality::kNearExact, {other}));
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(results[0].status()));
  EXPECT_THAT(std::string(results[0].status().message()),
              HasSubstr("others were coded against it"));
  ExpectMemberReads();
  ExpectSound();
}

TEST_F(EngineReferencesTest, AReferenceIsNotEvictedBeforeItsMembers) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  spec_.kv_groups.front().layer_runs.front().layer_count = 64;  // 128 KiB per block
  OpenAndPut();
  for (int round = 0; round < 8; ++round) {
    clock_.Advance(std::chrono::hours(1));
    engine_->Lookup(tenant_, {.models = {model_}, .path = Copy(), .min_quality = Quality::kHigh})
        .IgnoreError();
    Fill(128);
    ASSERT_EQ(LookupAt(Original(), Quality::kNearExact).matched_blocks, 2u) << round;
  }
  ExpectMemberReads();
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  EXPECT_TRUE(engine_->Delete(tenant_, SelectionOf(Copy())).ok());
  clock_.Advance(std::chrono::hours(100));
  for (int round = 0; round < 8; ++round) Fill(128);
  EXPECT_LT(LookupAt(Original(), Quality::kNearExact).matched_blocks, 2u);
  ExpectSound();
}

// The last block of each path is what the first one of the other path was coded against.
TEST_F(EngineReferencesTest, PathsThatAreReferencesOfOneAnotherAreEvictedWhereNothingElseIs) {
  options_.index_bytes_max = std::uint64_t{1} << 20;
  OpenWithProfile();
  constexpr std::uint32_t kBlocks = 2000;
  std::vector<TokenId> texts[] = {SessionTokens(1, kBlocks * kTestBlockTokens),
                                  SessionTokens(2, kBlocks * kTestBlockTokens)};
  for (const int path : {0, 1}) {
    std::copy_n(texts[1 - path].begin(), kTestBlockTokens, texts[path].end() - kTestBlockTokens);
  }
  const auto put_first = [&](int path, int other) {
    const auto last = ReferenceTo(PathOf(texts[other]), kBlocks - 1, Fine());
    PutAnnouncement put;
    put.path = PathOf(std::span(texts[path]).first(kTestBlockTokens));
    put.quality = Quality::kHigh;
    put.references = {{last.node, Rung::kCoded}};
    const auto results = PutFrames(put, Referenced(Quality::kHigh, {last}));
    ASSERT_EQ(results.size(), 1u);
    ASSERT_TRUE(results[0].ok()) << results[0].status();
  };
  const auto put_rest = [&](int path) {
    PutAnnouncement put;
    put.path = PathOf(texts[path]);
    put.first_block = 1;
    put.quality = Quality::kNearExact;
    for (const auto& result : PutFrames(put, Fine())) ASSERT_TRUE(result.ok()) << result.status();
  };
  MustPutFrames(PathOf(std::span(texts[0]).first(kTestBlockTokens)), Residual(Quality::kSmall));
  put_rest(0);
  put_first(1, 0);
  put_rest(1);
  put_first(0, 1);
  ASSERT_FALSE(HasFatalFailure());
  AwaitNoOpenPuts();

  // One long path has no other leaf.
  constexpr std::uint32_t kLongest = 10'000;
  const std::vector<TokenId> tokens = SessionTokens(3, kLongest * kTestBlockTokens);
  for (std::uint32_t blocks = 500; blocks <= kLongest && engine_->Stats().lost_members_total == 0;
       blocks += 500) {
    MustPut(std::span(tokens).first(blocks * kTestBlockTokens));
    ASSERT_FALSE(HasFatalFailure()) << blocks;
  }
  EXPECT_GT(engine_->Stats().lost_members_total, 0u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, MembersAreCodedAnewBeforeTheirReferenceIsDeleted) {
  OpenAndPut();
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  EXPECT_EQ(LookupAt(Original(), Quality::kUnrated).matched_blocks, 1u);
  const auto frames = FramesAt(Copy(), Quality::kHigh);
  ASSERT_EQ(frames.size(), 2u);
  ASSERT_TRUE(frames[1].has_value());
  EXPECT_EQ(frames[1]->codec, CodecId::kResidual);
  EXPECT_EQ(frames[1]->quality, Quality::kHigh);  // no more than it was, whatever its frame says
  EXPECT_EQ(LookupAt(Copy(), Quality::kNearExact).matched_blocks, 0u);
  EXPECT_EQ(engine_->Stats().detached_blocks_total, 1u);
  EXPECT_EQ(engine_->Stats().lost_members_total, 0u);
  ExpectSound();
  Reopen();
  EXPECT_EQ(LookupAt(Copy(), Quality::kHigh).matched_blocks, 2u);
}

TEST_F(EngineReferencesTest, ADeleteDoesNotWaitForeverForMembers) {
  OpenAndPutCopies(std::chrono::seconds(40));
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  EXPECT_EQ(LookupAt(Original(), Quality::kUnrated).matched_blocks, 1u);
  EXPECT_EQ(engine_->Stats().detached_blocks_total, 2u);
  EXPECT_EQ(engine_->Stats().lost_members_total, 1u);
  ExpectSound();
}

// What is put while members are coded anew is not coded against what is about to go.
TEST_F(EngineReferencesTest, NothingIsCodedAgainstWhatIsBeingDeleted) {
  OpenAndPut();
  const std::vector<TokenId> late = CopyBehind(7);
  MustPutFrames(PathOf(std::span(late).first(kTestBlockTokens)), Residual(Quality::kHigh));
  const FrameReference reference = ReferenceTo(Original(), 1, Fine());
  PutResults results;
  fake_codec_->refuse = [&](std::uint32_t) {
    if (results.empty()) results = PutMember({reference}, late);
    return false;
  };
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(results[0].status())) << results[0].status();
  EXPECT_EQ(engine_->Stats().lost_members_total, 0u);
  EXPECT_EQ(LookupAt(Copy(), Quality::kHigh).matched_blocks, 2u);
  fake_codec_->refuse = nullptr;
  // The same text may be a reference again once it is put again.
  MustPutFrames(Original(), Fine());
  results = PutMember({reference}, late);
  EXPECT_TRUE(results[0].ok()) << results[0].status();
  AwaitNoOpenPuts();
  ExpectSound();
}

TEST_F(EngineReferencesTest, MembersAreCodedAnewWithTheProfileThatHasTheFinestLevel) {
  OpenAndPut();
  ProfileHeader header = ParseProfileHeader(TestProfile(spec_)).value();
  std::vector<std::byte> body(2000, std::byte{9});
  header.levels = {{Quality::kSmall, 2, 0.04f, 0.5f}};
  header.body_bytes = body.size();
  header.body_crc32c = Crc32c(body);
  std::vector<std::byte> newest(header.header_bytes());
  WriteProfileHeader(header, newest);
  newest.insert(newest.end(), body.begin(), body.end());
  clock_.Advance(std::chrono::seconds(10));
  MustPutProfile(newest);
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  EXPECT_EQ(engine_->Stats().lost_members_total, 0u);
  EXPECT_EQ(LookupAt(Copy(), Quality::kHigh).matched_blocks, 2u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, FramesMustBeCodedAgainstWhatIsStored) {
  OpenAndPut(/*with_member=*/false);
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  const FrameReference good = ReferenceTo(Original(), 1, Fine());
  FrameReference stale = good;
  stale.digest.bytes[3] ^= 1;
  FrameReference elsewhere = good;
  elsewhere.first_position += 1;
  FrameReference other_tokens = ReferenceTo(Original(), 0, Fine());
  const struct {
    FrameReference reference;
    absl::StatusCode code;
    const char* why;
  } cases[] = {
      {stale, absl::StatusCode::kFailedPrecondition, "whose KV is another one here"},
      {elsewhere, absl::StatusCode::kInvalidArgument, "begins at"},
      {other_tokens, absl::StatusCode::kInvalidArgument, "where that has others"},
  };
  for (const auto& bad : cases) {
    SCOPED_TRACE(bad.why);
    const auto results = PutMember({bad.reference});
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].status().code(), bad.code) << results[0].status();
    EXPECT_THAT(std::string(results[0].status().message()), HasSubstr(bad.why));
  }
  // Decoded once, however many are coded against it; and again once another frame lies there.
  const int calls = fake_codec_->calls;
  for (const std::uint64_t seed : {4, 5, 6}) MustPutCopy(CopyBehind(seed));
  EXPECT_EQ(fake_codec_->calls, calls);
  ExpectSound();
}

TEST_F(EngineReferencesTest, PinnedMembersKeepTheirReferencesWhateverElseGoes) {
  options_.index_bytes_max = std::uint64_t{1} << 20;
  options_.pinned_percent_max = 90;
  OpenAndPut();
  ASSERT_TRUE(engine_->Pin(tenant_, SelectionOf(Copy()), std::chrono::hours(1)).ok());
  // One long path that takes all that there is: its last block is held by the put that goes on.
  constexpr std::uint32_t kLongest = 12'000;
  const std::vector<TokenId> tokens = SessionTokens(3, kLongest * kTestBlockTokens);
  bool was_refused = false;
  for (std::uint32_t blocks = 500; blocks <= kLongest && !was_refused; blocks += 500) {
    for (const auto& result : Put(std::span(tokens).first(blocks * kTestBlockTokens))) {
      was_refused = was_refused || absl::IsResourceExhausted(result.status());
    }
  }
  EXPECT_TRUE(was_refused);
  EXPECT_EQ(LookupAt(Original(), Quality::kNearExact).matched_blocks, 2u);
  ExpectMemberReads();
  EXPECT_EQ(engine_->Stats().lost_members_total, 0u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, ABetterPutOverReferencesFreesThemAllAtOnce) {
  OpenWithProfile();
  const std::vector<TokenId> text = SessionTokens(1, 4 * kTestBlockTokens);
  MustPutFrames(PathOf(text), Residual(Quality::kHigh));
  std::vector<TokenId> copy = SessionTokens(2, kTestBlockTokens);
  copy.insert(copy.end(), text.begin() + kTestBlockTokens, text.end());
  MustPutFrames(PathOf(std::span(copy).first(kTestBlockTokens)), Residual(Quality::kSmall));
  for (std::uint32_t block = 1; block < 4; ++block) {
    const auto path = PathOf(std::span(copy).first((block + 1) * kTestBlockTokens));
    const FrameReference reference = ReferenceTo(PathOf(text), block, Residual(Quality::kHigh));
    PutAnnouncement put;
    put.path = path;
    put.quality = Quality::kSmall;
    put.references = {{reference.node, Rung::kCoded}};
    const auto results = PutFrames(put, Referenced(Quality::kSmall, {reference}));
    ASSERT_EQ(results.size(), 1u);
    ASSERT_TRUE(results[0].ok()) << results[0].status();
  }
  AwaitNoOpenPuts();
  PutAnnouncement better;
  better.path = PathOf(text);
  better.quality = Quality::kNearExact;
  EXPECT_FALSE(PutFrames(better, Fine()).back().ok());
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().detached_blocks_total, 3u);
  for (const auto& result : PutFrames(better, Fine())) EXPECT_TRUE(result.ok()) << result.status();
  ExpectSound();
}

TEST_F(EngineReferencesTest, MaintenanceCodesAFewMembersAtATime) {
  OpenAndPutCopies(std::chrono::seconds(2));
  ASSERT_TRUE(
      engine_->SetRetention(tenant_, SelectionOf(Original()), {.ttl = std::chrono::seconds(10)})
          .ok());
  clock_.Advance(std::chrono::seconds(11));
  for (std::uint64_t round = 1; round <= 3; ++round) {
    engine_->RunMaintenance();
    EXPECT_EQ(engine_->Stats().detached_blocks_total, round);
    EXPECT_EQ(engine_->Stats().node_count, 8u);
  }
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().node_count, 6u);
  EXPECT_EQ(engine_->Stats().lost_members_total, 0u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, AMemberThatCannotBeCodedAnewGoesToo) {
  fake_codec_->refuse = [](std::uint32_t) { return true; };
  OpenAndPut();
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  EXPECT_EQ(LookupAt(Copy(), Quality::kUnrated).matched_blocks, 1u);
  EXPECT_EQ(engine_->Stats().lost_members_total, 1u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, AllGoesAtOnceWhereMembersGoToo) {
  OpenAndPut();
  Selection all;
  all.all = true;
  ASSERT_TRUE(engine_->Delete(tenant_, all).ok());
  EXPECT_EQ(engine_->Stats().node_count, 0u);
  EXPECT_EQ(engine_->Stats().detached_blocks_total, 0u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, AnEndedReferenceWaitsUntilItsMembersAreCodedAnew) {
  OpenAndPut();
  ASSERT_TRUE(
      engine_->SetRetention(tenant_, SelectionOf(Original()), {.ttl = std::chrono::seconds(10)})
          .ok());
  clock_.Advance(std::chrono::seconds(11));
  engine_->RunMaintenance();
  EXPECT_EQ(LookupAt(Original(), Quality::kUnrated).matched_blocks, 0u);
  EXPECT_EQ(CodecOfMember(), CodecId::kResidual);
  clock_.Advance(std::chrono::seconds(2));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().node_count, 2u);
  EXPECT_EQ(LookupAt(Copy(), Quality::kHigh).matched_blocks, 2u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, AnEndedReferenceDoesNotWaitForever) {
  fake_codec_->refuse = [](std::uint32_t) { return true; };
  OpenAndPut();
  ASSERT_TRUE(
      engine_->SetRetention(tenant_, SelectionOf(Original()), {.ttl = std::chrono::seconds(10)})
          .ok());
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(std::chrono::seconds(60));
    engine_->RunMaintenance();
  }
  EXPECT_EQ(engine_->Stats().node_count, 1u);
  EXPECT_EQ(engine_->Stats().lost_members_total, 1u);
  ExpectSound();
}

// As after a stop of the server that took longer than ended references wait.
TEST_F(EngineReferencesTest, ReferencesAndMembersMayEndTogetherAndBeFoundLate) {
  for (const bool with_leaf : {true, false}) {
    SCOPED_TRACE(with_leaf);
    engine_.reset();
    OpenAndPut();
    const std::vector<TokenId> longer = [&] {
      std::vector<TokenId> tokens = copy_;
      tokens.resize(3 * kTestBlockTokens, 7);
      return tokens;
    }();
    if (!with_leaf) MustPut(longer);
    for (const PathView& path : {Original(), PathOf(with_leaf ? copy_ : longer)}) {
      ASSERT_TRUE(
          engine_->SetRetention(tenant_, SelectionOf(path), {.ttl = std::chrono::seconds(8)}).ok());
    }
    Reopen();
    clock_.Advance(std::chrono::seconds(80));
    engine_->RunMaintenance();
    EXPECT_EQ(engine_->Stats().node_count, 0u);
    ExpectSound();
  }
}

TEST_F(EngineReferencesTest, ReferencesThatEndDoNotWaitForMembersThatHaveEnded) {
  OpenAndPut();
  for (const PathView& path : {Original(), Copy()}) {
    ASSERT_TRUE(
        engine_->SetRetention(tenant_, SelectionOf(path), {.ttl = std::chrono::seconds(8)}).ok());
  }
  clock_.Advance(std::chrono::seconds(9));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().node_count, 0u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, TheExactFrameOfAReferenceMakesWayBeforeBlocksDo) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  spec_.kv_groups.front().layer_runs.front().layer_count = 64;  // 128 KiB per block
  OpenWithProfile();
  MustPutFrames(Original(), Fine());
  MustPut(original_);
  MustPutCopy(copy_);
  ASSERT_EQ(LookupAt(Original(), Quality::kExact).matched_blocks, 2u);
  Fill(512);
  EXPECT_EQ(LookupAt(Original(), Quality::kExact).matched_blocks, 0u);
  EXPECT_EQ(LookupAt(Original(), Quality::kNearExact).matched_blocks, 2u);
  EXPECT_EQ(engine_->Stats().evicted_frames_total, 2u);
  ExpectMemberReads();
  ExpectSound();
}

TEST_F(EngineReferencesTest, AMemberOfADamagedReferenceIsAMiss) {
  options_.memory_tier_bytes = 0;
  OpenAndPut();
  DamageRecord(FramesAt(Original(), Quality::kNearExact)[1]->at);
  const auto frames = FramesAt(Copy(), Quality::kHigh);
  ASSERT_TRUE(frames[1].has_value());
  EXPECT_FALSE(RawBytes(*frames[1]).ok());
  EXPECT_EQ(LookupAt(Copy(), Quality::kUnrated).matched_blocks, 1u);
  EXPECT_EQ(LookupAt(Original(), Quality::kUnrated).matched_blocks, 1u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, AnExactReferenceIsNotDroppedForItsCodedFrame) {
  OpenWithProfile();
  MustPut(original_);
  MustPutFrames(Original(), Residual(Quality::kHigh), /*beside_exact=*/true);
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  const auto results =
      PutMember({ReferenceTo(Original(), 1, {.codec = CodecId::kRaw})}, Rung::kExact);
  ASSERT_TRUE(results[0].ok()) << results[0].status();
  const auto change =
      engine_->SetRetention(tenant_, SelectionOf(Original()), {.quality = Quality::kHigh});
  ASSERT_TRUE(change.ok());
  EXPECT_EQ(change->dropped_frames, 1u);
  EXPECT_EQ(change->unchanged_blocks, 1u);
  ExpectMemberReads();
  ExpectSound();
}

// Also where it is not the frame that the index keeps.
TEST_F(EngineReferencesTest, RepairDropsMembersOfADamagedReference) {
  options_.memory_tier_bytes = 0;
  OpenWithProfile();
  MustPut(original_);
  MustPutFrames(Original(), Residual(Quality::kHigh), /*beside_exact=*/true);
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  const auto results =
      PutMember({ReferenceTo(Original(), 1, {.codec = CodecId::kRaw})}, Rung::kExact);
  ASSERT_TRUE(results[0].ok()) << results[0].status();
  DamageRecord(FramesAt(Original(), Quality::kExact)[1]->at);
  EXPECT_EQ(Findings(/*repair=*/true).size(), 1u);
  EXPECT_EQ(LookupAt(Original(), Quality::kHigh).matched_blocks, 2u);
  EXPECT_EQ(LookupAt(Copy(), Quality::kUnrated).matched_blocks, 1u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, ABetterFrameOfAReferenceComesOnceItsMembersAreCodedAnew) {
  OpenWithProfile();
  MustPutFrames(Original(), Residual(Quality::kHigh));
  MustPutFrames(PathOf(std::span(copy_).first(kTestBlockTokens)), Residual(Quality::kHigh));
  ASSERT_TRUE(PutMember({ReferenceTo(Original(), 1, Residual(Quality::kHigh))})[0].ok());
  PutAnnouncement put;
  put.path = Original();
  put.quality = Quality::kNearExact;
  const auto refused = PutFrames(put, Fine());
  ASSERT_EQ(refused.size(), 2u);
  EXPECT_TRUE(refused[0].ok());
  EXPECT_TRUE(absl::IsUnavailable(refused[1].status()));
  ExpectMemberReads();
  AwaitNoOpenPuts();
  engine_->RunMaintenance();
  EXPECT_EQ(CodecOfMember(), CodecId::kResidual);
  const auto taken = PutFrames(put, Fine());
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_TRUE(taken[0].ok()) << taken[0].status();
  ExpectSound();
}

TEST_F(EngineReferencesTest, AStartWithoutTheReferenceDropsTheMember) {
  OpenAndPut();
  const TrieNodeId reference = ReferenceTo(Original(), 1, Fine()).node;
  engine_.reset();
  {
    auto meta = OpenRocksDbMetaStore(options_.data_dir + "/meta", {});
    ASSERT_TRUE(meta.ok()) << meta.status();
    MetaBatch batch(tenant_);
    batch.Delete(MetaTable::kNodes, NodeRowKey{tenant_, reference}.Encode());
    ASSERT_TRUE(meta->store->Write(batch).ok());
    ASSERT_TRUE(meta->store->Sync().ok());
  }
  Open();
  EXPECT_EQ(LookupAt(Copy(), Quality::kUnrated).matched_blocks, 1u);
  EXPECT_THAT(engine_->recovery().notes, testing::Contains(HasSubstr("coded against blocks that")));
  ExpectSound();
  Reopen();
  EXPECT_EQ(engine_->Stats().node_count, 2u);
  ExpectSound();
}

TEST_F(EngineReferencesTest, MembersAreFoundAgainWhenTheMetadataIsLost) {
  OpenAndPut();
  engine_.reset();
  fs::remove_all(options_.data_dir + "/meta");
  Open();
  EXPECT_TRUE(engine_->recovery().rebuilt_from_segments);
  ExpectMemberReads();
  ExpectSound();
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(Original())).ok());
  EXPECT_EQ(engine_->Stats().detached_blocks_total, 1u);
}

}  // namespace
}  // namespace kvtrie
