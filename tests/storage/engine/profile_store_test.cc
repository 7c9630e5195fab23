#include "storage/engine/profile_store.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "storage/base/crc32c.h"
#include "tests/storage/base/faulty_file_system.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

using testing::HasSubstr;

constexpr char kFolder[] = "store/profiles";

ProfileId IdOf(std::span<const std::byte> bytes) {
  ProfileDigest digest;
  digest.Add(bytes);
  return digest.Finish();
}

class ProfileStoreTest : public testing::Test {
 protected:
  void Open() {
    auto store = ProfileStore::Open(files_, kFolder);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  absl::StatusOr<ProfileInfo> Put(std::span<const std::byte> bytes, std::int64_t now = 1000,
                                  std::size_t piece = 1 << 20) {
    auto upload = store_->Begin(bytes.size());
    if (!upload.ok()) return upload.status();
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      const absl::Status status =
          (*upload)->Append(bytes.subspan(at, std::min(piece, bytes.size() - at)));
      if (!status.ok()) return status;
    }
    return (*upload)->Commit({}, now);
  }

  void ExpectReads(std::span<const std::byte> bytes) {
    const auto read = store_->Read(IdOf(bytes));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(std::equal(read->view.begin(), read->view.end(), bytes.begin(), bytes.end()));
  }

  std::vector<std::string> Names() { return files_.List(kFolder).value(); }

  const ModelSpec spec_ = TestModelSpec();
  FaultyFileSystem files_;
  std::unique_ptr<ProfileStore> store_;
};

TEST_F(ProfileStoreTest, KeepsWhatWasPut) {
  Open();
  const auto small = TestProfile(spec_, 1, 1024);
  const auto large = TestProfile(spec_, 2, (5 << 20) + 123);
  for (const auto& bytes : {small, large}) {
    const auto info = Put(bytes);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->id, IdOf(bytes));
    EXPECT_EQ(info->header.profile_bytes(), bytes.size());
    EXPECT_EQ(info->created_unix_seconds, 1000);
    ExpectReads(bytes);
  }
  EXPECT_EQ(store_->disk_bytes(), files_.AllocatedBytes());
  Open();
  EXPECT_EQ(store_->count(), 2u);
  EXPECT_EQ(store_->disk_bytes(), files_.AllocatedBytes());
  ExpectReads(small);
  ExpectReads(large);
}

TEST_F(ProfileStoreTest, PiecesMayBeOfAnySize) {
  Open();
  const auto bytes = TestProfile(spec_, 1, (1 << 20) + 4000);
  for (const std::size_t piece : {std::size_t{1}, std::size_t{100}, std::size_t{171},
                                  std::size_t{173}, std::size_t{4097}, std::size_t{1} << 21}) {
    if (piece < 100 && std::getenv("KV_SLOW") == nullptr) continue;
    ASSERT_TRUE(Put(bytes, 1000, piece).ok());
    ExpectReads(bytes);
    ASSERT_TRUE(store_->Remove(IdOf(bytes)).ok());
  }
  EXPECT_EQ(store_->disk_bytes(), 0u);
}

TEST_F(ProfileStoreTest, PuttingAgainChangesNothing) {
  Open();
  const auto bytes = TestProfile(spec_);
  ASSERT_TRUE(Put(bytes, 1000).ok());
  const auto again = Put(bytes, 2000);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->created_unix_seconds, 1000);
  EXPECT_EQ(Names().size(), 1u);
}

TEST_F(ProfileStoreTest, RefusesWhatIsNoProfileAndKeepsNothingOfIt) {
  Open();
  const auto bytes = TestProfile(spec_);
  const auto put_changed = [&](std::size_t at) {
    auto changed = bytes;
    changed[at] ^= std::byte{1};
    return Put(changed).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(put_changed(0)));
  EXPECT_TRUE(absl::IsInvalidArgument(put_changed(50)));
  EXPECT_TRUE(absl::IsInvalidArgument(put_changed(bytes.size() - 1)));
  EXPECT_TRUE(absl::IsUnimplemented(put_changed(5)));  // the high byte of the version
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Begin(1023).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Begin((256u << 20) + 1).status()));
  EXPECT_TRUE(Names().empty());
  EXPECT_EQ(store_->disk_bytes(), 0u);
}

// Before the bytes of a large one have come.
TEST_F(ProfileStoreTest, RefusesByTheHeadAlone) {
  Open();
  auto upload = store_->Begin(10'000'000).value();
  const auto status = upload->Append(TestProfile(spec_, 1, 2000));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the profile's header says 2000"));
  upload = store_->Begin(10'000'000).value();
  EXPECT_TRUE(absl::IsInvalidArgument(upload->Append(std::vector<std::byte>(172))));
}

TEST_F(ProfileStoreTest, WrongLengthsAndIdsAreRefused) {
  Open();
  const auto bytes = TestProfile(spec_);
  auto upload = store_->Begin(bytes.size()).value();
  ASSERT_TRUE(upload->Append(std::span(bytes).first(1999)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(upload->Commit({}, 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(upload->Append(std::span(bytes).last(2))));
  upload = store_->Begin(bytes.size()).value();
  ASSERT_TRUE(upload->Append(bytes).ok());
  ProfileId other;
  other.bytes.fill(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(upload->Commit(other, 1).status()));
  upload.reset();
  EXPECT_TRUE(Names().empty());
}

TEST_F(ProfileStoreTest, ListsTheNewestFirstAndFindsItForAModel) {
  Open();
  const auto first = TestProfile(spec_, 1);
  const auto second = TestProfile(spec_, 2);
  const auto foreign = TestProfile(TestModelSpec("other"), 3);
  ASSERT_TRUE(Put(second, 20).ok());
  ASSERT_TRUE(Put(first, 10).ok());
  ASSERT_TRUE(Put(foreign, 30).ok());
  const auto infos = store_->List();
  ASSERT_EQ(infos.size(), 3u);
  EXPECT_EQ(infos[0].id, IdOf(foreign));
  EXPECT_EQ(infos[1].id, IdOf(second));
  EXPECT_EQ(infos[2].id, IdOf(first));
  EXPECT_EQ(store_->NewestFor(spec_.CodecKey()), IdOf(second));
  EXPECT_TRUE(store_->NewestFor(TestModelSpec("third").CodecKey()).empty());
}

TEST_F(ProfileStoreTest, DamageIsFoundBeforeAByteIsGivenAndHealedByPuttingAgain) {
  Open();
  const auto bytes = TestProfile(spec_, 1, 73 * 4096);  // whole pages: every bit is one of it
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(Put(bytes).ok());
    ASSERT_TRUE(files_.FlipBit(std::string(kFolder) + "/" + Names().front(), random));
    if (round % 2 == 0) Open();
    const auto read = round % 3 == 0 ? store_->OpenToRead(IdOf(bytes)).status()
                                     : store_->Read(IdOf(bytes)).status();
    // Damage of the head shows when the store is opened.
    EXPECT_TRUE(absl::IsDataLoss(read) || (round % 2 == 0 && absl::IsNotFound(read))) << read;
    EXPECT_FALSE(store_->Find(IdOf(bytes)).has_value());
    EXPECT_TRUE(Names().empty());
  }
}

TEST_F(ProfileStoreTest, ReadersGoOnWhenTheProfileIsRemoved) {
  Open();
  const auto bytes = TestProfile(spec_, 1, 5000);
  ASSERT_TRUE(Put(bytes).ok());
  auto reader = store_->OpenToRead(IdOf(bytes)).value();
  ASSERT_TRUE(store_->Remove(IdOf(bytes)).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Remove(IdOf(bytes))));
  std::vector<std::byte> piece(1000);
  ASSERT_TRUE(reader->Read(2000, piece).ok());
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), bytes.begin() + 2000));
}

TEST_F(ProfileStoreTest, ForeignFilesAreNamedAndStay) {
  Open();
  const auto bytes = TestProfile(spec_);
  ASSERT_TRUE(Put(bytes, 7).ok());
  const std::string name = Names().front();
  const std::string hex = name.substr(0, 32);
  EXPECT_EQ(name, hex + ".7.profile");
  const std::vector<std::string> foreign = {"README",
                                            hex + ".profile",
                                            hex + ".07.profile",
                                            hex + ".-7.profile",
                                            hex + ".7.profile.bak",
                                            hex + ".8.profile"};
  for (const std::string& other : foreign) {
    files_.CopyFile(std::string(kFolder) + "/" + name, std::string(kFolder) + "/" + other);
  }
  Open();
  EXPECT_THAT(store_->foreign_files(), testing::UnorderedElementsAreArray(foreign));
  EXPECT_EQ(store_->count(), 1u);
  EXPECT_EQ(Names().size(), 1 + foreign.size());
  ExpectReads(bytes);
}

TEST_F(ProfileStoreTest, AFullDiskKeepsNothingOfIt) {
  Open();
  const auto bytes = TestProfile(spec_, 1, 3 << 20);
  ASSERT_TRUE(Put(TestProfile(spec_, 2)).ok());
  for (const std::uint64_t room : {std::uint64_t{0}, std::uint64_t{4096}, std::uint64_t{2} << 20}) {
    files_.SetCapacity(files_.AllocatedBytes() + room);
    EXPECT_TRUE(absl::IsResourceExhausted(Put(bytes).status())) << room;
    EXPECT_EQ(Names().size(), 1u);
    files_.SetCapacity(FaultyFileSystem::kNoLimit);
  }
  EXPECT_TRUE(Put(bytes).ok());
}

TEST_F(ProfileStoreTest, FailingDisksKeepNothingOfIt) {
  Open();
  const auto bytes = TestProfile(spec_, 1, 3 << 20);
  files_.TearWrites(1);
  EXPECT_TRUE(absl::IsUnavailable(Put(bytes).status()));
  files_.FailSyncs(1);
  EXPECT_TRUE(absl::IsUnavailable(Put(bytes).status()));
  EXPECT_EQ(store_->count(), 0u);
  EXPECT_TRUE(Names().empty());
  EXPECT_TRUE(Put(bytes).ok());
  ExpectReads(bytes);
}

// KV_CRASH_CYCLES: how often (default 200). A profile that was acknowledged is there and whole
// after a loss of power at any moment; one that was not is there as a whole or not at all.
TEST_F(ProfileStoreTest, SurvivesCrashes) {
  const char* const cycles_text = std::getenv("KV_CRASH_CYCLES");
  const int cycles = cycles_text != nullptr ? std::atoi(cycles_text) : 200;
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  Open();
  std::vector<std::vector<std::byte>> acknowledged;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const auto bytes =
        TestProfile(spec_, static_cast<std::uint32_t>(random()), 1024 + random() % 100'000);
    auto upload = store_->Begin(bytes.size()).value();
    const std::size_t sent = random() % 3 == 0 ? random() % bytes.size() : bytes.size();
    ASSERT_TRUE(upload->Append(std::span(bytes).first(sent)).ok());
    if (random() % 4 == 0) files_.FailSyncs(1);
    if (upload->Commit({}, cycle).ok()) acknowledged.push_back(bytes);
    files_.FailSyncs(0);
    if (random() % 4 == 0 && !acknowledged.empty()) {
      ASSERT_TRUE(store_->Remove(IdOf(acknowledged.back())).ok());
      acknowledged.pop_back();
    }
    if (random() % 2 == 0) {
      files_.KillProcess();
    } else {
      files_.LosePower(random);
    }
    upload.reset();  // can do nothing any more: its file is dead
    Open();
    for (const auto& kept : acknowledged) ExpectReads(kept);
    for (const ProfileInfo& info : store_->List()) ASSERT_TRUE(store_->Read(info.id).ok());
    ASSERT_FALSE(HasFailure()) << "cycle " << cycle;
    for (const std::string& name : Names()) ASSERT_THAT(name, HasSubstr(".profile"));
    while (acknowledged.size() > 5) {
      ASSERT_TRUE(store_->Remove(IdOf(acknowledged.back())).ok());
      acknowledged.pop_back();
    }
  }
}

}  // namespace
}  // namespace kvtrie
