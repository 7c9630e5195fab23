// Servers, clients and workers as programs of their own: what is put comes back, whatever becomes
// of the workers.

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "client/ctl/cli.h"
#include "client/worker_call.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/client/server_process.h"
#include "tests/client/worker_process.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

constexpr std::size_t kBlocks = 12;

struct Session {
  explicit Session(std::uint64_t seed)
      : text(MakeText(SectionedSpec(), static_cast<std::uint32_t>(16 * kBlocks), seed)) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      raw.push_back(CutBlock(SectionedSpec(), text, static_cast<std::uint32_t>(16 * i)));
    }
    blocks.assign(raw.begin(), raw.end());
  }

  SyntheticText text;
  std::vector<std::vector<std::byte>> raw;
  std::vector<std::span<const std::byte>> blocks;
};

class WorkerLifetimeTest : public testing::Test {
 protected:
  WorkerLifetimeTest()
      : spec_(SectionedSpec()),
        profile_(ProfileBytes(PlainProfile(spec_))),
        codec_(spec_, CodecOfProfile(spec_, ProfileIdOf(profile_), profile_).value()) {}

  std::unique_ptr<Client> Connect(const ServerProcess& server, Coding coding,
                                  std::vector<std::string> workers = {},
                                  std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    ClientOptions options;
    options.targets = {server.listen};
    options.lane = Lane::kGrpc;
    options.coding = coding;
    options.workers.targets = std::move(workers);
    options.workers.timeout = timeout;
    options.workers.pause = std::chrono::milliseconds(20);
    auto client = Client::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    const auto model = (*client)->RegisterModel(spec_);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = model->id;
    return *std::move(client);
  }
  void PutProfile(const ServerProcess& server) {
    EXPECT_TRUE(Connect(server, Coding::kServer)->PutProfile(profile_).ok());
  }

  PutReport Put(Client& client, const Session& session, Quality quality) const {
    PutPath path;
    path.path.model = model_;
    path.path.tokens = session.text.tokens;
    path.blocks = session.blocks;
    path.quality = quality;
    return client.Put({&path, 1})[0];
  }
  static void ExpectAllStored(const PutReport& report) {
    for (const PutBlockReport& block : report.blocks)
      EXPECT_TRUE(block.status.ok()) << block.status;
    EXPECT_EQ(report.stored_blocks, kBlocks);
  }

  // What a reader of level high gets of a session.
  std::vector<std::vector<std::byte>> Fetch(Client& client, const Session& session,
                                            std::size_t blocks = kBlocks) const {
    const auto found = client.Lookup(model_, session.text.tokens, {.min_quality = Quality::kHigh});
    EXPECT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->matched_blocks(), blocks);
    std::vector<std::vector<std::byte>> raw(found->matched_blocks(),
                                            std::vector<std::byte>(session.raw[0].size()));
    std::vector<FetchTarget> targets(raw.size());
    for (std::uint32_t i = 0; i < targets.size(); ++i) {
      targets[i].node = *TrieNodeId::FromBytes(found->blocks(0).node_ids().substr(16 * i, 16));
      targets[i].raw = raw[i];
      targets[i].first_position = 16 * i;
      targets[i].tokens = std::span(session.text.tokens).subspan(16 * i, 16);
    }
    FetchOptions options;
    options.min_quality = Quality::kHigh;
    const FetchReport report = client.Fetch(model_, targets, options);
    for (const FetchedBlock& block : report.blocks) EXPECT_TRUE(block.loaded()) << block.status;
    return raw;
  }
  // What any codec makes of it.
  std::vector<std::vector<std::byte>> Expected(const Session& session) const {
    std::vector<std::vector<std::byte>> raw = session.raw;
    std::vector<BlockToEncode> blocks;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      blocks.push_back({.first_position = 16 * i,
                        .session_tokens = 16 * kBlocks,
                        .tokens = std::span(session.text.tokens).subspan(16 * i, 16),
                        .raw = session.raw[i]});
    }
    const auto frames = codec_.Encode(blocks, Quality::kHigh).value();
    std::vector<FrameToDecode> to_decode;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      to_decode.push_back({.frame = FrameView::Parse(frames[i].bytes).value(),
                           .tokens = blocks[i].tokens,
                           .raw = raw[i]});
    }
    EXPECT_TRUE(codec_.Decode(to_decode).ok());
    return raw;
  }

  const ModelSpec spec_;
  const std::vector<std::byte> profile_;
  const FrameCodec codec_;
  ModelId model_;
};

TEST_F(WorkerLifetimeTest, AClientHasItsKvCodedByAWorker) {
  ServerProcess server;
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  PutProfile(server);
  const auto client = Connect(server, Coding::kWorker, {worker.listen});
  const Session session(1);
  ExpectAllStored(Put(*client, session, Quality::kHigh));
  EXPECT_EQ(Fetch(*client, session), Expected(session));
  const WorkerBackendStats stats = client->worker_stats();
  EXPECT_EQ(stats.blocks_total, 2 * kBlocks);
  EXPECT_EQ(stats.own_blocks_total, 0u);
  // Others read it without a worker.
  EXPECT_EQ(Fetch(*Connect(server, Coding::kInProcess), session), Expected(session));
}

TEST_F(WorkerLifetimeTest, AServerHasKvCodedInTheBackgroundAndDecodedForReaders) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  ServerProcess server({"--workers=" + worker.listen, "--recode_level=high"});
  PutProfile(server);
  const auto client = Connect(server, Coding::kServer);
  const Session session(2);
  ExpectAllStored(Put(*client, session, Quality::kExact));
  const auto is_coded = [&] {
    const auto found = client->Lookup(model_, session.text.tokens, {.min_quality = Quality::kHigh});
    const auto& sizes = found->blocks(0).stored_bytes();
    return std::all_of(sizes.begin(), sizes.end(),
                       [&](std::uint64_t bytes) { return bytes < session.raw[0].size() * 9 / 10; });
  };
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!is_coded() && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  ASSERT_TRUE(is_coded()) << client
                                 ->Lookup(model_, session.text.tokens,
                                          {.min_quality = Quality::kHigh})
                                 ->blocks(0)
                                 .ShortDebugString();
  EXPECT_EQ(Fetch(*client, session), Expected(session));
  const auto channel = grpc::CreateChannel(worker.listen, grpc::InsecureChannelCredentials());
  const auto told = DescribeWorker(channel, Deadline::After(std::chrono::seconds(10)));
  ASSERT_TRUE(told.ok()) << told.status();
  EXPECT_GE(told->counters().at("kvtrie_worker_blocks_total"), 2 * kBlocks);
}

TEST_F(WorkerLifetimeTest, NothingIsLostWithWorkersThatAreKilledAndStartedAgain) {
  ServerProcess server;
  WorkerProcess one{KVTRIE_WORKER_PROGRAM}, two{KVTRIE_WORKER_PROGRAM};
  PutProfile(server);
  constexpr std::uint64_t kSessions = 30;
  std::atomic<std::uint64_t> next{100};
  std::atomic<bool> failed{false};
  std::vector<std::thread> writers;
  for (int t = 0; t < 2; ++t) {
    writers.emplace_back([&] {
      const auto client = Connect(server, Coding::kWorker, {one.listen, two.listen});
      for (std::uint64_t seed = next++; seed < 100 + kSessions; seed = next++) {
        const PutReport report = Put(*client, Session(seed), Quality::kHigh);
        if (report.stored_blocks != kBlocks) failed = true;
      }
    });
  }
  for (int kills = 0; next < 100 + kSessions; ++kills) {
    WorkerProcess& victim = kills % 2 == 0 ? one : two;
    victim.Kill();
    victim.Start();
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_FALSE(failed);
  const auto reader = Connect(server, Coding::kWorker, {one.listen, two.listen});
  for (std::uint64_t seed = 100; seed < 100 + kSessions; ++seed) {
    const Session session(seed);
    ASSERT_EQ(Fetch(*reader, session), Expected(session));
  }
}

TEST_F(WorkerLifetimeTest, AWorkerThatHangsDelaysAPutByItsTimeoutAtMost) {
  ServerProcess server;
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  PutProfile(server);
  constexpr std::chrono::milliseconds kTimeout{1000};
  const auto client = Connect(server, Coding::kWorker, {worker.listen}, kTimeout);
  ExpectAllStored(Put(*client, Session(1), Quality::kHigh));
  const auto alone_began = std::chrono::steady_clock::now();
  ExpectAllStored(Put(*Connect(server, Coding::kInProcess), Session(2), Quality::kHigh));
  const auto alone = std::chrono::steady_clock::now() - alone_began;
  worker.Freeze();
  const auto began = std::chrono::steady_clock::now();
  const Session session(3);
  ExpectAllStored(Put(*client, session, Quality::kHigh));
  const auto took = std::chrono::steady_clock::now() - began;
  worker.Thaw();
  // One call hangs; the next ones find the worker left alone.
  EXPECT_LT(took, 2 * kTimeout + 5 * alone + std::chrono::seconds(2));
  EXPECT_EQ(Fetch(*client, session), Expected(session));
}

TEST_F(WorkerLifetimeTest, TheCommandTellsWhatWorkersAre) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  std::ostringstream out, err;
  const CliEnvironment environment{
      .out = out, .err = err, .variable = [](const std::string&) { return std::nullopt; }};
  const auto run = [&](const std::vector<std::string>& arguments) {
    out.str("");
    return RunCli(arguments, environment);
  };
  EXPECT_EQ(run({"worker", worker.listen, "--json"}), ExitCode::kOk) << err.str();
  const auto told = nlohmann::json::parse(out.str());
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0]["state"], "serving");
  EXPECT_EQ(told[0]["backend"], "cpu");
  EXPECT_GE(told[0]["coding_threads"], 1);

  // One that does not answer is told beside those that do.
  EXPECT_NE(run({"worker", "127.0.0.1:1", worker.listen, "--timeout", "2"}), ExitCode::kOk);
  EXPECT_THAT(out.str(), testing::HasSubstr("no answer"));
  EXPECT_THAT(out.str(), testing::HasSubstr("serving"));
  EXPECT_THAT(err.str(), testing::HasSubstr("127.0.0.1:1"));
}

}  // namespace
}  // namespace kvtrie
