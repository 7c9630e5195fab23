#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "storage/meta/node_row.h"
#include "storage/trie/path_hash.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

using std::chrono::seconds;

class EnginePutTest : public EngineFixture {
 protected:
  std::unique_ptr<PutSession> Begin(const PutAnnouncement& put) {
    auto session = engine_->BeginPut(tenant_, put);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  std::unique_ptr<PutSession> Begin(std::span<const TokenId> tokens) {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    return Begin(put);
  }

  // Collects what blocks end with.
  struct Answers {
    absl::Mutex mutex;
    std::map<std::uint32_t, absl::StatusOr<PutBlockResult>> of_block;

    PutSession::DoneCallback For(std::uint32_t block) {
      return [this, block](absl::StatusOr<PutBlockResult> result) {
        absl::MutexLock lock(&mutex);
        of_block.insert_or_assign(block, std::move(result));
      };
    }
    void Await(std::size_t count) {
      const auto enough = [this, count] { return of_block.size() >= count; };
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&enough));
    }
  };

  void Finish(PutSession& session, std::span<const TokenId> tokens, std::uint32_t block,
              Answers& answers) {
    auto writer = FilledBlock(session, PathOf(tokens), block);
    ASSERT_TRUE(writer.ok()) << writer.status();
    session.FinishBlock(*std::move(writer), answers.For(block));
  }

  // The frames of a path are one group.
  void ExpectBehindEachOther(std::span<const TokenId> tokens) {
    const LookupResult found = Lookup(tokens);
    std::vector<TrieNodeId> ids;
    for (const MatchedBlock& block : found.blocks.front()) ids.push_back(block.node);
    const auto frames = engine_->FindFrames(tenant_, model_, ids, Quality::kExact);
    ASSERT_TRUE(frames.ok());
    ASSERT_EQ(frames->size(), tokens.size() / kTestBlockTokens);
    PayloadLocation expected = frames->front()->at;
    EXPECT_EQ(expected.offset_units % PayloadLocation::kUnitsPerPage, 0u);
    for (const auto& frame : *frames) {
      ASSERT_TRUE(frame.has_value());
      expected.record_bytes = frame->at.record_bytes;
      EXPECT_EQ(frame->at, expected);
      expected.offset_units +=
          static_cast<std::uint32_t>(expected.disk_bytes() / PayloadLocation::kUnitBytes);
    }
  }
};

TEST_F(EnginePutTest, BlocksMayCompleteInAnyOrder) {
  Open();
  std::mt19937 random(7);
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const auto tokens = SessionTokens(seed, 12 * kTestBlockTokens);
    const auto session = Begin(tokens);
    std::vector<std::uint32_t> order = session->missing_blocks();
    std::shuffle(order.begin(), order.end(), random);
    Answers answers;
    for (const std::uint32_t block : order) Finish(*session, tokens, block, answers);
    answers.Await(12);
    for (const auto& [block, result] : answers.of_block)
      EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(ExpectOwnBytes(tokens), 12u);
  }
  ExpectSound();
}

TEST_F(EnginePutTest, ABlockIsNotThereBeforeThoseBeforeIt) {
  Open();
  const auto tokens = SessionTokens(1, 3 * kTestBlockTokens);
  const auto session = Begin(tokens);
  Answers answers;
  Finish(*session, tokens, 2, answers);
  Finish(*session, tokens, 1, answers);
  EXPECT_EQ(Matched(tokens), 0u);
  Finish(*session, tokens, 0, answers);
  answers.Await(3);
  EXPECT_EQ(Matched(tokens), 3u);
}

TEST_F(EnginePutTest, AnAbandonedBlockFailsThoseBehindItOnly) {
  Open();
  const auto tokens = SessionTokens(1, 6 * kTestBlockTokens);
  const auto session = Begin(tokens);
  Answers answers;
  for (const std::uint32_t block : {5u, 0u, 1u, 3u}) Finish(*session, tokens, block, answers);
  answers.Await(2);
  session->AbandonBlock(2);
  answers.Await(4);
  Finish(*session, tokens, 4, answers);
  answers.Await(5);
  for (const std::uint32_t block : {0u, 1u}) EXPECT_TRUE(answers.of_block.at(block).ok());
  for (const std::uint32_t block : {3u, 4u, 5u}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(answers.of_block.at(block).status())) << block;
  }
  EXPECT_EQ(ExpectOwnBytes(tokens), 2u);
  EXPECT_EQ(engine_->Stats().node_count, 2u);
  ExpectSound();
}

TEST_F(EnginePutTest, BlocksThatComeAfterAFailureAreAnsweredWithoutWaitingForOthers) {
  Open();
  const auto tokens = SessionTokens(1, 6 * kTestBlockTokens);
  const auto session = Begin(tokens);
  Answers answers;
  for (const std::uint32_t block : {0u, 1u, 3u}) Finish(*session, tokens, block, answers);
  answers.Await(2);
  session->AbandonBlock(2);
  answers.Await(3);
  Finish(*session, tokens, 5, answers);
  answers.Await(4);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers.of_block.at(5).status()));
}

TEST_F(EnginePutTest, EveryFinishedBlockIsAnsweredThoughItWasAbandoned) {
  Open();
  const auto tokens = SessionTokens(1, 2 * kTestBlockTokens);
  Answers answers;
  {
    const auto session = Begin(tokens);
    session->AbandonBlock(1);
    // A frame that is another one than its head said fails when it is sealed.
    std::vector<FrameSection> sections;
    for (const std::uint32_t bytes : RawSectionBytes(KvGeometry(spec_)))
      sections.push_back({bytes, 0});
    std::vector<std::byte> head(FrameHeaderBytes(sections.size()));
    WriteFrameHeader({.model = model_, .raw_bytes = raw_block_bytes_, .sections = sections}, head);
    auto writer = session->StartFrame(1, FrameView::Parse(head).value());
    ASSERT_TRUE(writer.ok()) << writer.status();
    const std::vector<std::byte> garbage(head.size() + raw_block_bytes_);
    const std::span<const std::byte> piece = garbage;
    ASSERT_TRUE((*writer)->AppendChunk({&piece, 1}, Crc32c(garbage)).ok());
    session->FinishBlock(*std::move(writer), answers.For(1));
    answers.Await(1);
  }
  EXPECT_TRUE(absl::IsInvalidArgument(answers.of_block.at(1).status()));
}

TEST_F(EnginePutTest, BlocksBeforeTheFirstThatAreNotStoredFailTheRestAtOnce) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  PutAnnouncement put;
  put.path = PathOf(tokens);
  put.first_block = 2;
  const auto session = Begin(put);
  EXPECT_THAT(session->missing_blocks(), testing::ElementsAre(2, 3));
  Answers answers;
  for (const std::uint32_t block : {2u, 3u}) Finish(*session, tokens, block, answers);
  answers.Await(2);
  for (const auto& [block, result] : answers.of_block) {
    EXPECT_TRUE(absl::IsFailedPrecondition(result.status())) << result.status();
  }
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

TEST_F(EnginePutTest, OnlyWhatWasAskedForMayBeBegunAndOnce) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(std::span(tokens).first(2 * kTestBlockTokens));
  const auto session = Begin(tokens);
  EXPECT_THAT(session->missing_blocks(), testing::ElementsAre(2, 3));
  TrieNodeId node;
  EXPECT_TRUE(session->IsStored(1, &node));
  EXPECT_FALSE(session->IsStored(2, &node));
  EXPECT_FALSE(session->IsStored(99, &node));
  const auto start = [&](std::uint32_t block, std::uint64_t bytes) {
    return session->StartBlock(block, bytes).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(start(1, raw_block_bytes_)));
  EXPECT_TRUE(absl::IsInvalidArgument(start(4, raw_block_bytes_)));
  EXPECT_TRUE(absl::IsInvalidArgument(start(2, raw_block_bytes_ + 1)));
  EXPECT_TRUE(start(2, raw_block_bytes_).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(start(2, raw_block_bytes_)));
}

// Public report 25: half a put, and then nothing.
TEST_F(EnginePutTest, AThousandAbortsLeaveNothing) {
  Open();
  const auto kept = SessionTokens(99, 2 * kTestBlockTokens);
  MustPut(kept);
  engine_->RunMaintenance();
  const EngineStats before = engine_->Stats();
  std::mt19937 random(8);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const auto tokens = SessionTokens(1000 + i, 3 * kTestBlockTokens);
    auto session = Begin(tokens);
    std::vector<std::unique_ptr<BlockWriter>> half_way;
    Answers answers;
    for (const std::uint32_t block : {1u, 2u}) {
      if (random() % 3 == 0) {
        Finish(*session, tokens, block, answers);  // waits for block 0 for ever
      } else {
        auto writer = session->StartBlock(block, raw_block_bytes_);
        ASSERT_TRUE(writer.ok());
        const auto bytes = Pattern(PathOf(tokens), block);
        const auto half = std::span<const std::byte>(bytes).first(bytes.size() / 2);
        ASSERT_TRUE((*writer)->AppendChunk({&half, 1}, Crc32c(half)).ok());
        half_way.push_back(*std::move(writer));
      }
    }
    EXPECT_EQ(Matched(tokens), 0u);
    // The answers of those that wait come when the session goes.
    const std::size_t finished = 2 - half_way.size();
    session.reset();
    answers.Await(finished);
    for (const auto& [block, result] : answers.of_block) {
      EXPECT_TRUE(absl::IsCancelled(result.status())) << result.status();
    }
  }
  AwaitNoOpenPuts();
  engine_->RunMaintenance();
  const EngineStats after = engine_->Stats();
  EXPECT_EQ(after.open_puts, 0u);
  EXPECT_EQ(after.put_memory_bytes, before.put_memory_bytes);
  EXPECT_EQ(after.live_bytes, before.live_bytes);
  EXPECT_EQ(after.node_count, before.node_count);
  EXPECT_EQ(after.pending_free_bytes, 0u);
  // Places of records that were given up are holes; one page heads each segment.
  EXPECT_LE(after.disk_bytes, before.disk_bytes + (std::uint64_t{1} << 20));
  EXPECT_EQ(ExpectOwnBytes(kept), 2u);
  ExpectSound();
}

TEST_F(EnginePutTest, AStalledPutBlocksNobody) {
  Open();
  const auto tokens = SessionTokens(1, 3 * kTestBlockTokens);
  auto stalled = Begin(tokens);
  auto writer = FilledBlock(*stalled, PathOf(tokens), 0);
  ASSERT_TRUE(writer.ok());
  MustPut(tokens);
  EXPECT_EQ(ExpectOwnBytes(tokens), 3u);
  // The late block changes nothing.
  const EngineStats before = engine_->Stats();
  Answers answers;
  stalled->FinishBlock(*std::move(writer), answers.For(0));
  answers.Await(1);
  ASSERT_TRUE(answers.of_block.at(0).ok());
  EXPECT_EQ(answers.of_block.at(0)->outcome, PutOutcome::kDuplicate);
  EXPECT_EQ(engine_->Stats().live_bytes, before.live_bytes);
  ExpectSound();
}

// Public report 13: a part of a block is never stored.
TEST_F(EnginePutTest, TheTailBehindTheLastFullBlockIsNotStored) {
  Open();
  const auto tokens = SessionTokens(1, 5 * kTestBlockTokens + 7);
  EXPECT_EQ(Put(tokens).size(), 5u);
  auto other = tokens;
  other.back() ^= 1;
  EXPECT_EQ(Matched(other), 5u);
  other.resize(5 * kTestBlockTokens + 3);
  const auto more = SessionTokens(2, 2 * kTestBlockTokens);
  other.insert(other.end(), more.begin(), more.end());
  EXPECT_EQ(Matched(other), 5u);
  MustPut(other);
  EXPECT_EQ(ExpectOwnBytes(other), 7u);
  Reopen();
  EXPECT_EQ(ExpectOwnBytes(other), 7u);
  EXPECT_EQ(Matched(tokens), 5u);
}

// Public report 27: writers of the same blocks race, and readers and deleters with them.
TEST_F(EnginePutTest, RacingWritersReadersAndDeletersNeverSeeAForeignByte) {
  Open();
  constexpr int kRounds = 12;
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    sessions.push_back(SessionTokens(seed / 3, 3 * kTestBlockTokens));
    const auto rest = SessionTokens(100 + seed, 3 * kTestBlockTokens);
    sessions.back().insert(sessions.back().end(), rest.begin(), rest.end());
  }
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> answered{0};
  for (unsigned id = 0; id < 8; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(id);
      for (int round = 0; round < kRounds; ++round) {
        const auto& tokens = sessions[random() % sessions.size()];
        if (id < 5) {
          for (const auto& result : Put(tokens)) {
            ++answered;
            // A delete may take away what a block hangs on.
            EXPECT_TRUE(result.ok() || absl::IsFailedPrecondition(result.status()))
                << result.status();
          }
        } else if (id < 7) {
          ExpectOwnBytes(tokens);
        } else {
          const std::size_t blocks = 1 + random() % 6;
          const auto path = PathOf(std::span(tokens).first(blocks * kTestBlockTokens));
          EXPECT_TRUE(engine_->Delete(tenant_, SelectionOf(path)).ok());
          engine_->RunMaintenance();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitNoOpenPuts();
  engine_->RunMaintenance();
  std::set<std::vector<TokenId>> survivors;
  for (const auto& tokens : sessions) {
    const std::uint32_t blocks = ExpectOwnBytes(tokens);
    for (std::size_t block = 1; block <= blocks; ++block) {
      survivors.emplace(tokens.begin(),
                        tokens.begin() + static_cast<std::ptrdiff_t>(block * kTestBlockTokens));
    }
  }
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.node_count, survivors.size());  // counted once
  EXPECT_EQ(stats.put_blocks_total, answered);
  EXPECT_EQ(stats.put_blocks_total,
            stats.stored_blocks_total + stats.duplicate_blocks_total + stats.failed_blocks_total);
  ExpectSound();
}

TEST_F(EnginePutTest, ManyWritersOfOnePathStoreItOnce) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  // All begin before anything is there, so that all blocks are asked of all.
  constexpr std::size_t kWriters = 16;
  std::vector<std::unique_ptr<PutSession>> sessions;
  for (std::size_t i = 0; i < kWriters; ++i) sessions.push_back(Begin(tokens));
  std::vector<Answers> answers(kWriters);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kWriters; ++i) {
    threads.emplace_back([&, i] {
      for (const std::uint32_t block : {3u, 1u, 0u, 2u}) {
        Finish(*sessions[i], tokens, block, answers[i]);
      }
      answers[i].Await(4);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t stored = 0;
  for (Answers& of : answers) {
    for (const auto& [block, result] : of.of_block) {
      ASSERT_TRUE(result.ok()) << result.status();
      stored += result->outcome == PutOutcome::kStored ? 1 : 0;
    }
  }
  EXPECT_EQ(stored, 4u);
  EXPECT_EQ(engine_->Stats().node_count, 4u);
  engine_->RunMaintenance();
  ExpectSound();
}

// Public report 28: one bad block does not spoil the batch.
TEST_F(EnginePutTest, ABatchAnswersBlockByBlock) {
  Open();
  const auto tokens = SessionTokens(1, 40 * kTestBlockTokens);
  MustPut(std::span(tokens).first(3 * kTestBlockTokens));
  auto racing = Begin(tokens);
  MustPut(std::span(tokens).first(5 * kTestBlockTokens));  // two became duplicates meanwhile
  Answers answers;
  for (const std::uint32_t block : racing->missing_blocks()) {
    if (block == 30) {
      EXPECT_TRUE(
          absl::IsInvalidArgument(racing->StartBlock(block, raw_block_bytes_ + 1).status()));
      racing->AbandonBlock(block);
    } else {
      Finish(*racing, tokens, block, answers);
    }
  }
  answers.Await(36);
  for (const auto& [block, result] : answers.of_block) {
    EXPECT_EQ(result.ok(), block < 30) << block << ": " << result.status();
    if (block < 30) {
      EXPECT_EQ(result->outcome, block < 5 ? PutOutcome::kDuplicate : PutOutcome::kStored);
    }
  }
  EXPECT_EQ(ExpectOwnBytes(tokens), 30u);

  // And reads: those that are missing are told in their slots.
  const LookupResult found = Lookup(tokens);
  std::vector<TrieNodeId> ids;
  for (const MatchedBlock& block : found.blocks.front()) ids.push_back(block.node);
  for (const std::size_t at : {0u, 7u, 8u, 29u}) ids.insert(ids.begin() + at, TrieNodeId{});
  ids.push_back(ids[1]);  // the same twice
  const auto frames = engine_->FindFrames(tenant_, model_, ids, Quality::kExact);
  ASSERT_TRUE(frames.ok());
  for (std::size_t at = 0; at < ids.size(); ++at) {
    EXPECT_EQ((*frames)[at].has_value(), !ids[at].empty()) << at;
    if ((*frames)[at]) {
      EXPECT_EQ((*frames)[at]->node, ids[at]);
    }
  }
  EXPECT_TRUE(engine_->FindFrames(tenant_, model_, {}, Quality::kExact)->empty());
}

TEST_F(EnginePutTest, BlocksOfOneCallLieBehindEachOther) {
  Open();
  blocks_per_write_ = 8;
  const auto tokens = SessionTokens(1, 8 * kTestBlockTokens);
  MustPut(tokens);
  ExpectBehindEachOther(tokens);
  Reopen();
  EXPECT_EQ(ExpectOwnBytes(tokens), 8u);
  ExpectSound();
}

// A client that sends block by block: what arrives during a write is written at once.
TEST_F(EnginePutTest, BlocksThatComeWhileTheDiskIsBusyAreWrittenTogether) {
  options_.io_threads = 1;
  Open();
  absl::Notification writing;
  absl::Notification go_on;
  const auto before = SessionTokens(1, kTestBlockTokens);
  const auto busy = Begin(before);
  auto writer = FilledBlock(*busy, PathOf(before), 0);
  ASSERT_TRUE(writer.ok());
  busy->FinishBlock(*std::move(writer), [&](const absl::StatusOr<PutBlockResult>&) {
    writing.Notify();
    go_on.WaitForNotification();
  });
  writing.WaitForNotification();
  const auto tokens = SessionTokens(2, 8 * kTestBlockTokens);
  const auto session = Begin(tokens);
  Answers answers;
  for (std::uint32_t block = 0; block < 8; ++block) Finish(*session, tokens, block, answers);
  go_on.Notify();
  answers.Await(8);
  for (const auto& [block, result] : answers.of_block) ASSERT_TRUE(result.ok()) << result.status();
  ExpectBehindEachOther(tokens);
  EXPECT_EQ(ExpectOwnBytes(tokens), 8u);
}

// Public report 50: block sizes side by side; 17: shapes that others trip over.
TEST_F(EnginePutTest, ModelsOfAllShapesLiveSideBySide) {
  Open();
  struct Shape {
    std::uint32_t block_tokens;
    std::vector<LayerRun> layer_runs;
    DType dtype;
  };
  const std::vector<Shape> shapes = {
      {1, {{2, 1, 40, 40}}, DType::kFloat32},
      {16, {{1, 8, 80, 80}}, DType::kBfloat16},
      {64, {{1, 1, 576, 0}}, DType::kFloat8E4m3},  // MLA
      {256, {{1, 7, 1, 1}, {2, 1, 3, 5}}, DType::kFloat16},
      {400, {{1, 5, 2, 2}}, DType::kInt8},
      {544, {{1, 2, 1, 2}, {1, 1, 9, 0}}, DType::kFloat8E5m2},
      {640, {{3, 1, 1, 1}}, DType::kUint8},
      {1024, {{1, 1, 2, 1}, {1, 32, 1, 1}}, DType::kFloat16},
  };
  const auto tokens = SessionTokens(1, 2100);
  std::vector<ModelSpec> specs;
  for (const Shape& shape : shapes) {
    ModelSpec spec = TestModelSpec();  // the same name
    spec.block_tokens = shape.block_tokens;
    spec.dtype = shape.dtype;
    spec.kv_groups.front().layer_runs = shape.layer_runs;
    specs.push_back(spec);
  }
  const auto path_of = [&](const ModelSpec& spec) {
    return PathOf(std::span(tokens).first(2 * spec.block_tokens + spec.block_tokens / 2));
  };
  for (const ModelSpec& spec : specs) {
    UseModel(spec);
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(Lookup(path_of(spec)).matched_blocks, 0u);
    MustPut(path_of(spec));
  }
  for (int pass = 0; pass < 2; ++pass) {
    for (const ModelSpec& spec : specs) {
      UseModel(spec);
      EXPECT_EQ(ExpectOwnBytes(path_of(spec)), 2u) << spec.block_tokens;
      EXPECT_EQ(Lookup(path_of(spec)).ignored_tail_tokens, spec.block_tokens / 2);
      EXPECT_EQ(Lookup(path_of(spec)).block_tokens, spec.block_tokens);
    }
    ExpectSound();
    if (pass == 0) Reopen();
  }
  for (const std::uint32_t block_tokens : {0u, kBlockTokensMax + 1}) {
    ModelSpec spec = TestModelSpec();
    spec.block_tokens = block_tokens;
    EXPECT_TRUE(absl::IsInvalidArgument(engine_->RegisterModel(tenant_, spec).status()));
  }
}

TEST_F(EnginePutTest, TheLargestBlockComesBackExactly) {
  options_.segment_bytes = std::uint64_t{16} << 20;  // a record larger than a segment
  options_.memory_tier_bytes = 0;
  spec_.block_tokens = 1024;
  spec_.kv_groups.front().layer_runs = {{8, 8, 512, 512}};
  Open();
  ASSERT_EQ(raw_block_bytes_, kRawBlockBytesMax);
  const auto tokens = SessionTokens(1, 1024);
  MustPut(tokens);
  EXPECT_EQ(ExpectOwnBytes(tokens), 1u);
  ModelSpec larger = spec_;
  larger.kv_groups.front().layer_runs.push_back({1, 1, 1, 0});
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->RegisterModel(tenant_, larger).status()));
}

// Public report 9: extra keys enter whole.
TEST_F(EnginePutTest, TenThousandExtraKeysNeverMatchOneAnother) {
  spec_.kv_groups.front().layer_runs = {{1, 1, 1, 1}};
  Open();
  const auto tokens = SessionTokens(1, kTestBlockTokens);
  std::mt19937_64 random(4);
  std::vector<std::string> keys;
  for (int i = 0; i < 10'000; ++i) {
    std::string key(32, '\0');
    for (std::size_t at = 0; at < key.size(); at += 8) {
      const std::uint64_t word = random();
      std::memcpy(key.data() + at, &word, 8);
    }
    if (i % 2 == 1) {
      key = keys.back();
      key[31] = static_cast<char>(key[31] ^ 1);  // one bit apart
    }
    keys.push_back(std::move(key));
  }
  // Few are stored; none of the others may find them.
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::vector<ExtraKey> extra = {{0, keys[i]}};
    const PathView path = PathOf(tokens, {}, extra);
    ASSERT_EQ(Lookup(path).matched_blocks, 0u) << i;
    if (i % 20 == 0) MustPut(path);
  }
  EXPECT_EQ(Matched(tokens), 0u);
  for (std::size_t i = 0; i < keys.size(); i += 20) {
    const std::vector<ExtraKey> extra = {{0, keys[i]}};
    ASSERT_EQ(ExpectOwnBytes(PathOf(tokens, {}, extra)), 1u);
  }
}

// Public report 4: other weights, dtype, tokenizer or block size under the same name.
TEST_F(EnginePutTest, OtherIdentitiesHaveNoHits) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  const ModelSpec stored = spec_;
  std::vector<ModelSpec> others(8, stored);
  others[0].dtype = DType::kFloat8E4m3;
  others[1].weights_revision = "r2";
  others[2].tokenizer_digest = "t2";
  others[3].block_tokens = 8;
  others[4].tensor_parallel_size = 2;
  others[5].adapter = "lora";
  others[6].rope.theta = 500'000;
  others[7].layout_tag = "nhd";
  for (const ModelSpec& other : others) {
    UseModel(other);
    EXPECT_EQ(Matched(tokens), 0u);
  }
  UseModel(stored);
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
}

// Public report 14: ranks are looked up together.
TEST_F(EnginePutTest, RanksMatchAsFarAsAllOfThemDo) {
  Open();
  const auto tokens = SessionTokens(1, 10 * kTestBlockTokens);
  std::vector<ModelId> ranks;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    ModelSpec spec = TestModelSpec();
    spec.tensor_parallel_size = 4;
    spec.tensor_parallel_rank = rank;
    UseModel(spec);
    ranks.push_back(model_);
    MustPut(tokens);
  }
  LookupQuery query{.models = ranks,
                    .path = PathOf(tokens),
                    .min_quality = Quality::kExact,
                    .lease = {},
                    .want_blocks = true};
  EXPECT_EQ(engine_->Lookup(tenant_, query)->matched_blocks, 10u);
  PathView block_4 = PathOf(std::span(tokens).first(5 * kTestBlockTokens));
  block_4.model = ranks[2];
  ASSERT_EQ(engine_->Delete(tenant_, SelectionOf(block_4))->blocks, 6u);
  const auto found = engine_->Lookup(tenant_, query);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->matched_blocks, 4u);
  for (const auto& blocks : found->blocks) EXPECT_EQ(blocks.size(), 4u);
}

TEST_F(EnginePutTest, AnnouncementsThatCannotBeStoredAreRefused) {
  Open();
  const auto tokens = SessionTokens(1, 2 * kTestBlockTokens);
  const auto refused = [&](const auto& change) {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    change(put);
    return absl::IsInvalidArgument(engine_->BeginPut(tenant_, put).status());
  };
  const std::string long_text(2000, 'x');
  const std::vector<ExtraKey> long_key = {{0, long_text}};
  const std::vector<ExtraKey> unordered = {{1, "a"}, {0, "b"}};
  const std::vector<ExtraKey> twice = {{1, "a"}, {1, "b"}};
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.path.salt = long_text; }));
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.path.extra_keys = long_key; }));
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.path.extra_keys = unordered; }));
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.path.extra_keys = twice; }));
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.session_id = long_text; }));
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.priority = 16; }));
  for (const double took : {-1.0, 1e-10, 1e4, std::nan("")}) {
    EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.compute_seconds_per_token = took; }));
  }
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.ttl = seconds(-1); }));
  EXPECT_TRUE(refused([&](PutAnnouncement& put) { put.probabilities.log_probs = "short"; }));
  EXPECT_EQ(engine_->Stats().open_puts, 0u);
}

TEST_F(EnginePutTest, DrainRefusesNewPutsAndWaitsForTheRunningOnes) {
  Open();
  const auto tokens = SessionTokens(1, kTestBlockTokens);
  auto session = Begin(tokens);
  EXPECT_FALSE(engine_->Drain(std::chrono::milliseconds(1)));
  PutAnnouncement put;
  put.path = PathOf(tokens);
  EXPECT_TRUE(absl::IsUnavailable(engine_->BeginPut(tenant_, put).status()));
  Answers answers;
  Finish(*session, tokens, 0, answers);
  answers.Await(1);
  EXPECT_TRUE(answers.of_block.at(0).ok());
  session.reset();
  EXPECT_TRUE(engine_->Drain(std::chrono::seconds(60)));
  EXPECT_EQ(ExpectOwnBytes(tokens), 1u);
}

TEST_F(EnginePutTest, DurablePutsAreAnsweredAfterASync) {
  Open();
  const auto tokens = SessionTokens(1, 3 * kTestBlockTokens);
  PutAnnouncement put;
  put.path = PathOf(tokens);
  put.durable = true;
  const std::uint64_t syncs = engine_->Stats().syncs_total;
  for (const auto& result : Put(put)) EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_GT(engine_->Stats().syncs_total, syncs);
}

// The callbacks of blocks may be the last to know of their session, while the engine ends.
TEST_F(EnginePutTest, TheEngineMayEndWhileCallbacksHoldTheirSessions) {
  Open();
  std::atomic<int> answered{0};
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto tokens = SessionTokens(seed, 2 * kTestBlockTokens);
    std::shared_ptr<PutSession> session = Begin(tokens);
    for (const std::uint32_t block : {1u, 0u}) {
      auto writer = FilledBlock(*session, PathOf(tokens), block);
      ASSERT_TRUE(writer.ok());
      session->FinishBlock(*std::move(writer),
                           [session, &answered](absl::StatusOr<PutBlockResult>) { ++answered; });
    }
  }
  engine_.reset();
  EXPECT_EQ(answered, 40);
}

// Two blocks whose hashes agree in the 32 bits that the index keeps: each is found, neither for the
// other, even while the tokens of neither are in memory.
TEST_F(EnginePutTest, BlocksOfEqualHashAreToldApartByTheirTokens) {
  constexpr std::uint32_t kTokens = 1024;
  spec_.block_tokens = kTokens;
  spec_.kv_groups.front().layer_runs = {{1, 1, 1, 0}};
  options_.token_cache_bytes = std::uint64_t{1} << 20;  // 192 such blocks
  StoreConfig identity;
  identity.path_hash_seed = 77;
  identity.namespace_secret.assign(32, 's');
  std::filesystem::create_directories(options_.data_dir);
  {
    std::ofstream file(options_.data_dir + "/identity", std::ios::binary);
    file << identity.Encode();
  }
  Open();
  const PathHasher hasher(identity.path_hash_seed);
  const std::uint64_t root = hasher.Root(tenant_, model_, {});
  std::vector<TokenId> tokens(kTokens);
  std::map<std::uint32_t, TokenId> seen;
  std::optional<std::pair<TokenId, TokenId>> twins;
  for (TokenId last = 0; !twins; ++last) {
    tokens.back() = last;
    const auto hash =
        static_cast<std::uint32_t>(hasher.Extend(root, Provenance::kExact, {}, tokens) >> 32);
    if (const auto [at, fresh] = seen.emplace(hash, last); !fresh) twins = {at->second, last};
  }
  auto first = tokens;
  first.back() = twins->first;
  auto second = tokens;
  second.back() = twins->second;
  MustPut(first);
  EXPECT_EQ(Matched(second), 0u);
  MustPut(second);
  EXPECT_EQ(engine_->Stats().node_count, 2u);
  for (int pass = 0; pass < 2; ++pass) {
    for (std::uint64_t seed = 1; seed <= 400; ++seed) {  // drives both out of the token cache
      const auto other = SessionTokens(seed, kTokens);
      if (pass == 0) MustPut(other);
      EXPECT_EQ(Matched(other), 1u);
    }
    EXPECT_FALSE(engine_
                     ->TryLookup(tenant_, {.models = {model_},
                                           .path = PathOf(first),
                                           .min_quality = Quality::kExact,
                                           .lease = {},
                                           .want_blocks = false})
                     .has_value());
    EXPECT_EQ(ExpectOwnBytes(pass == 0 ? first : second), 1u);
    EXPECT_EQ(ExpectOwnBytes(pass == 0 ? second : first), 1u);
  }
}

TEST_F(EnginePutTest, CountsOfBlocksEndWithThePrefix) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  const auto refusal = [&](const std::function<void(PutAnnouncement&)>& set) {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    set(put);
    const auto session = engine_->BeginPut(tenant_, put);
    EXPECT_TRUE(absl::IsInvalidArgument(session.status())) << session.status();
    return std::string(session.status().message());
  };
  EXPECT_THAT(refusal([](PutAnnouncement& put) { put.first_block = 5; }),
              testing::HasSubstr("first_block: 5, but the prefix has 4 full blocks"));
  EXPECT_THAT(refusal([](PutAnnouncement& put) {
                put.restored_blocks = 5;
                put.restored_quality = Quality::kHigh;
              }),
              testing::HasSubstr("restored_blocks: 5, but the prefix has 4 full blocks"));
}

}  // namespace
}  // namespace kvtrie
