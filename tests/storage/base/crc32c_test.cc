#include "storage/base/crc32c.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "storage/base/byte_reader.h"

namespace kvtrie {
namespace {

std::vector<std::byte> Bytes(std::size_t count, int first, int step) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(first + step * static_cast<int>(i));
  }
  return bytes;
}

// Bit by bit, as the polynomial says.
std::uint32_t ReferenceCrc32c(std::span<const std::byte> bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

// RFC 3720, appendix B.4.
TEST(Crc32cTest, GivesTheVectorsOfRfc3720) {
  EXPECT_EQ(Crc32c(Bytes(32, 0, 0)), 0x8a9136aau);
  EXPECT_EQ(Crc32c(Bytes(32, 0xff, 0)), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(Bytes(32, 0, 1)), 0x46dd794eu);
  EXPECT_EQ(Crc32c(Bytes(32, 31, -1)), 0x113fdb5cu);
  std::vector<std::byte> read_command(48);
  read_command[0] = std::byte{0x01};
  read_command[1] = std::byte{0xc0};
  read_command[16] = std::byte{0x14};
  read_command[22] = std::byte{0x04};
  read_command[27] = std::byte{0x14};
  read_command[31] = std::byte{0x18};
  read_command[32] = std::byte{0x28};
  read_command[40] = std::byte{0x02};
  EXPECT_EQ(Crc32c(read_command), 0xd9963a56u);
}

TEST(Crc32cTest, JoinedPiecesAgreeWithTheWhole) {
  std::mt19937 random(2);
  std::vector<std::byte> bytes(300'000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 200; ++round) {
    const auto whole = std::span(bytes).first(random() % bytes.size());
    const std::size_t cut = whole.empty() ? 0 : random() % (whole.size() + 1);
    const auto second = whole.subspan(cut);
    EXPECT_EQ(JoinCrc32c(Crc32c(whole.first(cut)), Crc32c(second), Crc32cShift(second.size())),
              Crc32c(whole))
        << cut << " of " << whole.size();
  }
}

TEST(Crc32cTest, EmptyIsZero) { EXPECT_EQ(Crc32c({}), 0u); }

TEST(Crc32cTest, EveryLengthAgreesWithTheDefinition) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(3000);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t length = 0; length < 1100; ++length) {
    const auto piece = std::span(bytes).subspan(length % 17, length);
    ASSERT_EQ(Crc32c(piece), ReferenceCrc32c(piece)) << length;
  }
}

TEST(Crc32cTest, ContinuesWhatItHas) {
  const auto bytes = Bytes(1000, 3, 7);
  for (std::size_t cut : {0u, 1u, 64u, 500u, 1000u}) {
    const std::uint32_t first = Crc32c(std::span(bytes).first(cut));
    EXPECT_EQ(Crc32c(std::span(bytes).subspan(cut), first), Crc32c(bytes)) << cut;
  }
}

TEST(Crc32cTest, CopyingGivesTheSameSum) {
  for (const std::size_t length : {0u, 1u, 16'383u, 16'384u, 16'385u, 100'000u}) {
    const auto bytes = Bytes(length, 1, 5);
    std::vector<std::byte> copy(length);
    EXPECT_EQ(CopyAndCrc32c(bytes, copy.data(), 9), Crc32c(bytes, 9)) << length;
    EXPECT_EQ(copy, bytes);
  }
}

}  // namespace
}  // namespace kvtrie
