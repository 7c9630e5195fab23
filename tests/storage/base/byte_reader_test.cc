#include "storage/base/byte_reader.h"

#include <gtest/gtest.h>

#include <string>

#include "storage/base/byte_order.h"

namespace kvtrie {
namespace {

TEST(ByteReaderTest, ReadsWhatTheWriterWrote) {
  ByteWriter writer;
  writer.Write(std::uint8_t{7});
  writer.Write(std::uint64_t{0x0102030405060708});
  writer.WriteText("text");
  writer.Write(std::int32_t{-5});

  ByteReader reader(writer.text());
  EXPECT_EQ(reader.Read<std::uint8_t>(), 7);
  EXPECT_EQ(reader.Read<std::uint64_t>(), 0x0102030405060708u);
  EXPECT_EQ(reader.ReadText(4), "text");
  EXPECT_FALSE(reader.Done());
  EXPECT_EQ(reader.remaining_bytes(), 4u);
  EXPECT_EQ(reader.Read<std::int32_t>(), -5);
  EXPECT_TRUE(reader.Done());
}

TEST(ByteReaderTest, IntegersAreLittleEndian) {
  ByteWriter writer;
  writer.Write(std::uint32_t{0x01020304});
  EXPECT_EQ(writer.Take(), std::string("\x04\x03\x02\x01"));
}

TEST(ByteReaderTest, AfterTheEndEverythingIsZeroAndNotOk) {
  ByteReader reader(std::string_view("abc"));
  EXPECT_EQ(reader.Read<std::uint32_t>(), 0u);
  EXPECT_FALSE(reader.ok());
  // The three bytes are not offered to a later, smaller read either.
  EXPECT_EQ(reader.Read<std::uint8_t>(), 0u);
  EXPECT_TRUE(reader.ReadBytes(1).empty());
  EXPECT_EQ(reader.remaining_bytes(), 0u);
  EXPECT_FALSE(reader.Done());
}

TEST(ByteReaderTest, HugeLengthIsRefused) {
  ByteReader reader(std::string_view("abc"));
  EXPECT_TRUE(reader.ReadBytes(~std::size_t{0}).empty());
  EXPECT_FALSE(reader.ok());
}

TEST(ByteReaderTest, NothingToReadIsDone) {
  ByteReader reader(std::string_view{});
  EXPECT_TRUE(reader.Done());
  EXPECT_TRUE(reader.ReadBytes(0).empty());
  EXPECT_TRUE(reader.Done());
}

TEST(ByteOrderTest, BigEndianOrderIsNumericOrder) {
  std::string low(8, '\0');
  std::string high(8, '\0');
  StoreBig64(low.data(), 0x00ff);
  StoreBig64(high.data(), 0x0100);
  EXPECT_LT(low, high);
  EXPECT_EQ(LoadBig64(high.data()), 0x0100u);
  StoreBig32(low.data(), 0x01020304);
  EXPECT_EQ(low.substr(0, 4), std::string("\x01\x02\x03\x04"));
  EXPECT_EQ(LoadBig32(low.data()), 0x01020304u);
}

}  // namespace
}  // namespace kvtrie
