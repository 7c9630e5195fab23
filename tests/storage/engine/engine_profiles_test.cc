// Codec profiles and the frames that name them.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

using testing::HasSubstr;

class EngineProfilesTest : public CodedFixture {
 protected:
  const std::vector<TokenId> tokens_ = SessionTokens(1, 3 * kTestBlockTokens);
  PathView Path() const { return PathOf(tokens_); }

  absl::Status PutStatus(const FrameKind& kind) {
    PutAnnouncement put;
    put.path = Path();
    put.quality = kind.quality;
    return PutFrames(put, kind).front().status();
  }
};

TEST_F(EngineProfilesTest, TheNewestThatFitsIsThatOfTheModel) {
  Open();
  EXPECT_TRUE(engine_->GetModel(tenant_, model_)->profile.empty());
  const ProfileId first = MustPutProfile(TestProfile(spec_, 1));
  EXPECT_EQ(engine_->GetModel(tenant_, model_)->profile, first);
  clock_.Advance(std::chrono::seconds(5));
  const ProfileId second = MustPutProfile(TestProfile(spec_, 2));
  MustPutProfile(TestProfile(TestModelSpec("other"), 3));
  EXPECT_EQ(engine_->RegisterModel(tenant_, spec_)->profile, second);
  // Other ways to cut and to store the same KV have it too; one whose layout nobody knows has not.
  ModelSpec wide = spec_;
  wide.block_tokens *= 2;
  wide.dtype = DType::kFloat16;
  EXPECT_EQ(engine_->RegisterModel(tenant_, wide)->profile, second);
  ModelSpec tagged = spec_;
  tagged.layout_tag = "paged";
  EXPECT_TRUE(engine_->RegisterModel(tenant_, tagged)->profile.empty());
  Reopen();
  EXPECT_EQ(engine_->GetModel(tenant_, model_)->profile, second);
}

TEST_F(EngineProfilesTest, ListsModelsAndFrames) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const ProfileId other = MustPutProfile(TestProfile(TestModelSpec("other"), 3));
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    const auto profiles = engine_->ListProfiles(tenant_);
    ASSERT_EQ(profiles.size(), 2u);
    for (const StoredProfile& profile : profiles) {
      const bool ours = profile.info.id == profile_;
      EXPECT_EQ(profile.info.id == other, !ours);
      EXPECT_EQ(profile.frames, ours ? 3u : 0u);
      EXPECT_EQ(profile.models, ours ? std::vector<ModelId>{model_} : std::vector<ModelId>());
    }
    EXPECT_EQ(engine_->Stats().profile_count, 2u);
  }
}

TEST_F(EngineProfilesTest, WhatFramesNameIsNotDeleted) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const absl::Status refused = engine_->DeleteProfile(profile_);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("3 stored frames name it"));
  Reopen();
  EXPECT_TRUE(absl::IsFailedPrecondition(engine_->DeleteProfile(profile_)));
  Selection all;
  all.all = true;
  ASSERT_TRUE(engine_->Delete(tenant_, all).ok());
  EXPECT_TRUE(engine_->DeleteProfile(profile_).ok());
  EXPECT_TRUE(absl::IsNotFound(engine_->DeleteProfile(profile_)));
  EXPECT_TRUE(absl::IsNotFound(engine_->OpenProfile(profile_).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(PutStatus(Residual(Quality::kHigh))));
}

// Each with the name of what is missing and what to do.
TEST_F(EngineProfilesTest, FramesNeedAProfileThatIsHereAndFits) {
  Open();
  profile_.bytes.fill(0x5a);
  absl::Status status = PutStatus(Residual(Quality::kHigh));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr(profile_.ToHex()), HasSubstr("PutProfile")));

  profile_ = MustPutProfile(TestProfile(TestModelSpec("other"), 3));
  status = PutStatus(Residual(Quality::kHigh));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("another model"));

  auto one_level = TestProfile(spec_, 4);
  ProfileHeader header = ParseProfileHeader(one_level).value();
  header.levels.resize(1);  // near-exact
  std::vector<std::byte> cut(2000 - 32);
  std::copy(one_level.begin() + 32 + static_cast<std::ptrdiff_t>(header.header_bytes()),
            one_level.end(), cut.begin() + static_cast<std::ptrdiff_t>(header.header_bytes()));
  header.body_bytes = cut.size() - header.header_bytes();
  header.body_crc32c = Crc32c(std::span(cut).subspan(header.header_bytes()));
  WriteProfileHeader(header, std::span(cut).first(header.header_bytes()));
  profile_ = MustPutProfile(cut);
  status = PutStatus(Residual(Quality::kHigh));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no level"));
  EXPECT_TRUE(PutStatus(Residual(Quality::kNearExact)).ok());
  EXPECT_EQ(engine_->Stats().node_count, 3u);
}

TEST_F(EngineProfilesTest, TheyCountAsWhatDuShows) {
  Open();
  engine_->RunMaintenance();
  const std::uint64_t before = engine_->Stats().disk_bytes;
  profile_ = MustPutProfile(TestProfile(spec_, 1, 3 << 20));
  const EngineStats stats = engine_->Stats();
  EXPECT_GE(stats.profile_bytes, 3u << 20);
  EXPECT_EQ(stats.disk_bytes, before + stats.profile_bytes);
  EXPECT_LE(DuBytes(), engine_->Stats().disk_bytes + (1 << 16));  // folders
  ASSERT_TRUE(engine_->DeleteProfile(profile_).ok());
  EXPECT_EQ(engine_->Stats().disk_bytes, before);
}

TEST_F(EngineProfilesTest, RoomForThemIsMadeOrRefused) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  options_.segment_bytes = std::uint64_t{4} << 20;
  Open();
  auto upload = engine_->BeginProfile(tenant_, std::uint64_t{31} << 20, {});
  ASSERT_TRUE(upload.ok()) << upload.status();
  // What is on its way counts.
  EXPECT_TRUE(absl::IsResourceExhausted(
      engine_->BeginProfile(tenant_, std::uint64_t{31} << 20, {}).status()));
  upload->reset();
  EXPECT_TRUE(engine_->BeginProfile(tenant_, std::uint64_t{31} << 20, {}).ok());
}

TEST_F(EngineProfilesTest, OneThatCannotFitCostsNoBlocks) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  options_.segment_bytes = std::uint64_t{4} << 20;
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const absl::Status refused = engine_->BeginProfile(tenant_, std::uint64_t{32} << 20, {}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("delete a profile"));
  EXPECT_EQ(engine_->Stats().node_count, 3u);
}

// Neither what is announced and never comes, nor what turns out to be no profile.
TEST_F(EngineProfilesTest, WhatIsNoProfileCostsNoBlocks) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  options_.segment_bytes = std::uint64_t{4} << 20;
  spec_.kv_groups.front().layer_runs = {{2, 8, 512, 512}};  // 256 KiB
  Open();
  std::uint64_t session = 0;
  while (engine_->Stats().disk_bytes < std::uint64_t{48} << 20) {
    MustPut(SessionTokens(++session, kTestBlockTokens));
  }
  const std::uint64_t before = engine_->Stats().node_count;
  auto upload = engine_->BeginProfile(tenant_, std::uint64_t{30} << 20, {});
  ASSERT_TRUE(upload.ok()) << upload.status();
  const std::vector<std::byte> junk(1u << 20, std::byte{0});
  EXPECT_TRUE(absl::IsInvalidArgument((*upload)->Append(junk)));
  EXPECT_EQ(engine_->Stats().node_count, before);
  upload->reset();

  const auto bytes = TestProfile(spec_, 1, 30 << 20);
  upload = engine_->BeginProfile(tenant_, bytes.size(), {});
  ASSERT_TRUE(upload.ok()) << upload.status();
  EXPECT_EQ(engine_->Stats().node_count, before);
  ASSERT_TRUE((*upload)->Append(bytes).ok());
  EXPECT_TRUE((*upload)->Commit().ok());
  EXPECT_LT(engine_->Stats().node_count, before);
}

TEST_F(EngineProfilesTest, OneThatIsStoredTakesNoRoomAgain) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  options_.segment_bytes = std::uint64_t{4} << 20;
  Open();
  const auto bytes = TestProfile(spec_, 1, 3 << 20);
  profile_ = MustPutProfile(bytes);
  // The others take what there is.
  auto others = engine_->BeginProfile(tenant_, std::uint64_t{25} << 20, {});
  ASSERT_TRUE(others.ok()) << others.status();
  const std::uint64_t before = engine_->Stats().disk_bytes;
  EXPECT_TRUE(absl::IsResourceExhausted(
      engine_->BeginProfile(tenant_, std::uint64_t{20} << 20, {}).status()));
  EXPECT_EQ(MustPutProfile(bytes, profile_), profile_);
  EXPECT_EQ(engine_->Stats().disk_bytes, before);

  // Its name does not make other bytes the same.
  auto upload = engine_->BeginProfile(tenant_, bytes.size(), profile_);
  ASSERT_TRUE(upload.ok());
  ASSERT_TRUE((*upload)->Append(std::span(bytes).first(bytes.size() - 1)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition((*upload)->Commit().status()));

  upload = engine_->BeginProfile(tenant_, bytes.size(), profile_);
  ASSERT_TRUE(upload.ok() && (*upload)->Append(bytes).ok());
  ASSERT_TRUE(engine_->DeleteProfile(profile_).ok());
  EXPECT_TRUE(absl::IsUnavailable((*upload)->Commit().status()));
}

TEST_F(EngineProfilesTest, FramesWithoutTheirProfileAreNamedAndServedAsFrames) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  engine_.reset();
  const std::string folder = options_.data_dir + "/profiles";
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::filesystem::remove(file.path());
  }
  std::ofstream(folder + "/notes.txt") << "mine";
  Open();
  EXPECT_THAT(engine_->recovery().notes,
              testing::Contains(testing::AllOf(HasSubstr("3 frames name the profile"),
                                               HasSubstr(profile_.ToHex()))));
  EXPECT_THAT(engine_->recovery().foreign_files, testing::Contains("profiles/notes.txt"));
  ASSERT_EQ(Findings().size(), 1u);
  const auto frames = FramesAt(Path(), Quality::kHigh);
  EXPECT_TRUE(ReadBlock(*frames[0], ReadAs::kFrame).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(ReadBlock(*frames[0], ReadAs::kRaw).status()));
  EXPECT_EQ(MustPutProfile(TestProfile(spec_)), profile_);
  EXPECT_TRUE(ReadBlock(*frames[0], ReadAs::kRaw).ok());
  ExpectSound();
}

TEST_F(EngineProfilesTest, DamagedProfilesAreFoundByVerify) {
  OpenWithProfile();
  engine_.reset();
  for (const auto& file : std::filesystem::directory_iterator(options_.data_dir + "/profiles")) {
    std::fstream bytes(file.path(), std::ios::binary | std::ios::in | std::ios::out);
    bytes.seekp(1500);
    bytes.put('!');
  }
  Open();
  ASSERT_EQ(Findings().size(), 1u);
  EXPECT_EQ(engine_->Stats().damaged_profiles_total, 1u);
  EXPECT_EQ(engine_->Stats().profile_count, 0u);
  ExpectSound();
}

}  // namespace
}  // namespace kvtrie
