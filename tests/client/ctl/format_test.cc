#include "client/ctl/format.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

TEST(FormatTest, Bytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(std::uint64_t{5} << 40), "5.0 TiB");
  EXPECT_EQ(FormatBytes(~std::uint64_t{0}), "16.0 EiB");
}

TEST(FormatTest, Counts) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
}

TEST(FormatTest, BitsAreWholeOnes) {
  EXPECT_EQ(FormatBits(0.4), "0");
  EXPECT_EQ(FormatBits(1234.6), "1,235");
}

TEST(FormatTest, Durations) {
  EXPECT_EQ(FormatDuration(59), "59s");
  EXPECT_EQ(FormatDuration(61), "1m 1s");
  EXPECT_EQ(FormatDuration(3 * 3600 + 120), "3h 2m");
  EXPECT_EQ(FormatDuration(50 * 3600), "2d 2h");
}

TEST(FormatTest, Times) {
  EXPECT_EQ(FormatTime(0), "-");
  EXPECT_EQ(FormatTime(1769860800), "2026-01-31 12:00:00");
}

TEST(FormatTest, IdsAreExactly32HexadecimalDigits) {
  const std::string id(
      "\x00\x01\xab\xff"
      "0123456789ab",
      16);
  EXPECT_EQ(IdFromHex(IdToHex(id)), id);
  EXPECT_EQ(IdFromHex("0001ABFF303132333435363738396162"), id);
  EXPECT_FALSE(IdFromHex("").has_value());
  EXPECT_FALSE(IdFromHex("0001abff30313233343536373839616").has_value());
  EXPECT_FALSE(IdFromHex("0001abff303132333435363738396162aa").has_value());
  EXPECT_FALSE(IdFromHex("0001abff3031323334353637383961zz").has_value());
}

TEST(FormatTest, NamesOfOthersCannotSteerATerminal) {
  EXPECT_EQ(FormatText("a\x1b[2Jb\n"), "a?[2Jb?");
  EXPECT_EQ(FormatText("grün"), "grün");
}

}  // namespace
}  // namespace kvtrie
