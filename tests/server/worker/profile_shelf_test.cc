#include "server/worker/profile_shelf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/server/worker/worker_blocks.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> Profile(float step) {
  ResidualProfile profile = PlainProfile(WorkerSpec());
  profile.levels[0].step = step;
  return ProfileBytes(profile);
}

class ProfileShelfTest : public testing::Test {
 protected:
  static bool Has(const ProfileShelf& shelf, const std::vector<std::byte>& profile) {
    const ProfileId id = ProfileIdOf(profile);
    const auto held = shelf.List();
    return std::any_of(held.begin(), held.end(), [&](const auto& one) { return one.id == id; });
  }
  // All of the same size.
  const std::vector<std::byte> a_ = Profile(0.25f), b_ = Profile(0.5f), c_ = Profile(1);
  const std::size_t room_for_two_ = a_.size() * 2 + a_.size() / 2;
  FakeClock clock_;
};

TEST_F(ProfileShelfTest, KeepsProfilesByTheirContent) {
  ProfileShelf shelf(std::size_t{64} << 20);
  const auto held = shelf.Add(a_);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->id, ProfileIdOf(a_));
  EXPECT_EQ(shelf.Add(a_)->id, held->id);
  EXPECT_EQ(shelf.List().size(), 1u);
  EXPECT_EQ(*shelf.Find(held->id), a_);
  EXPECT_EQ(shelf.Find(ProfileIdOf(b_)), nullptr);
  EXPECT_GT(shelf.LevelOf(held->id, held->header.levels[0].quality).mean_kl, 0);
  EXPECT_EQ(shelf.LevelOf(ProfileIdOf(b_), Quality::kHigh).mean_kl, 0);
  EXPECT_EQ(shelf.Stats().profiles, 1u);
  EXPECT_EQ(shelf.Stats().bytes, a_.size());
}

TEST_F(ProfileShelfTest, ForgetsTheOneThatWasNotUsedForLongest) {
  ProfileShelf shelf(room_for_two_, clock_);
  ASSERT_TRUE(shelf.Add(a_).ok());
  clock_.Advance(std::chrono::seconds(1));
  ASSERT_TRUE(shelf.Add(b_).ok());
  clock_.Advance(std::chrono::seconds(1));
  ASSERT_NE(shelf.Find(ProfileIdOf(a_)), nullptr);
  clock_.Advance(ProfileShelf::kInUse);
  ASSERT_TRUE(shelf.Add(c_).ok());
  EXPECT_TRUE(Has(shelf, a_));
  EXPECT_FALSE(Has(shelf, b_));
  EXPECT_TRUE(Has(shelf, c_));
  EXPECT_EQ(shelf.Stats().evicted_total, 1u);
  EXPECT_EQ(shelf.Stats().bytes, a_.size() + c_.size());
}

TEST_F(ProfileShelfTest, KeepsTheOnesInUseFromThoseThatSendMany) {
  ProfileShelf shelf(room_for_two_, clock_);
  ASSERT_TRUE(shelf.Add(a_).ok());
  ASSERT_TRUE(shelf.Add(b_).ok());
  // Whoever codes with a profile uses it, though a codec was made of it long ago.
  clock_.Advance(ProfileShelf::kInUse - std::chrono::seconds(1));
  shelf.LevelOf(ProfileIdOf(a_), Quality::kHigh);
  ASSERT_NE(shelf.Find(ProfileIdOf(b_)), nullptr);
  clock_.Advance(ProfileShelf::kInUse - std::chrono::seconds(1));
  const absl::Status refused = shelf.Add(c_).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--profile_memory_bytes"));
  EXPECT_TRUE(Has(shelf, a_));
  EXPECT_TRUE(Has(shelf, b_));
  EXPECT_EQ(shelf.Stats().evicted_total, 0u);
  // It is refused before its bytes are sent, and those that are here are welcome.
  EXPECT_TRUE(absl::IsResourceExhausted(shelf.Begin(c_.size(), {}).status()));
  EXPECT_TRUE(shelf.Begin(a_.size(), ProfileIdOf(a_)).ok());
  EXPECT_TRUE(shelf.Add(a_).ok());
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(shelf.Begin(c_.size(), {}).ok());
  EXPECT_TRUE(shelf.Add(c_).ok());
  EXPECT_FALSE(Has(shelf, b_));
}

TEST_F(ProfileShelfTest, RefusesWhatIsNone) {
  ProfileShelf shelf(std::size_t{64} << 20);
  std::vector<std::byte> damaged = a_;
  damaged.back() ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(shelf.Add(damaged).status()));
  damaged = a_;
  damaged.pop_back();
  EXPECT_TRUE(absl::IsDataLoss(shelf.Add(damaged).status()));
  EXPECT_TRUE(absl::IsDataLoss(shelf.Add({}).status()));
  ProfileShelf small(1000);
  EXPECT_TRUE(absl::IsResourceExhausted(small.Add(a_).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(small.Begin(a_.size(), {}).status()));
  for (const std::uint64_t bytes :
       {std::uint64_t{kProfileBytesMin} - 1, kProfileBytesMax + 1, ~std::uint64_t{0}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(shelf.Begin(bytes, {}).status()));
  }
  EXPECT_TRUE(shelf.List().empty());
}

TEST_F(ProfileShelfTest, AnotherIdThanExpectedChangesNothing) {
  ProfileShelf shelf(a_.size(), clock_);
  ASSERT_TRUE(shelf.Add(a_, ProfileIdOf(a_)).ok());
  clock_.Advance(ProfileShelf::kInUse);
  const absl::Status refused = shelf.Add(b_, ProfileIdOf(c_)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("expected_profile_id"));
  EXPECT_TRUE(Has(shelf, a_));
  EXPECT_FALSE(Has(shelf, b_));
}

TEST_F(ProfileShelfTest, UploadsBecomeProfiles) {
  ProfileShelf shelf(room_for_two_, clock_);
  auto upload = shelf.Begin(a_.size(), ProfileIdOf(a_));
  ASSERT_TRUE(upload.ok()) << upload.status();
  ASSERT_TRUE((*upload)->Append(std::span(a_).first(1000)).ok());
  ASSERT_TRUE((*upload)->Append(std::span(a_).subspan(1000)).ok());
  EXPECT_TRUE(shelf.List().empty());
  const auto stored = (*upload)->Commit();
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->info.id, ProfileIdOf(a_));
  EXPECT_EQ(*shelf.Find(ProfileIdOf(a_)), a_);

  auto broken = shelf.Begin(a_.size(), {});
  ASSERT_TRUE((*broken)->Append(std::vector<std::byte>(a_.size())).ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*broken)->Commit().status()));
}

// All that is announced counts, before any of it has come.
TEST_F(ProfileShelfTest, UploadsTogetherHaveTheirBound) {
  ProfileShelf shelf(room_for_two_, clock_);
  auto first = shelf.Begin(a_.size(), {});
  auto second = shelf.Begin(b_.size(), {});
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(shelf.Stats().upload_bytes, a_.size() + b_.size());
  const absl::Status refused = shelf.Begin(c_.size(), {}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("on their way"));
  first->reset();
  EXPECT_TRUE(shelf.Begin(c_.size(), {}).ok());
  second->reset();
  EXPECT_EQ(shelf.Stats().upload_bytes, 0u);
}

}  // namespace
}  // namespace kvtrie
