// What a client chooses to load and what to compute again, of blocks that are slow to have and of
// ones that are in the server's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
// The client's PutPath is a type, that of the servers' tests a function.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#include "tests/server/coded_blocks.h"
#pragma GCC diagnostic pop

namespace kvtrie {
namespace {

// Decodes as slowly as a loaded machine does.
class SlowCodec final : public BlockCodec {
 public:
  static constexpr std::chrono::milliseconds kPerBlock{30};

  std::vector<absl::Status> Decode(const ModelSpec& spec, std::span<const FrameToDecode> blocks,
                                   ProfileStore& profiles) const override {
    std::this_thread::sleep_for(kPerBlock * blocks.size());
    return codec_.Decode(spec, blocks, profiles);
  }
  absl::StatusOr<std::vector<EncodedFrame>> Encode(const ModelSpec& spec,
                                                   std::span<const BlockToEncode> blocks,
                                                   const ProfileId& profile, Quality quality,
                                                   ProfileStore& profiles) const override {
    return codec_.Encode(spec, blocks, profile, quality, profiles);
  }
  bool CodesDifferences(const ModelSpec&, const ProfileId&, ProfileStore&) const override {
    return false;
  }
  void Forget(const ProfileId&) const override {}
  BlockCodecStats Stats() const override { return {}; }

 private:
  FakeCodec codec_;
};

class LoadOrComputeTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kBlocks = 6;

  LoadOrComputeTest() : server_({}, std::make_shared<SlowCodec>()) {
    ClientOptions options;
    options.targets = {server_.server().addresses().listen};
    options.lane = Lane::kGrpc;
    options.coding = Coding::kServer;
    client_ = *Client::Create(options);
    model_ = client_->RegisterModel(*FromProto(TestSpec()))->id;
    model_bytes_ = std::string(model_.view());
  }

  static std::vector<TokenId> Tokens(std::uint32_t seed) {
    const std::string bytes = kvtrie::PathTokens(kBlocks, seed);
    std::vector<TokenId> tokens(bytes.size() / sizeof(TokenId));
    std::memcpy(tokens.data(), bytes.data(), bytes.size());
    return tokens;
  }
  v1::LookupResult Find(std::uint32_t seed) {
    LookupOptions options;
    options.min_quality = Quality::kHigh;
    options.want_runs = true;
    auto found = client_->Lookup(model_, Tokens(seed), options);
    EXPECT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->matched_blocks(), kBlocks);
    return *found;
  }
  LoadPlan Plan(const v1::LookupResult& found) {
    const auto plan = client_->PlanLoad(model_, found, kBlocks * kTestBlockTokens, fetch_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.value_or(LoadPlan{});
  }
  void FetchAll(const v1::LookupResult& found) {
    std::vector<std::vector<std::byte>> memory(kBlocks, std::vector<std::byte>(kTestBlockBytes));
    std::vector<FetchTarget> targets(kBlocks);
    for (std::size_t i = 0; i < kBlocks; ++i) {
      std::memcpy(targets[i].node.bytes.data(), found.blocks(0).node_ids().data() + 16 * i, 16);
      targets[i].raw = memory[i];
    }
    EXPECT_TRUE(client_->Fetch(model_, targets, fetch_).all_loaded());
  }

  RunningServer server_;
  std::unique_ptr<Client> client_;
  ModelId model_;
  std::string model_bytes_;
  FetchOptions fetch_{.min_quality = Quality::kHigh};
};

TEST_F(LoadOrComputeTest, SlowBlocksAreComputedAndThoseInMemoryLoaded) {
  const ProfileId profile = MustPutProfile(server_.cache(), TestProfile());
  PutCodedPath(server_.cache(), model_bytes_, profile, kBlocks, /*seed=*/1);
  kvtrie::PutPath(server_.cache(), model_bytes_, kBlocks, /*seed=*/2);

  v1::LookupResult slow = Find(1);
  v1::LookupResult in_memory = Find(2);
  ASSERT_EQ(slow.runs_size(), 1);
  EXPECT_EQ(slow.runs(0).block_count(), kBlocks);
  EXPECT_EQ(slow.runs(0).codec(), v1::CODEC_RESIDUAL);
  EXPECT_EQ(slow.runs(0).rung(), v1::RUNG_CODED);
  EXPECT_EQ(slow.runs(0).quality(), v1::QUALITY_HIGH);
  ASSERT_EQ(in_memory.runs_size(), 1);
  EXPECT_EQ(in_memory.runs(0).codec(), v1::CODEC_RAW);
  EXPECT_EQ(in_memory.runs(0).memory_bytes(), in_memory.runs(0).bytes());
  // Nothing is measured: all is loaded, whatever it may cost.
  EXPECT_EQ(Plan(slow).load_blocks, kBlocks);
  EXPECT_EQ(Plan(in_memory).load_blocks, kBlocks);

  FetchAll(in_memory);
  FetchAll(slow);
  slow = Find(1);
  EXPECT_GE(slow.runs(0).decode_seconds(), 0.9 * 0.030 * kBlocks / 2);  // by two threads
  EXPECT_EQ(Plan(slow).load_blocks, kBlocks);  // what computing costs is not known

  // The engine computes a block in 3 ms: ten times as fast as the server decodes one, and slower
  // than one comes from memory.
  ASSERT_TRUE(client_->ReportPrefill(model_, kTestBlockTokens, 0, 0.003).ok());
  EXPECT_EQ(Plan(Find(1)).load_blocks, 0u);
  in_memory = Find(2);
  EXPECT_EQ(in_memory.runs(0).decode_seconds(), 0);
  EXPECT_EQ(Plan(in_memory).load_blocks, kBlocks);
  EXPECT_GT(Plan(in_memory).load_seconds, 0);
  // A slow engine takes all that it can get.
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(client_->ReportPrefill(model_, kTestBlockTokens, 0, 3).ok());
  }
  EXPECT_EQ(Plan(Find(1)).load_blocks, kBlocks);
}

TEST_F(LoadOrComputeTest, WhatCannotBePlannedIsSaid) {
  kvtrie::PutPath(server_.cache(), model_bytes_, kBlocks, /*seed=*/2);
  LookupOptions options;
  const auto without_runs = client_->Lookup(model_, Tokens(2), options);
  ASSERT_TRUE(without_runs.ok());
  EXPECT_EQ(without_runs->runs_size(), 0);
  const auto plan = client_->PlanLoad(model_, *without_runs, 100);
  EXPECT_TRUE(absl::IsInvalidArgument(plan.status())) << plan.status();
  EXPECT_THAT(std::string(plan.status().message()), testing::HasSubstr("want_runs"));
  ModelId other;
  EXPECT_TRUE(absl::IsFailedPrecondition(client_->PlanLoad(other, Find(2), 100).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(client_->ReportPrefill(other, 1, 0, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->ReportPrefill(model_, 0, 0, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->ReportPrefill(model_, 1, 0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->ReportPrefill(model_, 1, 0, -1)));
}

}  // namespace
}  // namespace kvtrie
