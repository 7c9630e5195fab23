#include "server/put_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>

#include "storage/base/crc32c.h"
#include "tests/server/fake_put_host.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Content(std::uint32_t block_index) {
  return std::string(kBlockBytes, static_cast<char>('a' + block_index % 26));
}

class MessageBuilder {
 public:
  v1::PutAnnounce& Announce(std::uint64_t put_id, std::uint32_t block_count) {
    v1::PutAnnounce* announce = message_->request.add_announces();
    announce->set_put_id(put_id);
    announce->mutable_prefix()->set_model_id(std::string(16, 'm'));
    announce->mutable_prefix()->set_tokens(std::string(block_count * kBlockTokens * 4, '\1'));
    return *announce;
  }
  MessageBuilder& Chunk(std::uint64_t put_id, std::uint32_t block_index, std::uint64_t offset,
                        std::string_view content) {
    v1::Chunk* chunk = message_->request.add_chunks();
    chunk->set_put_id(put_id);
    chunk->set_block_index(block_index);
    chunk->set_offset(offset);
    chunk->set_bytes(static_cast<std::uint32_t>(content.size()));
    chunk->set_crc32c(Crc32c({reinterpret_cast<const std::byte*>(content.data()), content.size()}));
    data_ += content;
    return *this;
  }
  MessageBuilder& Block(std::uint64_t put_id, std::uint32_t block_index) {
    return Chunk(put_id, block_index, 0, Content(block_index));
  }
  v1::PutRequest& request() { return message_->request; }

  // The bytes live as long as the builder.
  std::unique_ptr<PutMessage> Take() {
    message_->flat = {reinterpret_cast<const std::byte*>(data_.data()), data_.size()};
    return std::move(message_);
  }

 private:
  std::unique_ptr<PutMessage> message_ = std::make_unique<PutMessage>();
  std::string data_;
};

class PutStreamTest : public ::testing::Test {
 protected:
  ~PutStreamTest() override {
    stream_->Cancel();
    host_.RunPosted();
    host_.store.ReleaseFinishes();
    EXPECT_EQ(host_.store.live_sessions, 0);
    EXPECT_EQ(host_.store.live_writers, 0);
    EXPECT_EQ(host_.blocks.used_bytes(), 0u);
    EXPECT_EQ(host_.announces.used_bytes(), 0u);
  }

  // All answers that have gathered, since the last call.
  v1::PutResponse Answers() {
    v1::PutResponse all;
    v1::PutResponse part;
    while (stream_->TakeResponse(&part)) all.MergeFrom(part);
    return all;
  }

  FakeHost host_;
  RequestLimits limits_;
  int changes_ = 0;
  std::shared_ptr<PutStream> stream_ = PutStream::Create(host_, limits_, [this] { ++changes_; });
};

TEST_F(PutStreamTest, PlanNamesTheMissingBlocksAndDoneFollowsTheLastAck) {
  host_.store.stored = {0, 2};
  MessageBuilder announce;
  announce.Announce(7, 4);
  stream_->Receive(announce.Take());
  v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.plans_size(), 1);
  const v1::PutPlan& plan = answers.plans(0);
  EXPECT_EQ(plan.put_id(), 7u);
  EXPECT_EQ(plan.block_count(), 4u);
  EXPECT_EQ(plan.block_bytes(), kBlockBytes);
  ASSERT_EQ(plan.missing_blocks().size(), 8u);
  std::uint32_t missing[2];
  std::memcpy(missing, plan.missing_blocks().data(), sizeof missing);
  EXPECT_THAT(missing, ElementsAre(1u, 3u));
  EXPECT_EQ(answers.dones_size(), 0);

  MessageBuilder blocks;
  stream_->Receive(blocks.Block(7, 1).Block(7, 3).Take());
  answers = Answers();
  ASSERT_EQ(answers.acks_size(), 2);
  EXPECT_EQ(answers.acks(0).block_index(), 1u);
  EXPECT_EQ(answers.acks(0).node_id(), FakeSession::NodeOf(1).view());
  ASSERT_EQ(answers.dones_size(), 1);
  EXPECT_EQ(answers.dones(0).stored_blocks(), 2u);
  EXPECT_EQ(answers.dones(0).duplicate_blocks(), 2u);
  EXPECT_EQ(host_.store.published[3], Content(3));
  EXPECT_TRUE(stream_->idle());
}

TEST_F(PutStreamTest, PlanSaysHowBlocksAreBestCoded) {
  const TrieNodeId first = FakeSession::NodeOf(5), second = FakeSession::NodeOf(6);
  host_.store.coding_plan.references[2] = {.nodes = {first, second},
                                           .runs = {{0, 3, 0, 1}, {3, 1, 1, 0}}};
  host_.store.coding_plan.finer_blocks = {0, 3};
  host_.store.coding_plan.finer_level = Quality::kNearExact;
  MessageBuilder announce;
  announce.Announce(7, 4);
  stream_->Receive(announce.Take());
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.plans_size(), 1);
  const v1::PutPlan& plan = answers.plans(0);
  ASSERT_EQ(plan.references_size(), 1);
  EXPECT_EQ(plan.references(0).block_index(), 2u);
  EXPECT_EQ(plan.references(0).node_ids(), std::string(first.view()) + std::string(second.view()));
  ASSERT_EQ(plan.references(0).runs_size(), 2);
  EXPECT_EQ(plan.references(0).runs(0).token_count(), 3u);
  EXPECT_EQ(plan.references(0).runs(0).offset(), 1u);
  EXPECT_EQ(plan.references(0).runs(1).first_token(), 3u);
  EXPECT_EQ(plan.references(0).runs(1).reference(), 1u);
  std::uint32_t finer[2];
  ASSERT_EQ(plan.finer_blocks().size(), sizeof finer);
  std::memcpy(finer, plan.finer_blocks().data(), sizeof finer);
  EXPECT_THAT(finer, ElementsAre(0u, 3u));
  EXPECT_EQ(plan.finer_quality(), v1::QUALITY_NEAR_EXACT);
}

TEST_F(PutStreamTest, NothingMissingIsDoneAtOnce) {
  host_.store.stored = {0, 1};
  MessageBuilder announce;
  announce.Announce(1, 2);
  stream_->Receive(announce.Take());
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.dones_size(), 1);
  EXPECT_EQ(answers.dones(0).duplicate_blocks(), 2u);
}

TEST_F(PutStreamTest, WhatComputingTookIsPassedOn) {
  MessageBuilder announce;
  announce.Announce(1, 2).set_compute_seconds_per_token(0.125);
  stream_->Receive(announce.Take());
  EXPECT_EQ(host_.compute_seconds_per_token, 0.125);
  MessageBuilder wrong;
  wrong.Announce(2, 2).set_compute_seconds_per_token(-1);
  stream_->Receive(wrong.Take());
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.plans_size(), 2);
  EXPECT_THAT(answers.plans(1).status().message(), testing::HasSubstr("compute_seconds_per_token"));
}

TEST_F(PutStreamTest, EagerBytesOfStoredBlocksCostNothing) {
  host_.store.stored = {0, 1};
  MessageBuilder message;
  message.Announce(1, 3).set_eager(true);
  stream_->Receive(message.Block(1, 0).Block(1, 1).Block(1, 2).Take());
  v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.acks_size(), 3);
  EXPECT_TRUE(answers.acks(0).duplicate());
  EXPECT_TRUE(answers.acks(1).duplicate());
  EXPECT_FALSE(answers.acks(2).duplicate());
  EXPECT_EQ(host_.store.published.size(), 1u);
  // Late bytes of an ended put are not an error.
  MessageBuilder late;
  stream_->Receive(late.Block(1, 0).Take());
  EXPECT_TRUE(stream_->status().ok());
}

TEST_F(PutStreamTest, EagerBytesOfARefusedPutAreDropped) {
  host_.begin_status = absl::NotFoundError("model");
  MessageBuilder message;
  message.Announce(1, 2).set_eager(true);
  stream_->Receive(message.Block(1, 0).Take());
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.plans_size(), 1);
  EXPECT_EQ(answers.plans(0).status().code(), 5u);
  EXPECT_TRUE(stream_->status().ok());
}

TEST_F(PutStreamTest, ABadBlockFailsAlone) {
  struct Case {
    const char* what;
    std::function<void(MessageBuilder&)> send;
  };
  const Case cases[] = {
      {"crc32c",
       [](MessageBuilder& m) {
         m.Chunk(1, 1, 0, Content(1));
         m.request().mutable_chunks(m.request().chunks_size() - 1)->set_crc32c(1);
       }},
      {"offset", [](MessageBuilder& m) { m.Chunk(1, 1, 10, Content(1)); }},
      {"offset", [](MessageBuilder& m) { m.Chunk(1, 1, 0, "half").Chunk(1, 1, 50, "rest"); }},
      {"too many", [](MessageBuilder& m) { m.Chunk(1, 1, 0, std::string(kBlockBytes + 1, 'x')); }},
  };
  std::uint64_t put_id = 1;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    auto stream = PutStream::Create(host_, limits_, [] {});
    MessageBuilder message;
    message.Announce(put_id, 3).set_eager(true);
    message.Block(1, 0);
    c.send(message);
    message.Block(1, 2);
    stream->Receive(message.Take());
    EXPECT_TRUE(stream->status().ok()) << stream->status();
    v1::PutResponse answers;
    ASSERT_TRUE(stream->TakeResponse(&answers));
    ASSERT_EQ(answers.acks_size(), 3) << answers.DebugString();
    for (const v1::PutAck& ack : answers.acks()) {
      EXPECT_EQ(ack.status().code(), ack.block_index() == 1 ? 3u : 0u);
      if (ack.block_index() == 1) {
        EXPECT_THAT(ack.status().message(), HasSubstr(c.what));
      }
    }
    ASSERT_EQ(answers.dones_size(), 1);
    EXPECT_EQ(answers.dones(0).failed_blocks(), 1u);
    EXPECT_EQ(answers.dones(0).stored_blocks(), 2u);
    stream->Cancel();
  }
  EXPECT_THAT(host_.store.abandoned, ElementsAre(1u, 1u, 1u, 1u));
}

TEST_F(PutStreamTest, BreakingTheProtocolEndsTheStream) {
  struct Case {
    const char* field;
    std::function<void(MessageBuilder&)> send;
  };
  const Case cases[] = {
      {"chunks.put_id", [](MessageBuilder& m) { m.Block(99, 0); }},
      {"chunks.block_index", [](MessageBuilder& m) { m.Block(1, 17); }},
      {"data",
       [](MessageBuilder& m) {
         m.Block(1, 0);
         m.request().mutable_chunks(0)->set_bytes(7);
       }},
      {"chunks[0].bytes", [](MessageBuilder& m) { m.request().add_chunks()->set_put_id(1); }},
      {"announces.put_id", [](MessageBuilder& m) { m.Announce(1, 1); }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.field);
    auto stream = PutStream::Create(host_, limits_, [] {});
    MessageBuilder announce;
    announce.Announce(1, 2);
    stream->Receive(announce.Take());
    MessageBuilder message;
    c.send(message);
    stream->Receive(message.Take());
    EXPECT_TRUE(absl::IsInvalidArgument(stream->status())) << stream->status();
    EXPECT_THAT(std::string(stream->status().message()), HasSubstr(c.field));
    EXPECT_FALSE(stream->wants_message());
    stream->Cancel();
  }
}

TEST_F(PutStreamTest, MessagesWaitUntilThePutHasBegun) {
  host_.hold_begins = true;
  MessageBuilder message;
  message.Announce(1, 1).set_eager(true);
  stream_->Receive(message.Block(1, 0).Take());
  EXPECT_FALSE(stream_->wants_message());
  EXPECT_FALSE(stream_->owes_progress());
  ASSERT_TRUE(host_.held_begin.has_value());
  (*host_.held_begin)();
  EXPECT_GT(changes_, 0);
  EXPECT_TRUE(stream_->wants_message());
  EXPECT_EQ(Answers().dones_size(), 1);
}

TEST_F(PutStreamTest, CancelWhileThePutBeginsLeavesNothing) {
  host_.hold_begins = true;
  MessageBuilder message;
  message.Announce(1, 1).set_eager(true);
  stream_->Receive(message.Block(1, 0).Take());
  stream_->Cancel();
  (*host_.held_begin)();
  EXPECT_TRUE(host_.store.published.empty());
}

TEST_F(PutStreamTest, BlocksWaitForMemoryAndGoOnWhenThereIsSome) {
  ASSERT_TRUE(host_.blocks.TryAcquire(4 * kBlockBytes));
  MessageBuilder message;
  message.Announce(1, 2).set_eager(true);
  stream_->Receive(message.Block(1, 0).Block(1, 1).Take());
  EXPECT_FALSE(stream_->wants_message());
  EXPECT_TRUE(host_.store.published.empty());
  host_.blocks.Release(4 * kBlockBytes);
  EXPECT_TRUE(host_.store.published.empty());  // not on the thread that released
  host_.RunPosted();
  EXPECT_EQ(host_.store.published.size(), 2u);
  EXPECT_TRUE(stream_->wants_message());
}

TEST_F(PutStreamTest, CancelWhileWaitingForMemoryGivesItBack) {
  ASSERT_TRUE(host_.blocks.TryAcquire(4 * kBlockBytes));
  MessageBuilder message;
  message.Announce(1, 1).set_eager(true);
  stream_->Receive(message.Block(1, 0).Take());
  stream_->Cancel();
  host_.blocks.Release(4 * kBlockBytes);
  host_.RunPosted();
  EXPECT_EQ(host_.blocks.used_bytes(), 0u);
}

// With a block half open, its rest is behind the one that would have to wait.
TEST_F(PutStreamTest, InterleavedBlocksFailRatherThanWaitForThemselves) {
  ASSERT_TRUE(host_.blocks.TryAcquire(3 * kBlockBytes));
  MessageBuilder message;
  message.Announce(1, 2).set_eager(true);
  const std::string content = Content(0);
  message.Chunk(1, 0, 0, content.substr(0, 60));
  message.Block(1, 1);
  message.Chunk(1, 0, 60, content.substr(60));
  stream_->Receive(message.Take());
  EXPECT_TRUE(stream_->wants_message());
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.acks_size(), 2);
  EXPECT_EQ(answers.acks(0).block_index(), 1u);
  EXPECT_EQ(answers.acks(0).status().code(), 8u);
  EXPECT_EQ(answers.acks(1).status().code(), 0u);
  EXPECT_EQ(host_.store.published[0], content);
  host_.blocks.Release(3 * kBlockBytes);
}

TEST_F(PutStreamTest, ClosingFailsWhatIsIncompleteAndStillPublishesTheRest) {
  host_.store.hold_finishes = true;
  MessageBuilder message;
  message.Announce(1, 4).set_eager(true);
  message.Block(1, 0).Chunk(1, 1, 0, "half");
  stream_->Receive(message.Take());
  EXPECT_TRUE(stream_->owes_progress());
  stream_->CloseInput();
  EXPECT_FALSE(stream_->finished());
  host_.store.ReleaseFinishes();
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.dones_size(), 1);
  EXPECT_EQ(answers.dones(0).stored_blocks(), 1u);
  EXPECT_EQ(answers.dones(0).failed_blocks(), 3u);
  EXPECT_TRUE(stream_->finished());
  EXPECT_THAT(host_.store.abandoned, ElementsAre(1u));
}

TEST_F(PutStreamTest, AbortEndsAPutAndDropsItsLateAcks) {
  host_.store.hold_finishes = true;
  MessageBuilder message;
  message.Announce(1, 2).set_eager(true);
  message.Block(1, 0);
  message.request().add_abort_put_ids(1);
  stream_->Receive(message.Take());
  const v1::PutResponse answers = Answers();
  ASSERT_EQ(answers.dones_size(), 1);
  EXPECT_EQ(answers.dones(0).failed_blocks(), 2u);
  host_.store.ReleaseFinishes();
  EXPECT_EQ(Answers().acks_size(), 0);
}

TEST_F(PutStreamTest, OpenPutsOfAStreamAreBounded) {
  for (std::uint64_t put_id = 1; put_id <= PutStream::kOpenPutsMax; ++put_id) {
    MessageBuilder message;
    message.Announce(put_id, 1);
    stream_->Receive(message.Take());
  }
  Answers();
  MessageBuilder message;
  message.Announce(PutStream::kOpenPutsMax + 1, 1);
  stream_->Receive(message.Take());
  EXPECT_EQ(Answers().plans(0).status().code(), 8u);
}

TEST_F(PutStreamTest, AnnouncementsCountAgainstTheMemoryOfStreams) {
  const std::size_t others = host_.announces.limit_bytes() - 100;
  ASSERT_TRUE(host_.announces.TryAcquire(others));
  MessageBuilder big;
  big.Announce(1, 100);
  stream_->Receive(big.Take());
  EXPECT_EQ(Answers().plans(0).status().code(), 8u);
  host_.announces.Release(others);
  MessageBuilder again;
  again.Announce(2, 100);
  stream_->Receive(again.Take());
  EXPECT_EQ(Answers().plans(0).status().code(), 0u);
}

TEST_F(PutStreamTest, ProbabilitiesAreChecked) {
  MessageBuilder message;
  message.Announce(1, 1).mutable_probabilities()->set_log_probs("odd");
  stream_->Receive(message.Take());
  EXPECT_EQ(Answers().plans(0).status().code(), 3u);
}

// Any order of the events of many puts ends with each block answered once and nothing held.
TEST_F(PutStreamTest, RandomInterleavingsAnswerEachBlockOnce) {
  for (std::uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    FakeHost host;
    host.store.hold_finishes = true;
    auto stream = PutStream::Create(host, limits_, [] {});
    std::map<std::uint64_t, std::uint32_t> block_counts;
    std::map<std::pair<std::uint64_t, std::uint32_t>, int> acks;
    std::uint64_t next_put = 1;
    int dones = 0;
    const auto collect = [&] {
      v1::PutResponse part;
      while (stream->TakeResponse(&part)) {
        for (const auto& ack : part.acks()) ++acks[{ack.put_id(), ack.block_index()}];
        dones += part.dones_size();
      }
    };
    std::vector<std::unique_ptr<MessageBuilder>> builders;  // own the bytes
    for (int step = 0; step < 60; ++step) {
      if (random() % 3 == 0) host.store.ReleaseFinishes();
      if (random() % 3 == 0) host.RunPosted();
      if (random() % 3 == 0) collect();
      if (!stream->wants_message()) continue;
      auto& builder = *builders.emplace_back(std::make_unique<MessageBuilder>());
      if (block_counts.empty() || random() % 4 == 0) {
        const std::uint32_t blocks = 1 + random() % 4;
        builder.Announce(next_put, blocks).set_eager(true);
        block_counts[next_put++] = blocks;
      }
      for (int i = 0; i < 3; ++i) {
        const std::uint64_t put_id = 1 + random() % (next_put - 1);
        builder.Block(put_id, static_cast<std::uint32_t>(random()) % block_counts[put_id]);
      }
      stream->Receive(builder.Take());
      ASSERT_TRUE(stream->status().ok()) << stream->status();
    }
    while (!stream->wants_message()) {
      host.store.ReleaseFinishes();
      host.RunPosted();
      collect();
    }
    stream->CloseInput();
    while (!stream->finished()) {
      host.store.ReleaseFinishes();
      host.RunPosted();
      collect();
    }
    EXPECT_EQ(dones, static_cast<int>(block_counts.size()));
    for (const auto& [block, count] : acks) EXPECT_EQ(count, 1);
    stream->Cancel();
    EXPECT_EQ(host.blocks.used_bytes(), 0u);
    EXPECT_EQ(host.announces.used_bytes(), 0u);
    EXPECT_EQ(host.store.live_sessions, 0);
    EXPECT_EQ(host.store.live_writers, 0);
  }
}

}  // namespace
}  // namespace kvtrie
