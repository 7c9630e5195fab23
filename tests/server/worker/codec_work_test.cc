#include "server/worker/codec_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/server/worker/worker_blocks.h"

namespace kvtrie {
namespace {

class CodecWorkTest : public testing::Test {
 protected:
  CodecWorkTest() : work_(*cpu_, shelf_, std::size_t{1} << 30) {
    EXPECT_TRUE(shelf_.Add(blocks_.profile()).ok());
  }

  std::unique_ptr<CodecJob> Job(CodecOp op, std::size_t i, std::span<const std::byte> bytes) const {
    auto job = std::make_unique<CodecJob>();
    job->op = op;
    job->model = model_;
    job->quality = Quality::kHigh;
    job->profile = blocks_.profile_id();
    job->first_position = static_cast<std::uint32_t>(16 * i);
    job->session_tokens = job->first_position + 16;
    job->tokens.assign(blocks_.tokens(i).begin(), blocks_.tokens(i).end());
    job->block.memory = AlignedBuffer(bytes.size());
    job->block.bytes = bytes.size();
    std::memcpy(job->block.memory.data(), bytes.data(), bytes.size());
    return job;
  }

  const WorkerBlocks blocks_{4};
  const std::shared_ptr<const CodecModel> model_ =
      std::make_shared<const CodecModel>(blocks_.spec());
  const std::unique_ptr<const CodecBackend> cpu_ = CpuBackend();
  ProfileShelf shelf_{std::size_t{64} << 20};
  CodecWork work_;
};

TEST_F(CodecWorkTest, JobsThatShareABatchAreCodedAsAlone) {
  std::vector<std::unique_ptr<CodecJob>> jobs;
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    jobs.push_back(Job(CodecOp::kEncode, i, blocks_.raw(i)));
  }
  work_.Run(jobs);
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    ASSERT_TRUE(jobs[i]->status.ok()) << jobs[i]->status;
    EXPECT_EQ(jobs[i]->frame.bytes, blocks_.Frame(i).bytes);
    EXPECT_GT(jobs[i]->mean_kl, 0);
  }
}

TEST_F(CodecWorkTest, ABadFrameFailsAlone) {
  std::vector<std::unique_ptr<CodecJob>> jobs;
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    jobs.push_back(Job(CodecOp::kDecode, i, blocks_.Frame(i).bytes));
    ASSERT_TRUE(CodecWork::Open(*jobs.back()).ok());
  }
  // Was intact when it was opened; what it holds is not what any encoder writes.
  std::memset(jobs[2]->block.memory.data() + jobs[2]->block.bytes - 400, 0x5a, 400);
  work_.Run(jobs);
  for (std::size_t i = 0; i < blocks_.count(); ++i) {
    EXPECT_EQ(jobs[i]->status.ok(), i != 2) << jobs[i]->status;
    if (i == 2) continue;
    EXPECT_EQ(std::memcmp(jobs[i]->raw.data(), blocks_.Decoded(i, blocks_.Frame(i).bytes).data(),
                          blocks_.raw_bytes()),
              0);
  }
}

TEST_F(CodecWorkTest, OpeningAFrameTellsByWhichProfileItIsDecoded) {
  auto job = Job(CodecOp::kDecode, 0, blocks_.Frame(0).bytes);
  job->profile = {};
  job->quality = Quality::kExact;
  ASSERT_TRUE(CodecWork::Open(*job).ok());
  EXPECT_EQ(job->profile, blocks_.profile_id());
  EXPECT_EQ(job->quality, Quality::kHigh);
}

TEST_F(CodecWorkTest, WhatIsNoFrameIsNotOpened) {
  auto frame = blocks_.Frame(0).bytes;
  frame.back() ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(CodecWork::Open(*Job(CodecOp::kDecode, 0, frame))));
  frame.back() ^= std::byte{1};
  frame.pop_back();
  EXPECT_TRUE(absl::IsDataLoss(CodecWork::Open(*Job(CodecOp::kDecode, 0, frame))));
  EXPECT_TRUE(
      absl::IsInvalidArgument(CodecWork::Open(*Job(CodecOp::kDecode, 1, blocks_.Frame(0).bytes))));
}

TEST_F(CodecWorkTest, AMissingProfileIsLookedForAgain) {
  ProfileShelf empty(std::size_t{64} << 20);
  CodecWork work(*cpu_, empty, std::size_t{1} << 30);
  std::vector<std::unique_ptr<CodecJob>> jobs;
  jobs.push_back(Job(CodecOp::kEncode, 0, blocks_.raw(0)));
  work.Run(jobs);
  EXPECT_TRUE(absl::IsFailedPrecondition(jobs[0]->status));
  EXPECT_EQ(jobs[0]->missing_profile, blocks_.profile_id());
  ASSERT_TRUE(empty.Add(blocks_.profile()).ok());
  jobs[0] = Job(CodecOp::kEncode, 0, blocks_.raw(0));
  work.Run(jobs);
  EXPECT_TRUE(jobs[0]->status.ok()) << jobs[0]->status;
}

}  // namespace
}  // namespace kvtrie
