#include "storage/engine/profile_block_codec.h"

#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/codec/profile_codec.h"
#include "tests/storage/base/faulty_file_system.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::size_t kBlocks = 6;

class ProfileBlockCodecTest : public testing::Test {
 protected:
  ProfileBlockCodecTest() {
    store_ = ProfileStore::Open(files_, "profiles").value();
    codec_ = std::make_shared<const FrameCodec>(
        spec_,
        std::shared_ptr<const ResidualCodec>(CodecOfProfile(spec_, profile_id_, profile_).value()));
    for (std::size_t i = 0; i < kBlocks; ++i) {
      raw_.push_back(CutBlock(spec_, text_, static_cast<std::uint32_t>(16 * i)));
      blocks_.push_back({.first_position = static_cast<std::uint32_t>(16 * i),
                         .session_tokens = 16 * kBlocks,
                         .tokens = std::span(text_.tokens).subspan(16 * i, 16),
                         .raw = raw_.back()});
    }
    for (std::size_t i = 0; i < kBlocks; ++i) blocks_[i].raw = raw_[i];
    frames_ = codec_->Encode(blocks_, Quality::kHigh).value();
    expected_.assign(kBlocks, raw_[0]);
    EXPECT_TRUE(codec_->Decode(ToDecode(&expected_)).ok());
  }

  void PutProfile() {
    auto upload = store_->Begin(profile_.size()).value();
    ASSERT_TRUE(upload->Append(profile_).ok());
    ASSERT_TRUE(upload->Commit(profile_id_, 1).ok());
  }
  std::vector<FrameToDecode> ToDecode(std::vector<std::vector<std::byte>>* to) const {
    std::vector<FrameToDecode> frames;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      frames.push_back({FrameView::Parse(frames_[i].bytes).value(), blocks_[i].tokens, (*to)[i]});
    }
    return frames;
  }
  std::vector<absl::Status> Decode(std::vector<std::vector<std::byte>>* to) {
    to->assign(kBlocks, std::vector<std::byte>(raw_[0].size()));
    return block_codec_.Decode(spec_, ToDecode(to), *store_);
  }

  const ModelSpec spec_ = SyntheticSpec();
  const std::vector<std::byte> profile_ = ProfileBytes(PlainProfile(spec_));
  const ProfileId profile_id_ = ProfileIdOf(profile_);
  const SyntheticText text_ = MakeText(spec_, 16 * kBlocks, 3);
  std::shared_ptr<const FrameCodec> codec_;
  std::vector<std::vector<std::byte>> raw_;
  std::vector<BlockToEncode> blocks_;
  std::vector<EncodedFrame> frames_;
  std::vector<std::vector<std::byte>> expected_;
  FaultyFileSystem files_;
  std::unique_ptr<ProfileStore> store_;
  ProfileBlockCodec block_codec_{std::size_t{1} << 30};
};

TEST_F(ProfileBlockCodecTest, BlocksDecodeTogetherWithOneCodec) {
  PutProfile();
  std::vector<std::vector<std::byte>> raw;
  for (int round = 0; round < 2; ++round) {
    for (const absl::Status& status : Decode(&raw)) EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(raw == expected_);
  }
  const BlockCodecStats stats = block_codec_.Stats();
  EXPECT_EQ(stats.codecs.builds_total, 1u);
  EXPECT_EQ(stats.codecs.hits_total, 1u);
  block_codec_.Forget(profile_id_);
  EXPECT_EQ(block_codec_.Stats().codecs.codecs, 0u);
}

TEST_F(ProfileBlockCodecTest, FramesOfSeveralCodecsMayBeMixed) {
  PutProfile();
  const BlockToEncode one[] = {blocks_[1], blocks_[2]};
  const FrameCodec plain(spec_, nullptr);
  frames_[1] = plain.Encode({&one[0], 1}, Quality::kExact).value()[0];
  frames_[2] = plain.Encode({&one[1], 1}, Quality::kUnrated).value()[0];
  std::vector<std::vector<std::byte>> raw;
  for (const absl::Status& status : Decode(&raw)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(raw[0] == expected_[0]);
  EXPECT_TRUE(raw[1] == raw_[1]);
  EXPECT_TRUE(raw[5] == expected_[5]);
}

TEST_F(ProfileBlockCodecTest, ABadFrameFailsAlone) {
  PutProfile();
  const FrameView view = FrameView::Parse(frames_[3].bytes).value();
  frames_[3].bytes[view.header_bytes() + view.body_bytes() - 5] ^= std::byte{0x40};
  std::vector<std::vector<std::byte>> raw;
  const auto statuses = Decode(&raw);
  for (std::size_t i = 0; i < kBlocks; ++i) {
    if (i == 3) {
      EXPECT_TRUE(absl::IsDataLoss(statuses[i])) << statuses[i];
    } else {
      EXPECT_TRUE(statuses[i].ok()) << statuses[i];
      EXPECT_TRUE(raw[i] == expected_[i]);
    }
  }
}

TEST_F(ProfileBlockCodecTest, AMissingProfileIsNamedAndLookedForAgain) {
  std::vector<std::vector<std::byte>> raw;
  for (const absl::Status& status : Decode(&raw)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(profile_id_.ToHex()), HasSubstr("PutProfile")));
  }
  EXPECT_EQ(block_codec_.Stats().missing_profiles_total, kBlocks);
  PutProfile();
  for (const absl::Status& status : Decode(&raw)) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ProfileBlockCodecTest, AProfileForAnotherModelIsNotUsed) {
  PutProfile();
  ModelSpec other = spec_;
  other.weights_revision = "2";
  std::vector<std::vector<std::byte>> raw(kBlocks, raw_[0]);
  for (const absl::Status& status : block_codec_.Decode(other, ToDecode(&raw), *store_)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(profile_id_.ToHex()), HasSubstr("another model")));
  }
  EXPECT_EQ(block_codec_.Stats().unusable_profiles_total, kBlocks);
  // Blocks of another size.
  std::vector<FrameToDecode> frames = ToDecode(&raw);
  for (const absl::Status& status : block_codec_.Decode(WithBlocks(spec_, 8), frames, *store_)) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  }
}

}  // namespace
}  // namespace kvtrie
