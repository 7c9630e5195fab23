#include "server/worker/profile_shelf.h"

#include <gtest/gtest.h>

#include "tests/server/worker/worker_blocks.h"

namespace kvtrie {
namespace {

std::vector<std::byte> Profile(float step) {
  ResidualProfile profile = PlainProfile(WorkerSpec());
  profile.levels[0].step = step;
  return ProfileBytes(profile);
}

TEST(ProfileShelfTest, KeepsProfilesByTheirContent) {
  ProfileShelf shelf(std::size_t{64} << 20);
  const std::vector<std::byte> profile = Profile(0.25f);
  const auto held = shelf.Add(profile);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->id, ProfileIdOf(profile));
  EXPECT_EQ(shelf.Add(profile)->id, held->id);
  EXPECT_EQ(shelf.List().size(), 1u);
  EXPECT_EQ(*shelf.Find(held->id), profile);
  EXPECT_EQ(shelf.Find(ProfileIdOf(Profile(0.5f))), nullptr);
  EXPECT_GT(shelf.LevelOf(held->id, held->header.levels[0].quality).mean_kl, 0);
  EXPECT_EQ(shelf.LevelOf(ProfileIdOf(Profile(0.5f)), Quality::kHigh).mean_kl, 0);
}

TEST(ProfileShelfTest, ForgetsTheOneThatWasNotUsedForLongest) {
  const std::vector<std::byte> a = Profile(0.25f), b = Profile(0.5f), c = Profile(1);
  ProfileShelf shelf(a.size() * 2 + a.size() / 2);
  ASSERT_TRUE(shelf.Add(a).ok());
  ASSERT_TRUE(shelf.Add(b).ok());
  ASSERT_NE(shelf.Find(ProfileIdOf(a)), nullptr);
  ASSERT_TRUE(shelf.Add(c).ok());
  EXPECT_NE(shelf.Find(ProfileIdOf(a)), nullptr);
  EXPECT_EQ(shelf.Find(ProfileIdOf(b)), nullptr);
  EXPECT_NE(shelf.Find(ProfileIdOf(c)), nullptr);
}

TEST(ProfileShelfTest, RefusesWhatIsNone) {
  ProfileShelf shelf(std::size_t{64} << 20);
  std::vector<std::byte> damaged = Profile(0.25f);
  damaged.back() ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(shelf.Add(damaged).status()));
  damaged = Profile(0.25f);
  damaged.pop_back();
  EXPECT_TRUE(absl::IsDataLoss(shelf.Add(damaged).status()));
  EXPECT_TRUE(absl::IsDataLoss(shelf.Add({}).status()));
  ProfileShelf small(1000);
  EXPECT_TRUE(absl::IsResourceExhausted(small.Add(Profile(0.25f)).status()));
  EXPECT_TRUE(shelf.List().empty());
}

}  // namespace
}  // namespace kvtrie
