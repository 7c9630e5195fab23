#include "client/local_region.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvtrie {
namespace {

constexpr std::size_t kPage = LocalRegion::kPageBytes;

std::shared_ptr<LocalRegion> MakeRegion(std::size_t bytes) {
  auto region = LocalRegion::Create(bytes);
  EXPECT_TRUE(region.ok()) << region.status();
  return *std::move(region);
}

TEST(LocalRegionTest, CanNeitherShrinkNorGrow) {
  const auto region = MakeRegion(4 * kPage);
  const int seals = fcntl(region->fd(), F_GET_SEALS);
  EXPECT_NE(seals & F_SEAL_SHRINK, 0);
  EXPECT_NE(seals & F_SEAL_GROW, 0);
  EXPECT_NE(ftruncate(region->fd(), 0), 0);
}

TEST(LocalRegionTest, WhatAnotherMappingWritesIsSeen) {
  const auto region = MakeRegion(4 * kPage);
  const RegionBuffer buffer = *region->Allocate(100);
  const auto offset = region->OffsetOf(buffer.bytes());
  ASSERT_TRUE(offset.has_value());
  const char text[] = "from the server";
  ASSERT_EQ(pwrite(region->fd(), text, sizeof text, static_cast<off_t>(*offset)),
            static_cast<ssize_t>(sizeof text));
  EXPECT_EQ(std::memcmp(buffer.bytes().data(), text, sizeof text), 0);
}

TEST(LocalRegionTest, BuffersThatFillTheirPagesLieBehindOneAnother) {
  const auto region = MakeRegion(16 * kPage);
  const RegionBuffer a = *region->Allocate(2 * kPage);
  const RegionBuffer b = *region->Allocate(kPage);
  EXPECT_EQ(a.bytes().data() + 2 * kPage, b.bytes().data());
}

TEST(LocalRegionTest, FreedRunsJoinAgain) {
  const auto region = MakeRegion(4 * kPage);
  {
    const RegionBuffer a = *region->Allocate(kPage);
    RegionBuffer b = *region->Allocate(kPage + 1);
    const RegionBuffer c = *region->Allocate(kPage);
    EXPECT_TRUE(absl::IsResourceExhausted(region->Allocate(1).status()));
    b.Reset();
    EXPECT_EQ(region->free_bytes(), 2 * kPage);
  }
  EXPECT_EQ(region->free_bytes(), 4 * kPage);
  EXPECT_TRUE(region->Allocate(4 * kPage).ok());
}

TEST(LocalRegionTest, KnowsWhatIsNotItsOwn) {
  const auto region = MakeRegion(2 * kPage);
  const RegionBuffer buffer = *region->Allocate(2 * kPage);
  std::vector<std::byte> other(10);
  EXPECT_FALSE(region->OffsetOf(other).has_value());
  EXPECT_FALSE(region->OffsetOf({buffer.bytes().data() + kPage, kPage + 1}).has_value());
  EXPECT_EQ(region->OffsetOf({buffer.bytes().data() + kPage, kPage}), kPage);
}

TEST(LocalRegionTest, WithdrawnPagesDoNotShowLateWritesAndKeepTheirNeighbours) {
  const auto region = MakeRegion(8 * kPage);
  RegionBuffer buffer = *region->Allocate(3 * kPage);
  std::fill(buffer.bytes().begin(), buffer.bytes().end(), std::byte{7});
  const std::uint64_t offset = *region->OffsetOf(buffer.bytes());
  region->Withdraw(buffer.bytes().subspan(kPage + 10, 20));

  const std::vector<char> late(3 * kPage, 9);
  ASSERT_EQ(pwrite(region->fd(), late.data(), late.size(), static_cast<off_t>(offset)),
            static_cast<ssize_t>(late.size()));
  EXPECT_EQ(buffer.bytes()[0], std::byte{9});
  for (std::size_t i = kPage; i < 2 * kPage; ++i) ASSERT_EQ(buffer.bytes()[i], std::byte{7});
  EXPECT_EQ(buffer.bytes()[2 * kPage], std::byte{9});
  EXPECT_FALSE(region->OffsetOf(buffer.bytes()).has_value());
  EXPECT_TRUE(region->OffsetOf(buffer.bytes().first(kPage)).has_value());

  // Nobody is given withdrawn pages again.
  buffer.Reset();
  EXPECT_EQ(region->free_bytes(), 7 * kPage);
  EXPECT_TRUE(region->Allocate(6 * kPage).ok());
  EXPECT_FALSE(region->Allocate(7 * kPage).ok());
}

TEST(LocalRegionTest, BuffersOutliveTheOwnersHandle) {
  auto region = MakeRegion(kPage);
  RegionBuffer buffer = *region->Allocate(10);
  region.reset();
  buffer.bytes()[0] = std::byte{1};
}

}  // namespace
}  // namespace kvtrie
