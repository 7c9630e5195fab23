// The client and the CLI against the server's own program.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/admin_client.h"
#include "client/client.h"
#include "client/ctl/bench_workload.h"
#include "client/ctl/cli.h"
#include "client/ctl/format.h"
#include "storage/base/crc32c.h"
#include "storage/codec/frame.h"
#include "storage/codec/profile_header.h"
#include "tests/client/server_process.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::byte kPoison{0xa5};
constexpr std::uint32_t kLayers = 4;
constexpr std::size_t kLayerBytes = 16 * 2 * 1024;
constexpr std::size_t kBlockBytes = kLayers * kLayerBytes;

ModelSpec Spec(const std::string& name = "client-server-test") {
  ModelSpec spec = *BenchModel(kLayerBytes);
  spec.name = name;
  spec.kv_groups[0].layer_runs[0].layer_count = kLayers;
  return spec;
}

// A session of blocks with content that follows from its number.
struct Session {
  Session(std::uint64_t number, std::size_t block_count)
      : tokens(BenchTokens(1, number, block_count)), memory(block_count * kBlockBytes) {
    FillIncompressible(memory, number);
    for (std::size_t i = 0; i < block_count; ++i) {
      blocks.push_back(std::span<const std::byte>(memory).subspan(i * kBlockBytes, kBlockBytes));
    }
  }
  PutPath Path(const ModelId& model) const {
    PutPath path;
    path.path.model = model;
    path.path.tokens = tokens;
    path.blocks = blocks;
    return path;
  }

  std::vector<TokenId> tokens;
  std::vector<std::byte> memory;
  std::vector<std::span<const std::byte>> blocks;
};

class ClientServerTest : public ::testing::TestWithParam<Lane> {
 protected:
  void SetUp() override { MakeClient(); }

  void MakeClient() {
    ClientOptions options;
    options.targets = {server_.listen};
    options.lane = GetParam();
    auto client = Client::Create(options);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    const auto model = client_->RegisterModel(Spec());
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->id, Spec().Digest());
    EXPECT_EQ(model->raw_block_bytes, kBlockBytes);
    model_ = model->id;
  }

  PutReport Put(const Session& session) {
    const PutPath path = session.Path(model_);
    return client_->Put(std::span(&path, 1))[0];
  }

  static std::vector<TrieNodeId> NodesOf(const v1::LookupResult& result) {
    std::vector<TrieNodeId> nodes(result.matched_blocks());
    if (!nodes.empty()) {
      std::memcpy(nodes.data(), result.blocks(0).node_ids().data(), nodes.size() * 16);
    }
    return nodes;
  }

  // Ids of what is stored of a session.
  std::vector<TrieNodeId> Find(const Session& session) {
    const auto result = client_->Lookup(model_, session.tokens);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? NodesOf(*result) : std::vector<TrieNodeId>();
  }

  // Loaded blocks are the session's; returns how many there are.
  std::size_t FetchAndCheck(const Session& session, const std::vector<TrieNodeId>& nodes,
                            std::span<std::byte> memory, const FetchOptions& options = {}) {
    std::fill(memory.begin(), memory.end(), kPoison);
    std::vector<FetchTarget> targets;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      targets.push_back({nodes[i], memory.subspan(i * kBlockBytes, kBlockBytes)});
    }
    const FetchReport report = client_->Fetch(model_, targets, options);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (!report.blocks[i].loaded()) continue;
      EXPECT_TRUE(
          std::equal(targets[i].raw.begin(), targets[i].raw.end(), session.blocks[i].begin()))
          << "block " << i;
    }
    return report.loaded_blocks;
  }

  ServerProcess server_;
  std::unique_ptr<Client> client_;
  ModelId model_;
};

TEST_P(ClientServerTest, WhatIsPutIsFoundAndFetched) {
  const Session session(1, 40);
  const PutReport put = Put(session);
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_EQ(put.duplicate_blocks, 0u);
  const auto nodes = Find(session);
  ASSERT_EQ(nodes.size(), 40u);
  for (std::size_t i = 0; i < nodes.size(); ++i) EXPECT_EQ(nodes[i], put.blocks[i].node);
  std::vector<std::byte> memory(session.memory.size());
  EXPECT_EQ(FetchAndCheck(session, nodes, memory), 40u);
  EXPECT_EQ(client_->stats().failed_calls, 0u);
  EXPECT_EQ(client_->stats().local_lane_blocks, GetParam() == Lane::kGrpc ? 0u : 80u);
}

TEST_P(ClientServerTest, SecondPutFindsAllStored) {
  const Session session(1, 10);
  ASSERT_TRUE(Put(session).all_stored());
  const PutReport again = Put(session);
  EXPECT_TRUE(again.all_stored());
  EXPECT_EQ(again.duplicate_blocks, 10u);
}

TEST_P(ClientServerTest, MissesStandInTheirSlots) {
  const Session session(1, 12);
  ASSERT_TRUE(Put(session).all_stored());
  auto nodes = Find(session);
  nodes[0].bytes.fill(1);
  nodes[7].bytes.fill(2);
  std::vector<std::byte> memory(session.memory.size());
  EXPECT_EQ(FetchAndCheck(session, nodes, memory), 10u);
  EXPECT_EQ(memory[0], kPoison);
}

TEST_P(ClientServerTest, BlocksArriveInMemoryOfTheRegion) {
  if (client_->local_region() == nullptr) return;  // gRPC has none
  const Session session(1, 24);
  ASSERT_TRUE(Put(session).all_stored());
  auto nodes = Find(session);
  nodes[3].bytes.fill(1);  // what follows lands elsewhere first
  const RegionBuffer buffer = *client_->local_region()->Allocate(session.memory.size());
  EXPECT_EQ(FetchAndCheck(session, nodes, buffer.bytes()), 23u);
  // And from it.
  const Session other(2, 24);
  std::copy(other.memory.begin(), other.memory.end(), buffer.bytes().begin());
  PutPath path = other.Path(model_);
  std::vector<std::span<const std::byte>> blocks;
  for (std::size_t i = 0; i < 24; ++i) {
    blocks.push_back(buffer.bytes().subspan(i * kBlockBytes, kBlockBytes));
  }
  path.blocks = blocks;
  EXPECT_TRUE(client_->Put(std::span(&path, 1))[0].all_stored());
  std::vector<std::byte> memory(other.memory.size());
  EXPECT_EQ(FetchAndCheck(other, Find(other), memory), 24u);
}

TEST_P(ClientServerTest, LayersComeInOrder) {
  const Session session(1, 20);
  ASSERT_TRUE(Put(session).all_stored());
  const auto nodes = Find(session);
  std::vector<std::byte> memory(session.memory.size());
  std::vector<std::uint32_t> layers;
  FetchOptions options;
  options.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock>) {
    layers.push_back(layer);
    for (std::size_t i = 0; i < 20; ++i) {
      const std::size_t at = i * kBlockBytes + layer * kLayerBytes;
      EXPECT_TRUE(std::equal(&memory[at], &memory[at] + kLayerBytes, &session.memory[at]));
    }
  };
  EXPECT_EQ(FetchAndCheck(session, nodes, memory, options), 20u);
  EXPECT_THAT(layers, ::testing::ElementsAre(0, 1, 2, 3));
}

// A profile for the model of Spec.
std::vector<std::byte> MakeProfile(std::size_t bytes, std::uint64_t seed) {
  ProfileHeader header;
  header.codec_key = Spec().CodecKey();
  header.levels = {{Quality::kHigh, 3, 0.005f, 0.1f}};
  header.body_bytes = bytes - header.header_bytes();
  std::vector<std::byte> profile(bytes);
  const auto body = std::span(profile).subspan(header.header_bytes());
  FillIncompressible(body, seed);
  header.body_crc32c = Crc32c(body);
  WriteProfileHeader(header, std::span(profile).first(header.header_bytes()));
  return profile;
}

TEST_P(ClientServerTest, ProfilesGoThereAndBack) {
  const auto profile = MakeProfile((std::size_t{5} << 20) + 321, 1);
  const auto put = client_->PutProfile(profile);
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(client_->PutProfile(profile)->profile_id(), put->profile_id());
  const auto id = ProfileId::FromBytes(put->profile_id()).value();
  EXPECT_EQ(client_->RegisterModel(Spec())->profile, id);
  const auto got = client_->GetProfile(id);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(*got == profile);
  const auto listed = client_->ListProfiles();
  ASSERT_EQ(listed->profiles_size(), 1);
  EXPECT_EQ(listed->profiles(0).model_ids(0), model_.view());
  server_.Kill();
  server_.Start();
  EXPECT_TRUE(client_->GetProfile(id).ok());
  EXPECT_TRUE(client_->DeleteProfile(id).ok());
  EXPECT_TRUE(absl::IsNotFound(client_->DeleteProfile(id)));
  EXPECT_TRUE(absl::IsNotFound(client_->GetProfile(id).status()));
  auto damaged = profile;
  damaged.back() ^= std::byte{1};
  EXPECT_TRUE(absl::IsInvalidArgument(client_->PutProfile(damaged).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->PutProfile({}).status()));
}

TEST_P(ClientServerTest, FramesTravelWithTheirLevel) {
  const auto profile = client_->PutProfile(MakeProfile(4000, 1));
  ASSERT_TRUE(profile.ok()) << profile.status();
  const Session session(3, 20);
  std::vector<std::vector<std::byte>> frames;
  for (std::uint32_t block = 0; block < 20; ++block) {
    std::vector<std::byte> body(3000 + 10 * block);
    FillIncompressible(body, block);
    const std::size_t block_tokens = Spec().block_tokens;
    WriteFrameBinding({.first_position = static_cast<std::uint32_t>(block * block_tokens),
                       .tokens_crc32c = Crc32c(std::as_bytes(
                           std::span(session.tokens).subspan(block * block_tokens, block_tokens))),
                       .profile = ProfileId::FromBytes(profile->profile_id()).value()},
                      std::span(body).first(kFrameBindingBytes));
    const FrameSection section{static_cast<std::uint32_t>(body.size()), Crc32c(body)};
    std::vector<std::byte> frame(FrameHeaderBytes(1));
    WriteFrameHeader({.codec = CodecId::kResidual,
                      .quality = Quality::kHigh,
                      .model = model_,
                      .raw_bytes = kBlockBytes,
                      .sections = {&section, 1}},
                     frame);
    frame.insert(frame.end(), body.begin(), body.end());
    frames.push_back(std::move(frame));
  }
  const std::vector<std::span<const std::byte>> blocks(frames.begin(), frames.end());
  PutPath path = session.Path(model_);
  path.blocks = blocks;
  path.form = BlockForm::kFrame;
  path.quality = Quality::kHigh;
  const PutReport put = client_->Put(std::span(&path, 1))[0];
  ASSERT_TRUE(put.all_stored()) << put.blocks[0].status;
  EXPECT_EQ(client_->Put(std::span(&path, 1))[0].duplicate_blocks, 20u);

  EXPECT_TRUE(Find(session).empty());  // nothing is exact
  const auto found = client_->Lookup(model_, session.tokens, {.min_quality = Quality::kSmall});
  ASSERT_EQ(found->matched_blocks(), 20u);
  const auto nodes = NodesOf(*found);
  std::vector<std::vector<std::byte>> memory;
  std::vector<FetchTarget> targets;
  for (std::size_t i = 0; i < 20; ++i) {
    memory.emplace_back(found->blocks(0).stored_bytes(static_cast<int>(i)));
    targets.push_back({nodes[i], memory.back()});
  }
  FetchOptions options;
  options.min_quality = Quality::kSmall;
  options.form = BlockForm::kFrame;
  const FetchReport report = client_->Fetch(model_, targets, options);
  ASSERT_TRUE(report.all_loaded()) << report.blocks[0].status;
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(report.blocks[i].codec, CodecId::kResidual);
    EXPECT_EQ(report.blocks[i].quality, Quality::kHigh);
    ASSERT_EQ(report.blocks[i].bytes, frames[i].size());
    EXPECT_TRUE(std::equal(frames[i].begin(), frames[i].end(), memory[i].begin()));
  }
  // This server cannot decode them, and says what to do.
  std::vector<std::byte> raw(kBlockBytes);
  const FetchTarget target{nodes[0], raw};
  options.form = BlockForm::kRaw;
  const FetchReport refused = client_->Fetch(model_, std::span(&target, 1), options);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.blocks[0].status)) << refused.blocks[0].status;
  options.form = BlockForm::kFrame;
  options.on_layer = [](std::uint32_t, std::span<const FetchedBlock>) {};
  EXPECT_TRUE(absl::IsInvalidArgument(
      client_->Fetch(model_, std::span(&target, 1), options).blocks[0].status));

  // Exact ones beside them.
  ASSERT_TRUE(Put(session).all_stored());
  std::vector<std::byte> exact(session.memory.size());
  EXPECT_EQ(FetchAndCheck(session, nodes, exact), 20u);
}

TEST_P(ClientServerTest, ManyPathsOfOneSizeAndAnotherGoTogether) {
  std::vector<Session> sessions;
  for (std::uint64_t i = 0; i < 30; ++i) sessions.emplace_back(100 + i, 1 + i % 5);
  std::vector<PutPath> paths;
  for (const Session& session : sessions) {
    paths.push_back(session.Path(model_));
    paths.back().eager = paths.size() % 2 == 0;
  }
  for (const PutReport& report : client_->Put(paths)) EXPECT_TRUE(report.all_stored());
  for (const Session& session : sessions) EXPECT_EQ(Find(session).size(), session.blocks.size());
}

TEST_P(ClientServerTest, KilledServerComesBackAndNothingWasLost) {
  const Session session(1, 20);
  ASSERT_TRUE(Put(session).all_stored());
  const auto nodes = Find(session);
  std::vector<std::byte> memory(session.memory.size());
  for (int round = 0; round < 2; ++round) {
    server_.Kill();
    FetchOptions brief;
    brief.timeout = milliseconds(200);
    const auto began = std::chrono::steady_clock::now();
    EXPECT_EQ(FetchAndCheck(session, nodes, memory, brief), 0u);
    EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(3));
    server_.Start();
    EXPECT_EQ(FetchAndCheck(session, nodes, memory), 20u);
    EXPECT_TRUE(Put(Session(10 + static_cast<std::uint64_t>(round), 4)).all_stored());
  }
}

TEST_P(ClientServerTest, KillsUnderLoadLeaveNoWrongBlock) {
  std::atomic<bool> stop{false};
  std::atomic<int> put_rounds{0};
  std::thread writer([&] {
    for (std::uint64_t i = 0; !stop; ++i) {
      const Session session(1000 + i, 8);
      const PutReport report = Put(session);
      std::vector<std::byte> memory(session.memory.size());
      // What was acknowledged is there, whatever happened to the server meanwhile.
      if (!report.all_stored()) continue;
      ++put_rounds;
      const auto result = client_->Lookup(model_, session.tokens);
      if (!result.ok()) continue;
      EXPECT_EQ(result->matched_blocks(), 8u);
      FetchAndCheck(session, NodesOf(*result), memory);
    }
  });
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(milliseconds(300));
    server_.Kill();
    std::this_thread::sleep_for(milliseconds(100));
    server_.Start();
  }
  const int rounds_before = put_rounds;
  const auto give_up = std::chrono::steady_clock::now() + seconds(30);
  while (put_rounds == rounds_before && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_GT(put_rounds, rounds_before) << "the client did not find back";
  stop = true;
  writer.join();
}

TEST_P(ClientServerTest, FrozenServerHoldsUpNoCallBeyondItsDeadline) {
  const Session session(1, 8);
  ASSERT_TRUE(Put(session).all_stored());
  const auto nodes = Find(session);
  std::vector<std::byte> memory(session.memory.size());
  ASSERT_EQ(FetchAndCheck(session, nodes, memory), 8u);
  server_.Freeze();
  const auto ends_in_time = [](const std::function<void()>& call) {
    const auto began = std::chrono::steady_clock::now();
    call();
    EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(3));
  };
  ends_in_time([&] {
    FetchOptions brief;
    brief.timeout = milliseconds(200);
    EXPECT_EQ(FetchAndCheck(session, nodes, memory, brief), 0u);
  });
  ends_in_time([&] {
    // More than sockets take: its bytes wait in gRPC, and are given back all the same.
    const Session large(2, 200);
    const PutPath path = large.Path(model_);
    PutPath eager = path;
    eager.eager = true;
    EXPECT_FALSE(client_->Put(std::span(&eager, 1), milliseconds(300))[0].all_stored());
  });
  server_.Thaw();
  EXPECT_EQ(FetchAndCheck(session, nodes, memory), 8u);
}

INSTANTIATE_TEST_SUITE_P(Lanes, ClientServerTest,
                         ::testing::Values(Lane::kGrpc, Lane::kShm, Lane::kAuto),
                         [](const auto& instance) {
                           return instance.param == Lane::kGrpc  ? "Grpc"
                                  : instance.param == Lane::kShm ? "Shm"
                                                                 : "Auto";
                         });

// The client cuts paths into pieces for the lane before it knows that there is none.
TEST(AutoLaneTest, LongPathsArePutOverGrpcWhereThereIsNoLane) {
  ServerProcess server({"--local_socket="});
  ClientOptions options;
  options.targets = {server.listen};
  options.lane = Lane::kAuto;
  auto client = Client::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto model = (*client)->RegisterModel(Spec());
  ASSERT_TRUE(model.ok()) << model.status();
  constexpr std::size_t kBlocks = 40;
  const Session sessions[] = {Session(1, kBlocks), Session(2, kBlocks)};
  std::vector<PutPath> paths;
  for (const Session& session : sessions) paths.push_back(session.Path(model->id));
  for (const PutReport& report : (*client)->Put(paths)) {
    EXPECT_EQ(report.stored_blocks, kBlocks);
    for (const PutBlockReport& block : report.blocks)
      EXPECT_TRUE(block.status.ok()) << block.status;
  }
  EXPECT_EQ((*client)->stats().local_lane_blocks, 0u);
  for (const Session& session : sessions) {
    const auto found = (*client)->Lookup(model->id, session.tokens);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->matched_blocks(), kBlocks);
  }
}

// --- the CLI ---

class CliServerTest : public ::testing::Test {
 protected:
  ExitCode RunKvtrie(std::vector<std::string> arguments) {
    out_.str("");
    err_.str("");
    const CliEnvironment environment{
        .out = out_, .err = err_, .variable = [&](const std::string& name) {
          return std::optional<std::string>(name == "KVTRIE_SERVER" ? server_.listen
                                                                    : server_.admin);
        }};
    return RunCli(arguments, environment);
  }
  nlohmann::json Json() { return nlohmann::json::parse(out_.str(), nullptr, false); }

  ServerProcess server_;
  std::ostringstream out_;
  std::ostringstream err_;
};

TEST_F(CliServerTest, BenchCodesAtALevelOrSaysWhyNot) {
  for (const char* op : {"put", "get"}) {
    ASSERT_EQ(RunKvtrie({"bench", op, "--block-bytes", "4096", "--blocks", "32", "--batch", "16",
                         "--quality", "unrated", "--json"}),
              ExitCode::kOk)
        << err_.str();
    EXPECT_EQ(Json()["quality"], "unrated");
    EXPECT_EQ(Json()["stored_part"].is_number(), std::string(op) == "put");
  }
  EXPECT_NE(RunKvtrie({"bench", "put", "--block-bytes", "4096", "--quality", "high"}),
            ExitCode::kOk);
  EXPECT_THAT(err_.str(), ::testing::HasSubstr("no profile for the model kvtrie-bench"));
}

TEST_F(CliServerTest, OperatorFindsKeepsAndRemovesWhatIsStored) {
  ASSERT_EQ(RunKvtrie({"bench", "put", "--block-bytes", "4096", "--blocks", "32", "--json"}),
            ExitCode::kOk)
      << err_.str();
  EXPECT_EQ(Json()["op"], "put");
  ASSERT_EQ(RunKvtrie({"status", "--json"}), ExitCode::kOk) << err_.str();
  EXPECT_EQ(Json()["state"], "serving");
  EXPECT_GE(Json()["node_count"], 32);
  ASSERT_EQ(RunKvtrie({"models", "--json"}), ExitCode::kOk);
  EXPECT_EQ(Json()["models"][0]["name"], "kvtrie-bench");
  EXPECT_EQ(Json()["models"][0]["raw_block_bytes"], 4096);

  ASSERT_EQ(RunKvtrie({"ls", "--model", "kvtrie-bench", "--json"}), ExitCode::kOk) << err_.str();
  ASSERT_GE(Json()["nodes"].size(), 2u);
  std::string parent;
  const nlohmann::json first_blocks = Json()["nodes"];
  for (const auto& node : first_blocks) {
    if (node["child_count"] > 0) parent = node["node_id"];
  }
  ASSERT_EQ(RunKvtrie({"ls", parent, "--json"}), ExitCode::kOk) << err_.str();
  const std::string node = Json()["nodes"][0]["node_id"];
  ASSERT_EQ(RunKvtrie({"show", node, "--json"}), ExitCode::kOk);
  EXPECT_EQ(Json()["depth"], 2);
  EXPECT_EQ(Json()["parent_id"], parent);
  // A prefix is shown with the path above it.
  std::string tokens;
  for (const TokenId token : BenchTokens(1, 0, 2)) {
    tokens += (tokens.empty() ? "" : ",") + std::to_string(token);
  }
  ASSERT_EQ(RunKvtrie({"show", "--model", "kvtrie-bench", "--tokens", tokens, "--json"}),
            ExitCode::kOk)
      << err_.str();
  EXPECT_EQ(Json()["depth"], 2);
  EXPECT_EQ(Json()["path"].size(), 1u);

  ASSERT_EQ(RunKvtrie({"pin", node, "--seconds", "60", "--json"}), ExitCode::kOk) << err_.str();
  EXPECT_EQ(Json()["pinned_blocks"], 2);
  const std::string pin = Json()["pin_id"];
  ASSERT_EQ(RunKvtrie({"pins", "--json"}), ExitCode::kOk);
  EXPECT_EQ(Json()["pins"][0]["pin_id"], pin);
  EXPECT_EQ(RunKvtrie({"unpin", pin}), ExitCode::kOk);
  EXPECT_EQ(RunKvtrie({"unpin", pin, "--json"}), ExitCode::kOk);
  EXPECT_EQ(Json()["existed"], false);

  EXPECT_EQ(RunKvtrie({"verify", "--json"}), ExitCode::kOk) << err_.str();
  EXPECT_TRUE(Json()["findings"].empty());
  ASSERT_EQ(RunKvtrie({"rm", node, "--json"}), ExitCode::kOk);
  EXPECT_GE(Json()["deleted_blocks"], 1);
  EXPECT_EQ(RunKvtrie({"show", node}), ExitCode::kNotFound);
  EXPECT_EQ(RunKvtrie({"show", "--model", "no-such-model", "--tokens", "1"}), ExitCode::kNotFound);
  EXPECT_EQ(RunKvtrie({"rm", "--all", "--yes"}), ExitCode::kOk);
  EXPECT_EQ(RunKvtrie({"config", "--json"}), ExitCode::kOk);
  EXPECT_FALSE(Json()["settings"].empty());
  EXPECT_EQ(RunKvtrie({"top", "--once", "--interval", "1"}), ExitCode::kOk);
  for (const char* verb : {"status", "models", "pins", "config", "verify"}) {
    EXPECT_EQ(RunKvtrie({verb}), ExitCode::kOk) << verb;
    EXPECT_FALSE(out_.str().empty());
  }
  EXPECT_EQ(RunKvtrie({"drain", "--deadline", "5"}), ExitCode::kOk) << err_.str();
}

// Sessions with a document in common, put and found by clients of the server's own program.
TEST_F(CliServerTest, SimilarFindsSessionsByPrefixAndByText) {
  ClientOptions options;
  options.targets = {server_.listen};
  const auto client = *Client::Create(options);
  const auto model = client->RegisterModel(Spec());
  ASSERT_TRUE(model.ok()) << model.status();
  const auto put = [&](std::vector<TokenId> tokens, std::string_view name) {
    Session session(7, tokens.size() / model->block_tokens);
    session.tokens = std::move(tokens);
    PutPath path = session.Path(model->id);
    path.session_id = name;
    const PutReport report = client->Put({&path, 1})[0];
    EXPECT_TRUE(report.all_stored());
  };
  const auto joined = [](std::initializer_list<std::vector<TokenId>> parts) {
    std::vector<TokenId> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const auto system = BenchTokens(1, 100, 3);
  const auto document = BenchTokens(1, 101, 6);
  put(joined({system, BenchTokens(1, 102, 2)}), "same prompt");
  put(joined({BenchTokens(1, 103, 1), document, BenchTokens(1, 104, 1)}), "same document");
  put(BenchTokens(1, 105, 4), "stranger");
  const auto query = joined({system, {1, 2, 3}, document});

  const auto similar = client->Similar(model->id, query, 8);
  ASSERT_TRUE(similar.ok()) << similar.status();
  ASSERT_EQ(similar->sessions_size(), 2);
  EXPECT_EQ(similar->sessions(0).session_ids(0), "same document");
  EXPECT_GE(similar->sessions(0).shared_run_tokens(), document.size());
  EXPECT_EQ(similar->sessions(1).session_ids(0), "same prompt");
  EXPECT_EQ(similar->sessions(1).shared_prefix_blocks(), 3u);
  EXPECT_EQ(client->Similar(model->id, query, 1)->sessions_size(), 1);
  EXPECT_EQ(client->Similar(model->id, query, 8, "salt")->sessions_size(), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(client->Similar(model->id, query, 65).status()));

  const std::string file = ::testing::TempDir() + "/kvtrie-similar-tokens";
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(query.data()),
             static_cast<std::streamsize>(query.size() * sizeof(TokenId)));
  const std::string id(IdToHex(model->id.view()));
  ASSERT_EQ(RunKvtrie({"similar", "--model", id, "--tokens-file", file, "--json"}), ExitCode::kOk)
      << err_.str();
  ASSERT_EQ(Json()["sessions"].size(), 2u);
  EXPECT_EQ(Json()["sessions"][0]["session_ids"][0], "same document");
  EXPECT_EQ(Json()["sessions"][0]["runs"][0]["first_token"], system.size() + 3);
  EXPECT_EQ(Json()["sessions"][1]["shared_prefix_blocks"], 3);
  ASSERT_EQ(RunKvtrie({"similar", "--model", id, "--tokens-file", file, "--count", "1"}),
            ExitCode::kOk);
  EXPECT_THAT(out_.str(), ::testing::HasSubstr("same document"));
  EXPECT_THAT(out_.str(), ::testing::Not(::testing::HasSubstr("same prompt")));
}

TEST_F(CliServerTest, OperatorSeesGroupsOfSessions) {
  ClientOptions options;
  options.targets = {server_.listen};
  const auto client = Client::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto model = (*client)->RegisterModel(Spec());
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(RunKvtrie({"groups"}), ExitCode::kOk) << err_.str();
  EXPECT_THAT(out_.str(), ::testing::StartsWith("GROUP"));
  ASSERT_EQ(RunKvtrie({"groups", "--json"}), ExitCode::kOk) << err_.str();
  EXPECT_TRUE(Json()["groups"].empty());

  // Two groups of three sessions: 4 blocks shared, 2 of their own.
  std::string looked_up;
  for (std::uint64_t number = 0; number < 6; ++number) {
    Session session(100 + number, 6);
    const Session shared(number / 3, 6);
    std::copy_n(shared.tokens.begin(), 4 * session.tokens.size() / 6, session.tokens.begin());
    const PutPath path = session.Path(model->id);
    ASSERT_TRUE((*client)->Put(std::span(&path, 1))[0].all_stored());
    const auto found = (*client)->Lookup(model->id, session.tokens);
    ASSERT_TRUE(found.ok()) << found.status();
    looked_up = IdToHex(found->group_id());
  }
  ASSERT_EQ(RunKvtrie({"groups", "--json"}), ExitCode::kOk) << err_.str();
  ASSERT_EQ(Json()["groups"].size(), 2u);
  EXPECT_FALSE(Json()["more"]);
  const nlohmann::json group = Json()["groups"][1];
  EXPECT_EQ(group["group_id"], looked_up);
  EXPECT_EQ(group["sessions"], 3);
  EXPECT_EQ(group["shared_blocks"], 4);
  EXPECT_EQ(group["blocks"], 10);
  EXPECT_TRUE(group["shared_bits_estimated"]);
  EXPECT_EQ(group["saved_bytes"].get<std::uint64_t>() * 10,
            group["stored_bytes"].get<std::uint64_t>() * 8);
  ASSERT_EQ(RunKvtrie({"groups", "--limit", "1"}), ExitCode::kOk);
  EXPECT_THAT(out_.str(), ::testing::Not(::testing::HasSubstr(looked_up)));
  EXPECT_THAT(err_.str(), ::testing::HasSubstr("there are more"));
  ASSERT_EQ(RunKvtrie({"groups"}), ExitCode::kOk);
  EXPECT_THAT(out_.str(), ::testing::HasSubstr(looked_up));

  ASSERT_EQ(RunKvtrie({"groups", "show", looked_up, "--json"}), ExitCode::kOk) << err_.str();
  const nlohmann::json branches = Json()["branches"];
  ASSERT_EQ(branches.size(), 4u);
  int on_centroid = 0;
  for (const auto& branch : branches) on_centroid += branch["on_centroid"].get<bool>() ? 1 : 0;
  EXPECT_EQ(on_centroid, 2);
  ASSERT_EQ(RunKvtrie({"groups", "show", looked_up}), ExitCode::kOk) << err_.str();
  EXPECT_THAT(out_.str(),
              ::testing::AllOf(::testing::HasSubstr("\n* "), ::testing::HasSubstr("\n  * "),
                               ::testing::HasSubstr("\n  - "), ::testing::HasSubstr("(estimated)"),
                               ::testing::HasSubstr(branches[1]["first_id"].get<std::string>())));
  ASSERT_EQ(RunKvtrie({"groups", "show", looked_up, "--limit", "2", "--json"}), ExitCode::kOk);
  EXPECT_TRUE(Json()["more"]);
  EXPECT_EQ(Json()["branches"].size(), 2u);
  EXPECT_EQ(RunKvtrie({"groups", "show", std::string(32, '7')}), ExitCode::kNotFound);
}

TEST_F(CliServerTest, OperatorKeepsProfiles) {
  const std::string folder = ::testing::TempDir() + "/kvtrie-profiles";
  std::filesystem::create_directories(folder);
  const auto junk = MakeProfile(5000, 7);
  const auto profile = ProfileBytes(PlainProfile(Spec()));
  std::ofstream(folder + "/junk", std::ios::binary)
      .write(reinterpret_cast<const char*>(junk.data()), static_cast<std::streamsize>(junk.size()));
  EXPECT_EQ(RunKvtrie({"profile", "put", folder + "/junk"}), ExitCode::kFailed);
  EXPECT_THAT(err_.str(), ::testing::HasSubstr("junk: cannot be used: "));
  std::ofstream(folder + "/profile", std::ios::binary)
      .write(reinterpret_cast<const char*>(profile.data()),
             static_cast<std::streamsize>(profile.size()));
  ASSERT_EQ(RunKvtrie({"profile", "put", folder + "/profile"}), ExitCode::kOk) << err_.str();
  const std::string id = out_.str().substr(0, 32);
  ASSERT_EQ(RunKvtrie({"profile", "put", folder + "/profile", "--json"}), ExitCode::kOk);
  EXPECT_EQ(Json()["profile_id"], id);
  ASSERT_EQ(RunKvtrie({"profiles"}), ExitCode::kOk) << err_.str();
  EXPECT_THAT(out_.str(), ::testing::AllOf(::testing::HasSubstr(id),
                                           ::testing::HasSubstr("LEVELS (BITS/COMPONENT)"),
                                           ::testing::ContainsRegex("high 4\\.00")));
  ASSERT_EQ(RunKvtrie({"profiles", "--json"}), ExitCode::kOk);
  EXPECT_EQ(Json()["profiles"][0]["profile_bytes"], profile.size());
  EXPECT_EQ(Json()["profiles"][0]["levels"][0]["quality"], "high");
  EXPECT_EQ(Json()["profiles"][0]["frames"], 0);
  ASSERT_EQ(RunKvtrie({"profile", "get", id, folder + "/copy"}), ExitCode::kOk) << err_.str();
  std::ifstream copy(folder + "/copy", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(copy), std::istreambuf_iterator<char>()};
  EXPECT_TRUE(bytes.size() == profile.size() &&
              std::memcmp(bytes.data(), profile.data(), bytes.size()) == 0);
  EXPECT_EQ(RunKvtrie({"profile", "rm", id}), ExitCode::kOk);
  EXPECT_EQ(RunKvtrie({"profile", "rm", id}), ExitCode::kNotFound);
  EXPECT_EQ(RunKvtrie({"profile", "get", id, folder + "/copy"}), ExitCode::kNotFound);
  std::filesystem::remove_all(folder);
}

TEST_F(CliServerTest, BenchmarksRunAndSayWhatTheyMeasured) {
  const char* fields[] = {"peer",     "op",           "block_bytes", "clients", "batch",
                          "gb_per_s", "cpu_s_per_gb", "keys_per_s",  "p50_us",  "p99_us"};
  const std::vector<std::string> common = {"--block-bytes", "8192", "--blocks", "64", "--json"};
  const std::vector<std::vector<std::string>> runs = {
      {"bench", "put", "--clients", "2", "--batch", "4"},
      {"bench", "get", "--batch", "4", "--warmup"},
      {"bench", "get", "--clients", "3", "--cold"},
      {"bench", "put", "--lane", "shm", "--seed", "2", "--batch", "8"},
      {"bench", "get", "--lane", "shm", "--seed", "2", "--batch", "8"},
      {"bench", "lookup", "--prompts", "2", "--requests", "10"},
      {"bench", "mixed", "--batch", "4"},
  };
  for (std::vector<std::string> arguments : runs) {
    arguments.insert(arguments.end(), common.begin(), common.end());
    ASSERT_EQ(RunKvtrie(arguments), ExitCode::kOk)
        << ::testing::PrintToString(arguments) << err_.str();
    std::istringstream lines(out_.str());
    std::string line;
    int count = 0;
    while (std::getline(lines, line)) {
      const auto row = nlohmann::json::parse(line, nullptr, false);
      ASSERT_TRUE(row.is_object()) << line;
      EXPECT_EQ(row.size(), std::size(fields)) << line;
      for (const char* field : fields) EXPECT_TRUE(row.contains(field)) << field;
      EXPECT_GT(row["keys_per_s"], 0) << line;
      ++count;
    }
    EXPECT_EQ(count, arguments[1] == "mixed" ? 3 : 1);
  }
  EXPECT_EQ(RunKvtrie({"bench", "get", "--seed", "77", "--block-bytes", "8192"}),
            ExitCode::kNotFound);
  EXPECT_EQ(RunKvtrie({"bench", "put", "--block-bytes", "8192", "--blocks", "64"}),
            ExitCode::kFailed);
}

}  // namespace
}  // namespace kvtrie
