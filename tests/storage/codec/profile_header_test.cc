#include "storage/codec/profile_header.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "tests/golden/golden_file.h"

namespace kvtrie {
namespace {

// The head of tests/golden/v1/profile.bin.
ProfileHeader GoldenHeader() {
  ProfileHeader header;
  for (std::size_t i = 0; i < CodecKey::kBytes; ++i) {
    header.codec_key.bytes[i] = static_cast<std::uint8_t>(0xA0 + i);
  }
  header.levels = {{Quality::kNearExact, 3.5f, 0.0009765625f, 0.0078125f},
                   {Quality::kHigh, 2.25f, 0.0078125f, 0.0625f},
                   {Quality::kSmall, 1.5f, 0.03125f, 0.5f}};
  header.body_bytes = 1024 - header.header_bytes();
  std::string body(header.body_bytes, '\0');
  for (std::size_t i = 0; i < body.size(); ++i) body[i] = static_cast<char>(i * 3);
  header.body_crc32c = Crc32c(AsBytes(body));
  return header;
}

std::string Head(const ProfileHeader& header) {
  std::string bytes(header.header_bytes(), '\xaa');
  WriteProfileHeader(header, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// The head after a change to its bytes, with its checksum made right again.
absl::StatusOr<ProfileHeader> ParseChanged(const std::function<void(std::string&)>& change) {
  std::string bytes = Head(GoldenHeader());
  change(bytes);
  StoreLittle(bytes.data() + bytes.size() - 4, Crc32c(AsBytes(bytes).first(bytes.size() - 4)));
  return ParseProfileHeader(AsBytes(bytes));
}

TEST(ProfileHeaderTest, BytesAreTheGoldenOnes) {
  const std::string golden = ReadGolden("v1/profile.bin");
  const ProfileHeader header = GoldenHeader();
  EXPECT_EQ(golden.substr(0, header.header_bytes()), Head(header));
  EXPECT_EQ(golden.size(), header.profile_bytes());
  const auto parsed = ParseProfileHeader(AsBytes(golden));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, header);
  EXPECT_EQ(Crc32c(AsBytes(golden).subspan(header.header_bytes())), header.body_crc32c);
}

TEST(ProfileHeaderTest, HeadAloneIsEnoughAndMoreThanAllIsTooMuch) {
  const std::string golden = ReadGolden("v1/profile.bin");
  const std::size_t header_bytes = GoldenHeader().header_bytes();
  for (std::size_t length = 0; length <= golden.size(); ++length) {
    const auto parsed = ParseProfileHeader(AsBytes(golden).first(length));
    EXPECT_EQ(parsed.ok(), length >= header_bytes) << length;
    EXPECT_TRUE(parsed.ok() || absl::IsDataLoss(parsed.status())) << length;
  }
  EXPECT_TRUE(absl::IsDataLoss(ParseProfileHeader(AsBytes(golden + 'x')).status()));
}

TEST(ProfileHeaderTest, RefusesEveryBitFlip) {
  const std::string head = Head(GoldenHeader());
  for (std::size_t bit = 0; bit < head.size() * 8; ++bit) {
    std::string damaged = head;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    const absl::Status status = ParseProfileHeader(AsBytes(damaged)).status();
    const bool is_newer = (bit / 8 == 4 || bit / 8 == 5) && bit != 4 * 8;
    EXPECT_EQ(status.code(),
              is_newer ? absl::StatusCode::kUnimplemented : absl::StatusCode::kDataLoss)
        << bit << status;
  }
}

TEST(ProfileHeaderTest, SaysWhatIsWrong) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto set = [](std::size_t offset, auto value) {
    return [offset, value](std::string& bytes) { StoreLittle(bytes.data() + offset, value); };
  };
  const auto put_key = [](std::string& bytes) { std::memset(bytes.data() + 8, 0, 16); };
  const std::pair<const char*, std::function<void(std::string&)>> cases[] = {
      {"no magic", set(0, 'X')},
      {"no version", set(4, std::uint16_t{0})},
      {"header size", set(6, std::uint16_t{91})},
      {"no codec key", put_key},
      {"a profile has 1024 to", set(24, std::uint64_t{931})},
      {"a body of", set(24, ~std::uint64_t{0})},
      {"a profile has 1024 to", set(24, std::uint64_t{256u << 20})},
      {"0 levels", set(32, std::uint32_t{0})},
      {"9 levels", set(32, std::uint32_t{9})},
      {"level 0 has quality 0", set(36, std::uint8_t{0})},
      {"level 0 has quality 3", set(36, std::uint8_t{3})},
      {"level 0 has quality 5", set(36, std::uint8_t{5})},
      {"level 1 has the quality of another", set(36, std::uint8_t{1})},
      {"reserved", set(37, std::uint8_t{1})},
      {"reserved", set(39, std::uint8_t{1})},
      {"level 0 has 0 bits", set(40, 0.0f)},
      {"bits_per_component", set(40, kNan)},
      {"level 0 has 33 bits", set(40, 33.0f)},
      {"its quality promises", set(44, 0.0011f)},
      {"mean_kl", set(44, -1.0f)},
      {"mean_kl", set(44, kNan)},
      {"kl_p99", set(48, kInfinity)},
      {"kl_p99", set(48, -0.5f)},
      {"level 1", set(36 + 16 + 8, 0.011f)},
      {"level 2", set(36 + 32 + 8, 0.051f)},
  };
  for (const auto& [what, change] : cases) {
    const absl::Status status = ParseChanged(change).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << what << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(what));
  }
  EXPECT_TRUE(absl::IsUnimplemented(ParseChanged(set(4, std::uint16_t{2})).status()));
}

TEST(ProfileHeaderTest, ItsLimitsAreAllowed) {
  ProfileHeader header = GoldenHeader();
  header.levels[1] = {Quality::kHigh, 32.0f, 0.01f, 0.0f};
  header.body_bytes = kProfileBytesMax - header.header_bytes();
  EXPECT_LE(header.header_bytes(), kProfileHeaderBytesMax);
  EXPECT_EQ(ParseProfileHeader(AsBytes(Head(header))).value(), header);
  header.levels.resize(1);
  header.body_bytes = kProfileBytesMin - header.header_bytes();
  EXPECT_EQ(ParseProfileHeader(AsBytes(Head(header))).value(), header);
}

TEST(ProfileHeaderTest, FindsTheLevelOfAQuality) {
  const ProfileHeader header = GoldenHeader();
  EXPECT_EQ(header.FindLevel(Quality::kHigh), &header.levels[1]);
  EXPECT_EQ(header.FindLevel(Quality::kExact), nullptr);
}

TEST(ProfileHeaderDeathTest, WhatParseRefusesIsNotWritten) {
  ProfileHeader header = GoldenHeader();
  header.levels[0].mean_kl = 1;
  EXPECT_DEATH(Head(header), "CheckFields");
}

}  // namespace
}  // namespace kvtrie
