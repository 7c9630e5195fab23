#include "storage/base/free_space.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>

namespace kvtrie {
namespace {

TEST(FreeSpaceTest, IsLessThanTheDiskHolds) {
  const std::string folder = std::filesystem::temp_directory_path();
  EXPECT_LE(FreeDiskBytes(folder), std::filesystem::space(folder).capacity);
}

TEST(FreeSpaceTest, WhatIsNotThereIsNoReasonToStop) {
  EXPECT_EQ(FreeDiskBytes("/no/such/folder"), std::numeric_limits<std::uint64_t>::max());
}

}  // namespace
}  // namespace kvtrie
