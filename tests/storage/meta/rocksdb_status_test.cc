#include "storage/meta/rocksdb_status.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

using rocksdb::Status;

absl::StatusCode CodeOf(const Status& status) { return FromRocksDb("test", status).code(); }

TEST(RocksDbStatusTest, DamageIsDataLoss) {
  EXPECT_EQ(CodeOf(Status::Corruption("checksum")), absl::StatusCode::kDataLoss);
}

TEST(RocksDbStatusTest, NoSpaceIsResourceExhausted) {
  EXPECT_EQ(CodeOf(Status::NoSpace()), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CodeOf(Status::SpaceLimit()), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CodeOf(Status::MemoryLimit()), absl::StatusCode::kResourceExhausted);
}

TEST(RocksDbStatusTest, WhatMayPassIsUnavailable) {
  EXPECT_EQ(CodeOf(Status::IOError("read")), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(Status::Busy()), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(Status::TimedOut()), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(Status::TryAgain()), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(Status::Incomplete()), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CodeOf(Status::ShutdownInProgress()), absl::StatusCode::kUnavailable);
}

TEST(RocksDbStatusTest, WrongCallsAreInternal) {
  EXPECT_EQ(CodeOf(Status::InvalidArgument()), absl::StatusCode::kInternal);
  EXPECT_EQ(CodeOf(Status::NotSupported()), absl::StatusCode::kInternal);
  EXPECT_EQ(CodeOf(Status::NotFound()), absl::StatusCode::kInternal);
}

TEST(RocksDbStatusTest, MessageSaysWhatWasDoneAndWhatWasFound) {
  EXPECT_TRUE(FromRocksDb("get a row", Status::OK()).ok());
  const std::string message(FromRocksDb("get a row", Status::Corruption("bad block")).message());
  EXPECT_THAT(message, ::testing::StartsWith("get a row: "));
  EXPECT_THAT(message, ::testing::HasSubstr("bad block"));
}

}  // namespace
}  // namespace kvtrie
