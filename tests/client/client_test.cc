#include "client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "storage/base/byte_reader.h"
#include "tests/client/fake_cache.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::byte kPoison{0xa5};
constexpr std::uint32_t kLayers = 3;
constexpr std::uint32_t kHeadDim = 1024;
constexpr std::size_t kLayerBytes = FakeCache::kBlockTokens * 2 * kHeadDim;
constexpr std::size_t kBlockBytes = kLayers * kLayerBytes;

ModelSpec Spec() {
  ModelSpec spec;
  spec.name = "m";
  spec.weights_revision = "1";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  spec.block_tokens = FakeCache::kBlockTokens;
  spec.kv_groups = {{.layer_runs = {{kLayers, 1, kHeadDim, kHeadDim}}, .window_tokens = 0}};
  return spec;
}

std::string BlockContent(int number) {
  std::string bytes(kBlockBytes, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * 7 + static_cast<std::size_t>(number) * 13);
  }
  return bytes;
}

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : cache_(std::vector<std::size_t>(kLayers, kLayerBytes)), server_(&cache_) {
    options_.targets = {server_.target()};
    options_.retry.initial_backoff = milliseconds(1);
    options_.retry.max_backoff = milliseconds(20);
    options_.unary_timeout = seconds(20);
    options_.bulk_timeout = seconds(20);
    MakeClient();
  }

  void MakeClient() {
    auto client = Client::Create(options_);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    const auto model = client_->RegisterModel(Spec());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = model->id;
  }

  // Stores `count` blocks at the server, and makes poisoned targets for them.
  void StoreBlocks(int count) {
    memory_.assign(static_cast<std::size_t>(count) * kBlockBytes, kPoison);
    targets_.clear();
    for (int i = 0; i < count; ++i) {
      targets_.push_back(
          {*TrieNodeId::FromBytes(cache_.Store(BlockContent(i))),
           std::span(memory_).subspan(static_cast<std::size_t>(i) * kBlockBytes, kBlockBytes)});
    }
  }

  // Loaded blocks are right, whatever became of the others.
  void ExpectNoWrongBlock(const FetchReport& report) {
    for (std::size_t i = 0; i < report.blocks.size(); ++i) {
      if (!report.blocks[i].loaded()) continue;
      EXPECT_EQ(AsText(targets_[i].raw), BlockContent(static_cast<int>(i))) << "block " << i;
    }
  }

  // A path of `count` blocks whose content follows from `number`.
  PutPath MakePath(int number, std::size_t count) {
    auto tokens = std::make_unique<std::vector<TokenId>>();
    auto blocks = std::make_unique<std::vector<std::span<const std::byte>>>();
    for (std::size_t i = 0; i < count * FakeCache::kBlockTokens; ++i) {
      tokens->push_back(static_cast<TokenId>(number) * 1000 + static_cast<TokenId>(i));
    }
    for (std::size_t i = 0; i < count; ++i) {
      contents_.push_back(std::make_unique<std::string>(BlockContent(number)));
      blocks->push_back(AsBytes(*contents_.back()));
    }
    PutPath path;
    path.path.model = model_;
    path.path.tokens = *tokens;
    path.blocks = *blocks;
    tokens_.push_back(std::move(tokens));
    blocks_.push_back(std::move(blocks));
    return path;
  }

  FakeCache cache_;
  FakeServer server_;
  ClientOptions options_;
  std::unique_ptr<Client> client_;
  ModelId model_;
  std::vector<std::byte> memory_;
  std::vector<FetchTarget> targets_;
  std::vector<std::unique_ptr<std::string>> contents_;
  std::vector<std::unique_ptr<std::vector<TokenId>>> tokens_;
  std::vector<std::unique_ptr<std::vector<std::span<const std::byte>>>> blocks_;
};

TEST_F(ClientTest, FetchFillsTheTargets) {
  StoreBlocks(20);
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_TRUE(report.all_loaded());
  ExpectNoWrongBlock(report);
}

TEST_F(ClientTest, MissesAreInTheirSlots) {
  StoreBlocks(10);
  targets_[3].node.bytes.fill(0xee);
  targets_[9].node.bytes.fill(0xef);
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_EQ(report.loaded_blocks, 8u);
  for (const std::size_t i : {3u, 9u}) {
    EXPECT_TRUE(absl::IsNotFound(report.blocks[i].status));
    EXPECT_EQ(targets_[i].raw[0], kPoison);
  }
  ExpectNoWrongBlock(report);
}

TEST_F(ClientTest, FetchOfNothingAndOfOneNodeTwice) {
  EXPECT_TRUE(client_->Fetch(model_, {}).blocks.empty());
  StoreBlocks(2);
  targets_[1].node = targets_[0].node;
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_TRUE(report.all_loaded());
  EXPECT_EQ(AsText(targets_[1].raw), BlockContent(0));
}

TEST_F(ClientTest, OneDamagedChunkIsReadAgain) {
  StoreBlocks(5);
  cache_.corrupt_chunks = 1;
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_TRUE(report.all_loaded());
  ExpectNoWrongBlock(report);
  EXPECT_EQ(client_->stats().damaged_blocks, 1u);
}

TEST_F(ClientTest, BlockThatStaysDamagedIsNotLoaded) {
  StoreBlocks(1);
  cache_.corrupt_chunks = 1000;
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_EQ(report.loaded_blocks, 0u);
  EXPECT_TRUE(absl::IsDataLoss(report.blocks[0].status));
}

TEST_F(ClientTest, LayersComeInOrderAndWhole) {
  StoreBlocks(6);
  std::vector<std::uint32_t> layers;
  FetchOptions options;
  options.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock> blocks) {
    layers.push_back(layer);
    EXPECT_EQ(blocks.size(), 6u);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(AsText(targets_[static_cast<std::size_t>(i)].raw)
                    .substr(layer * kLayerBytes, kLayerBytes),
                BlockContent(i).substr(layer * kLayerBytes, kLayerBytes));
    }
  };
  EXPECT_TRUE(client_->Fetch(model_, targets_, options).all_loaded());
  EXPECT_THAT(layers, ::testing::ElementsAre(0, 1, 2));
}

TEST_F(ClientTest, LayersGoOnBehindACut) {
  StoreBlocks(6);
  cache_.cut_fetches_after_messages = 7;
  cache_.corrupt_chunks = 1;
  std::vector<std::uint32_t> layers;
  FetchOptions options;
  options.on_layer = [&](std::uint32_t layer, auto) { layers.push_back(layer); };
  const FetchReport report = client_->Fetch(model_, targets_, options);
  EXPECT_TRUE(report.all_loaded());
  ExpectNoWrongBlock(report);
  EXPECT_THAT(layers, ::testing::ElementsAre(0, 1, 2));
}

TEST_F(ClientTest, LayersOfAnUnknownModelAreRefused) {
  StoreBlocks(1);
  FetchOptions options;
  options.on_layer = [](std::uint32_t, auto) { FAIL(); };
  ModelId other;
  other.bytes.fill(9);
  EXPECT_TRUE(
      absl::IsFailedPrecondition(client_->Fetch(other, targets_, options).blocks[0].status));
}

TEST_F(ClientTest, CutFetchIsTakenUpAgain) {
  StoreBlocks(10);
  cache_.cut_fetches_after_messages = 4;
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_TRUE(report.all_loaded());
  ExpectNoWrongBlock(report);
  EXPECT_GE(client_->stats().retries, 1u);
}

TEST_F(ClientTest, UnavailableBlocksAreAskedForAgain) {
  StoreBlocks(10);
  cache_.unavailable_blocks = 12;
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_TRUE(report.all_loaded());
  ExpectNoWrongBlock(report);
}

TEST_F(ClientTest, IdempotentCallIsRepeated) {
  cache_.unavailable_calls = 3;
  const TokenId token = 1;
  EXPECT_TRUE(client_->Lookup(model_, std::span(&token, 1)).ok());
  EXPECT_EQ(client_->stats().retries, 3u);
  EXPECT_EQ(client_->stats().failed_calls, 0u);
}

TEST_F(ClientTest, NewPinIsNotRepeated) {
  cache_.unavailable_calls = 1;
  EXPECT_TRUE(absl::IsUnavailable(client_->Pin(v1::PinRequest()).status()));
  v1::PinRequest extend;
  extend.set_pin_id(std::string(16, 'p'));
  cache_.unavailable_calls = 1;
  EXPECT_TRUE(client_->Pin(extend).ok());
}

TEST_F(ClientTest, BudgetEndsTheRetries) {
  options_.retry.budget_tokens = 3;
  options_.retry.budget_tokens_per_second = 0;
  MakeClient();
  cache_.unavailable_calls = 1'000'000;
  const int calls_before = cache_.calls;
  const TokenId token = 1;
  EXPECT_TRUE(absl::IsUnavailable(client_->Lookup(model_, std::span(&token, 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(client_->Lookup(model_, std::span(&token, 1)).status()));
  EXPECT_EQ(cache_.calls - calls_before, 2 + 3);
  EXPECT_EQ(client_->stats().failed_calls, 2u);
}

TEST_F(ClientTest, NoCallOutlivesItsDeadline) {
  StoreBlocks(3);
  cache_.silent = true;
  const auto ends_in_time = [](const std::function<void()>& call) {
    const auto began = std::chrono::steady_clock::now();
    call();
    EXPECT_LT(std::chrono::steady_clock::now() - began, seconds(3));
  };
  ends_in_time([&] {
    FetchOptions options;
    options.timeout = milliseconds(200);
    const FetchReport report = client_->Fetch(model_, targets_, options);
    EXPECT_EQ(report.loaded_blocks, 0u);
    EXPECT_TRUE(absl::IsDeadlineExceeded(report.blocks[0].status));
  });
  ends_in_time([&] {
    const PutPath path = MakePath(1, 8);
    const auto reports = client_->Put(std::span(&path, 1), milliseconds(200));
    EXPECT_EQ(reports[0].stored_blocks, 0u);
  });
  ends_in_time([&] {
    const TokenId token = 1;
    LookupOptions options;
    options.timeout = milliseconds(200);
    EXPECT_TRUE(
        absl::IsDeadlineExceeded(client_->Lookup(model_, std::span(&token, 1), options).status()));
  });
  cache_.silent = false;
  EXPECT_TRUE(client_->Fetch(model_, targets_).all_loaded());
}

TEST_F(ClientTest, PutStoresManyPathsAtOnce) {
  std::vector<PutPath> paths;
  for (int i = 0; i < 200; ++i) {
    paths.push_back(MakePath(i, 1 + static_cast<std::size_t>(i) % 3));
    paths.back().eager = i % 2 == 0;
  }
  const auto reports = client_->Put(paths);
  ASSERT_EQ(reports.size(), paths.size());
  std::size_t blocks = 0;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    EXPECT_TRUE(reports[i].all_stored());
    EXPECT_EQ(reports[i].blocks.size(), paths[i].blocks.size());
    EXPECT_EQ(reports[i].duplicate_blocks, 0u);
    blocks += reports[i].blocks.size();
  }
  EXPECT_EQ(cache_.stored_blocks(), blocks);
  EXPECT_EQ(cache_.eager_announces, 100);

  // What was put comes back.
  targets_.clear();
  memory_.assign(kBlockBytes, kPoison);
  targets_.push_back({reports[199].blocks[0].node, memory_});
  EXPECT_TRUE(client_->Fetch(model_, targets_).all_loaded());
  EXPECT_EQ(AsText(targets_[0].raw), BlockContent(199));
}

TEST_F(ClientTest, PutOfWhatIsStoredSendsNothing) {
  const PutPath path = MakePath(1, 4);
  ASSERT_TRUE(client_->Put(std::span(&path, 1))[0].all_stored());
  const int received_before = cache_.put_blocks_received;
  const PutReport report = client_->Put(std::span(&path, 1))[0];
  EXPECT_TRUE(report.all_stored());
  EXPECT_EQ(report.duplicate_blocks, 4u);
  EXPECT_EQ(cache_.put_blocks_received, received_before);
}

TEST_F(ClientTest, CutPutGoesOnWithoutWhatWasAcknowledged) {
  PutPath path = MakePath(1, 8);
  path.eager = true;
  cache_.cut_puts_after_acks = 3;
  const PutReport report = client_->Put(std::span(&path, 1))[0];
  EXPECT_TRUE(report.all_stored());
  EXPECT_EQ(cache_.stored_blocks(), 8u);
  EXPECT_GE(client_->stats().retries, 1u);
}

TEST_F(ClientTest, PutOfAnUnknownModelIsRefused) {
  PutPath path = MakePath(1, 2);
  path.path.model.bytes.fill(9);
  const PutReport report = client_->Put(std::span(&path, 1))[0];
  ASSERT_EQ(report.blocks.size(), 2u);
  EXPECT_TRUE(absl::IsFailedPrecondition(report.blocks[0].status));
}

TEST_F(ClientTest, WorksAgainWhenTheServerIsBack) {
  StoreBlocks(4);
  const PutPath path = MakePath(1, 4);
  ASSERT_TRUE(client_->Put(std::span(&path, 1))[0].all_stored());
  ASSERT_TRUE(client_->Fetch(model_, targets_).all_loaded());
  for (int round = 0; round < 3; ++round) {
    server_.Stop();
    FetchOptions brief;
    brief.timeout = milliseconds(100);
    std::fill(memory_.begin(), memory_.end(), kPoison);
    EXPECT_EQ(client_->Fetch(model_, targets_, brief).loaded_blocks, 0u);
    server_.Start();
    const FetchReport report = client_->Fetch(model_, targets_);
    EXPECT_TRUE(report.all_loaded());
    ExpectNoWrongBlock(report);
    const PutPath more = MakePath(10 + round, 4);
    EXPECT_TRUE(client_->Put(std::span(&more, 1))[0].all_stored());
  }
}

TEST_F(ClientTest, ThreadsShareAClient) {
  StoreBlocks(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::byte> memory(8 * kBlockBytes);
      std::vector<FetchTarget> targets = targets_;
      for (std::size_t i = 0; i < targets.size(); ++i) {
        targets[i].raw = std::span(memory).subspan(i * kBlockBytes, kBlockBytes);
      }
      for (int round = 0; round < 20; ++round) {
        ASSERT_TRUE(client_->Fetch(model_, targets).all_loaded());
        for (int i = 0; i < 8; ++i) {
          ASSERT_EQ(AsText(targets[static_cast<std::size_t>(i)].raw), BlockContent(i)) << t;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ClientTest, AutoLaneWithoutALaneUsesGrpc) {
  options_.lane = Lane::kAuto;
  MakeClient();
  ASSERT_NE(client_->local_region(), nullptr);
  StoreBlocks(4);
  const FetchReport report = client_->Fetch(model_, targets_);
  EXPECT_TRUE(report.all_loaded());
  EXPECT_EQ(client_->stats().local_lane_blocks, 0u);
}

TEST(ClientOptionsTest, BadOptionsAreNamed) {
  ClientOptions options;
  options.targets.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(Client::Create(options).status()));
  options = {};
  options.bulk_channels = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(Client::Create(options).status()));
  options = {};
  options.stream_window_bytes = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(Client::Create(options).status()));
}

}  // namespace
}  // namespace kvtrie
