#include "storage/codec/profile_codec.h"

#include <algorithm>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

using testing::HasSubstr;

class ProfileCodecTest : public testing::Test {
 protected:
  absl::Status Open(const ModelSpec& spec, std::span<const std::byte> bytes) const {
    const ProfileId id = ProfileIdOf(bytes);
    const auto codec = CodecOfProfile(spec, id, bytes);
    if (codec.ok()) {
      EXPECT_EQ((*codec)->id(), id);
    } else {
      EXPECT_THAT(std::string(codec.status().message()), HasSubstr(id.ToHex()));
    }
    return codec.status();
  }
  // The bytes with another head.
  std::vector<std::byte> WithHeader(const std::function<void(ProfileHeader*)>& change) const {
    ProfileHeader header = ParseProfileHeader(bytes_).value();
    const auto body = std::span(bytes_).subspan(header.header_bytes());
    change(&header);
    std::vector<std::byte> changed(header.header_bytes());
    WriteProfileHeader(header, changed);
    changed.insert(changed.end(), body.begin(), body.end());
    return changed;
  }

  const ModelSpec spec_ = SyntheticSpec();
  const std::vector<std::byte> bytes_ = ProfileBytes(PlainProfile(spec_));
};

TEST_F(ProfileCodecTest, OneThatAgreesWithItsModelIsACodecWithItsLevels) {
  const auto codec = CodecOfProfile(spec_, ProfileIdOf(bytes_), bytes_);
  ASSERT_TRUE(codec.ok()) << codec.status();
  EXPECT_TRUE((*codec)->HasLevel(Quality::kHigh));
  EXPECT_TRUE((*codec)->HasLevel(Quality::kSmall));
  EXPECT_FALSE((*codec)->HasLevel(Quality::kNearExact));
  // Other ways to cut and to store the same KV.
  ModelSpec other = WithBlocks(spec_, 32);
  other.dtype = DType::kBfloat16;
  EXPECT_TRUE(Open(other, bytes_).ok());
}

TEST_F(ProfileCodecTest, WhatDoesNotAgreeIsRefused) {
  ModelSpec other = spec_;
  other.weights_revision = "2";
  EXPECT_TRUE(absl::IsInvalidArgument(Open(other, bytes_)));
  other = spec_;
  other.layout_tag = "own";
  EXPECT_TRUE(absl::IsInvalidArgument(Open(other, bytes_)));

  EXPECT_TRUE(absl::IsInvalidArgument(
      Open(spec_, WithHeader([](ProfileHeader* header) { header->levels.pop_back(); }))));
  EXPECT_TRUE(absl::IsInvalidArgument(Open(spec_, WithHeader([](ProfileHeader* header) {
                                             std::swap(header->levels[0], header->levels[1]);
                                           }))));
  EXPECT_TRUE(absl::IsInvalidArgument(Open(spec_, WithHeader([](ProfileHeader* header) {
                                             header->levels[0].quality = Quality::kNearExact;
                                             header->levels[0].mean_kl = 0;
                                           }))));
  // Of a model with the codec key of this one, and other layers.
  ResidualProfile layers = PlainProfile(SyntheticSpec({{3, 2, 8, 8}}));
  layers.codec_key = spec_.CodecKey();
  EXPECT_TRUE(absl::IsInvalidArgument(Open(spec_, ProfileBytes(layers))));
}

TEST_F(ProfileCodecTest, DamageIsFound) {
  std::vector<std::byte> damaged = bytes_;
  damaged[damaged.size() / 2] ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(Open(spec_, damaged)));
  EXPECT_TRUE(absl::IsDataLoss(Open(spec_, std::span(bytes_).first(bytes_.size() - 1))));
  EXPECT_TRUE(absl::IsDataLoss(Open(spec_, std::span(bytes_).first(10))));
  EXPECT_TRUE(absl::IsDataLoss(Open(spec_, {})));
  // Intact, but no body of a profile.
  std::vector<std::byte> body(2000, std::byte{0x11});
  ProfileHeader header = ParseProfileHeader(bytes_).value();
  header.body_bytes = body.size();
  header.body_crc32c = Crc32c(body);
  std::vector<std::byte> bytes(header.header_bytes());
  WriteProfileHeader(header, bytes);
  bytes.insert(bytes.end(), body.begin(), body.end());
  EXPECT_TRUE(absl::IsDataLoss(Open(spec_, bytes)));
}

}  // namespace
}  // namespace kvtrie
