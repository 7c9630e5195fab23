#include "client/worker_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/client/worker_process.h"
#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

constexpr std::size_t kBlocks = 12;

class WorkerBackendTest : public testing::Test {
 protected:
  WorkerBackendTest()
      : spec_(SectionedSpec()),
        profile_(ProfileBytes(WithDifferences(PlainProfile(spec_), spec_))),
        residual_(CodecOfProfile(spec_, ProfileIdOf(profile_), profile_).value()),
        own_(spec_, residual_),
        text_(MakeText(spec_, 16 * kBlocks, 3)) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      raw_.push_back(CutBlock(spec_, text_, static_cast<std::uint32_t>(16 * i)));
      blocks_.push_back({.first_position = static_cast<std::uint32_t>(16 * i),
                         .session_tokens = 16 * kBlocks,
                         .tokens = std::span(text_.tokens).subspan(16 * i, 16),
                         .raw = raw_.back()});
    }
  }

  std::unique_ptr<WorkerBackend> Connect(std::vector<std::string> targets,
                                         std::chrono::milliseconds timeout = kAmple) {
    WorkerOptions options;
    options.targets = std::move(targets);
    options.timeout = timeout;
    options.pause = std::chrono::milliseconds(20);
    return std::make_unique<WorkerBackend>(
        options, [this](const ProfileId& id) -> absl::StatusOr<WorkerBackend::ProfileBytes> {
          ++profile_reads_;
          if (id != residual_->id()) return absl::NotFoundError("no such profile");
          return std::make_shared<const std::vector<std::byte>>(profile_);
        });
  }
  FrameCodec CodecOf(const WorkerBackend& backend) const {
    return FrameCodec(spec_, residual_, backend.CoderFor(spec_, residual_).value());
  }

  // Whatever codes them, frames and KV are the same.
  void ThereAndBack(const FrameCodec& codec, Quality quality = Quality::kHigh) const {
    const auto frames = codec.Encode(blocks_, quality);
    ASSERT_TRUE(frames.ok()) << frames.status();
    const auto own = own_.Encode(blocks_, quality);
    std::vector<std::vector<std::byte>> raw(kBlocks, std::vector<std::byte>(raw_[0].size()));
    std::vector<std::vector<std::byte>> own_raw = raw;
    std::vector<FrameToDecode> to_decode, own_to_decode;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      ASSERT_EQ((*frames)[i].bytes, (*own)[i].bytes);
      EXPECT_EQ((*frames)[i].exact_tokens, (*own)[i].exact_tokens);
      const FrameView view = FrameView::Parse((*frames)[i].bytes).value();
      to_decode.push_back({.frame = view, .tokens = blocks_[i].tokens, .raw = raw[i]});
      own_to_decode.push_back({.frame = view, .tokens = blocks_[i].tokens, .raw = own_raw[i]});
    }
    ASSERT_TRUE(codec.Decode(to_decode).ok());
    ASSERT_TRUE(own_.Decode(own_to_decode).ok());
    EXPECT_EQ(raw, own_raw);
  }

  static constexpr std::chrono::milliseconds kAmple{30'000};

  const ModelSpec spec_;
  const std::vector<std::byte> profile_;
  const std::shared_ptr<const ResidualCodec> residual_;
  const FrameCodec own_;  // of this process
  const SyntheticText text_;
  std::vector<std::vector<std::byte>> raw_;
  std::vector<BlockToEncode> blocks_;
  std::atomic<int> profile_reads_{0};
};

TEST_F(WorkerBackendTest, AWorkerCodesAsThisProcessDoes) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  ThereAndBack(codec);
  ThereAndBack(codec, Quality::kSmall);
  const WorkerBackendStats stats = backend->Stats();
  EXPECT_EQ(stats.blocks_total, 4 * kBlocks);
  EXPECT_EQ(stats.own_blocks_total, 0u);
  EXPECT_EQ(stats.failed_calls_total, 0u);
  // The profile went there once.
  EXPECT_EQ(stats.sent_profiles_total, 1u);
  EXPECT_TRUE(backend->Probe().ok());
}

TEST_F(WorkerBackendTest, ReferencesGoAlong) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  const std::vector<ReferenceBlock> references = {
      {.node = *TrieNodeId::FromBytes("0123456789abcdef"),
       .first_position = 0,
       .tokens = blocks_[1].tokens,
       .raw = raw_[1],
       .quality = Quality::kNearExact}};
  const std::vector<ReferenceRun> runs = {{.first_token = 0, .token_count = 16}};
  BlockToEncode block = blocks_[1];
  block.references = references;
  block.runs = runs;
  const auto own = own_.Encode({&block, 1}, Quality::kHigh);
  const auto frames = codec.Encode({&block, 1}, Quality::kHigh);
  ASSERT_TRUE(frames.ok()) << frames.status();
  EXPECT_EQ(frames->front().bytes, own->front().bytes);
  ASSERT_EQ(frames->front().codec, CodecId::kReferenced);
  std::vector<std::byte> raw(raw_[0].size()), own_raw(raw.size());
  FrameToDecode to_decode{.frame = FrameView::Parse(frames->front().bytes).value(),
                          .tokens = block.tokens,
                          .raw = raw,
                          .references = references};
  ASSERT_TRUE(codec.Decode({&to_decode, 1}).ok());
  to_decode.raw = own_raw;
  ASSERT_TRUE(own_.Decode({&to_decode, 1}).ok());
  EXPECT_EQ(raw, own_raw);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, WithoutAWorkerThisProcessCodes) {
  const auto backend = Connect({"127.0.0.1:1"});
  const auto began = std::chrono::steady_clock::now();
  ThereAndBack(CodecOf(*backend));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  EXPECT_EQ(backend->Stats().blocks_total, 0u);
  EXPECT_EQ(backend->Stats().own_blocks_total, 2 * kBlocks);
  EXPECT_GT(backend->Stats().failed_calls_total, 0u);
}

TEST_F(WorkerBackendTest, AKilledWorkerLosesNothingAndARestartedOneIsUsedAgain) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  ThereAndBack(codec);
  worker.Kill();
  ThereAndBack(codec);
  const std::uint64_t before = backend->Stats().blocks_total;
  worker.Start();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (backend->Stats().blocks_total == before && std::chrono::steady_clock::now() < give_up) {
    ThereAndBack(codec);
  }
  EXPECT_GT(backend->Stats().blocks_total, before);
  // It had forgotten the profile.
  EXPECT_EQ(backend->Stats().sent_profiles_total, 2u);
}

TEST_F(WorkerBackendTest, AnotherWorkerTakesOver) {
  WorkerProcess one{KVTRIE_WORKER_PROGRAM}, two{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({one.listen, two.listen});
  const FrameCodec codec = CodecOf(*backend);
  for (int i = 0; i < 3; ++i) ThereAndBack(codec);
  two.Kill();
  for (int i = 0; i < 4; ++i) ThereAndBack(codec);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AWorkerThatHangsCostsItsTimeoutOnce) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen}, std::chrono::milliseconds(1000));
  const FrameCodec codec = CodecOf(*backend);
  ThereAndBack(codec);
  worker.Freeze();
  const auto began = std::chrono::steady_clock::now();
  const auto frames = codec.Encode(blocks_, Quality::kHigh);
  const auto took = std::chrono::steady_clock::now() - began;
  worker.Thaw();
  ASSERT_TRUE(frames.ok());
  EXPECT_EQ(frames->front().bytes, own_.Encode(blocks_, Quality::kHigh)->front().bytes);
  EXPECT_LT(took, std::chrono::seconds(5));
  EXPECT_GE(backend->Stats().failed_calls_total, 1u);
}

TEST_F(WorkerBackendTest, AWorkerThatHangsLeavesTimeForAnother) {
  WorkerProcess one{KVTRIE_WORKER_PROGRAM}, two{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({one.listen, two.listen}, std::chrono::milliseconds(10'000));
  const FrameCodec codec = CodecOf(*backend);
  for (int i = 0; i < 2; ++i) ThereAndBack(codec);
  one.Freeze();
  for (int i = 0; i < 2; ++i) ThereAndBack(codec);
  one.Thaw();
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AProfileThatManyThreadsMissIsSentOnce) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) threads.emplace_back([&] { ThereAndBack(codec); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(backend->Stats().sent_profiles_total, 1u);
  EXPECT_EQ(backend->Stats().own_blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AWorkerThatIsFullLeavesTheWorkHere) {
  WorkerProcess worker(KVTRIE_WORKER_PROGRAM,
                       {"--queue_items_max=1", "--coding_threads=1", "--batch_tokens=1"});
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back([&] { ThereAndBack(codec); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(backend->Stats().blocks_total + backend->Stats().own_blocks_total, 8 * kBlocks);
  // Being full is no failure.
  EXPECT_EQ(backend->Stats().failed_calls_total, 0u);
}

TEST_F(WorkerBackendTest, AProfileThatNobodyHasIsNoFaultOfTheWorker) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  WorkerOptions options;
  options.targets = {worker.listen};
  const WorkerBackend backend(options, [](const ProfileId&) {
    return absl::StatusOr<WorkerBackend::ProfileBytes>(absl::NotFoundError("gone"));
  });
  ThereAndBack(CodecOf(backend));
  EXPECT_EQ(backend.Stats().failed_calls_total, 0u);
  EXPECT_EQ(backend.Stats().own_blocks_total, 2 * kBlocks);
}

TEST_F(WorkerBackendTest, WhatCannotBeDecodedIsRefusedAsThisProcessWould) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  const auto frames = own_.Encode(blocks_, Quality::kHigh);
  std::vector<std::byte> raw(raw_[0].size());
  // Intact as its checksums say, but of another block.
  const FrameToDecode other{.frame = FrameView::Parse((*frames)[1].bytes).value(),
                            .tokens = blocks_[2].tokens,
                            .raw = raw};
  EXPECT_EQ(codec.Decode({&other, 1}), own_.Decode({&other, 1}));
}

TEST_F(WorkerBackendTest, ExactFramesWithAProfileAreMadeHere) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const auto frames = CodecOf(*backend).EncodeSmallestExact(blocks_);
  ASSERT_TRUE(frames.ok());
  EXPECT_EQ(frames->front().bytes, own_.EncodeSmallestExact(blocks_)->front().bytes);
  EXPECT_EQ(backend->Stats().blocks_total, 0u);
}

TEST_F(WorkerBackendTest, AWorkerEndsInOrder) {
  WorkerProcess worker{KVTRIE_WORKER_PROGRAM};
  const auto backend = Connect({worker.listen});
  const FrameCodec codec = CodecOf(*backend);
  std::atomic<bool> stop{false};
  std::thread coding([&] {
    while (!stop) ThereAndBack(codec);
  });
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (backend->Stats().blocks_total == 0 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::yield();
  }
  EXPECT_GT(backend->Stats().blocks_total, 0u);
  EXPECT_EQ(worker.Terminate(), 0);
  stop = true;
  coding.join();
}

}  // namespace
}  // namespace kvtrie
