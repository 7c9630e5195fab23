#include "storage/payload/segment_format.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "tests/storage/payload/payload_test_support.h"

namespace kvtrie {
namespace {

constexpr std::size_t kPage = PayloadLocation::kPageBytes;
const std::filesystem::path kGolden = KV_GOLDEN_FOLDER;

std::string Contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// What make_record.py of tests/golden/v1 and v2 writes.
constexpr std::uint64_t kGoldenStoreId = 0x0123456789abcdef;
constexpr std::uint32_t kGoldenSegment = 7;
std::string GoldenPayload() {
  std::string payload(1000, '\0');
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 7 + 3);
  return payload;
}

std::string SecondGoldenPayload() {
  std::string payload(3000, '\0');
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 5 + 1);
  return payload;
}

RecordHeader GoldenHeader() {
  RecordHeader header;
  header.store_id = kGoldenStoreId;
  header.segment = kGoldenSegment;
  header.offset_units = 8;
  header.descriptor_bytes = 17;
  header.payload_bytes = 1000;
  header.payload_crc32c = Crc32c(AsBytes(GoldenPayload()));
  return header;
}

TEST(SegmentFormatTest, WritesTheGoldenBytes) {
  std::string page(kPage, '\0');
  const auto bytes = std::as_writable_bytes(std::span(page));
  WriteSegmentHeader({kGoldenStoreId, kGoldenSegment}, bytes);
  PayloadRecord first = MakeRecord(GoldenPayload(), "golden descriptor");
  WriteRecordHeader(GoldenHeader(), first.memory().first(first.payload_offset()));
  page += AsText(first.memory().first(GoldenHeader().location().disk_bytes()));
  PayloadRecord second = MakeRecord(SecondGoldenPayload(), "second");
  RecordHeader header = GoldenHeader();
  header.offset_units = static_cast<std::uint32_t>(page.size() / PayloadLocation::kUnitBytes);
  header.descriptor_bytes = 6;
  header.payload_bytes = 3000;
  header.payload_crc32c = Crc32c(AsBytes(SecondGoldenPayload()));
  WriteRecordHeader(header, second.memory().first(second.payload_offset()));
  page += AsText(second.memory().first(header.location().disk_bytes()));
  page.resize((page.size() + kPage - 1) / kPage * kPage);
  EXPECT_EQ(page, Contents(kGolden / "v2/record.bin"));
}

TEST(SegmentFormatTest, ReadsTheGoldenBytesOfBothVersions) {
  for (const std::string version : {"v1", "v2"}) {
    SCOPED_TRACE(version);
    const std::string file = Contents(kGolden / version / "record.bin");
    const auto segment = ParseSegmentHeader(AsBytes(file));
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_EQ(segment->store_id, kGoldenStoreId);
    EXPECT_EQ(segment->segment, kGoldenSegment);

    const auto bytes = AsBytes(file).subspan(kPage);
    const auto record = ParseRecordHeader(bytes);
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_EQ(record->version, version == "v1" ? 1 : 2);
    EXPECT_EQ(record->location(), GoldenHeader().location());
    EXPECT_EQ(record->store_id, kGoldenStoreId);
    EXPECT_EQ(record->payload_offset(), 128u);
    EXPECT_EQ(AsText(bytes.subspan(64, record->descriptor_bytes)), "golden descriptor");
    EXPECT_EQ(AsText(bytes.subspan(128, record->payload_bytes)), GoldenPayload());
    EXPECT_EQ(record->payload_crc32c, Crc32c(AsBytes(GoldenPayload())));
  }
}

TEST(SegmentFormatTest, RefusesTheCorruptRecords) {
  int seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden / "corrupt")) {
    if (!entry.path().filename().string().starts_with("record_")) continue;
    ++seen;
    const std::string file = Contents(entry.path());
    EXPECT_TRUE(absl::IsDataLoss(ParseRecordHeader(AsBytes(file)).status())) << entry.path();
  }
  EXPECT_GE(seen, 14);
}

TEST(SegmentFormatTest, EveryFlippedBitOfARecordHeadIsSeen) {
  const std::string file = Contents(kGolden / "v2/record.bin").substr(kPage);
  for (std::size_t bit = 0; bit < 8 * GoldenHeader().payload_offset(); ++bit) {
    std::string damaged = file;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(ParseRecordHeader(AsBytes(damaged)).status())) << bit;
  }
}

TEST(SegmentFormatTest, EveryFlippedBitOfASegmentHeaderIsSeen) {
  const std::string file = Contents(kGolden / "v2/record.bin").substr(0, kPage);
  for (std::size_t bit = 0; bit < std::size_t{8} * 64; ++bit) {
    std::string damaged = file;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(ParseSegmentHeader(AsBytes(damaged)).status())) << bit;
  }
}

TEST(SegmentFormatTest, NewerSegmentVersionIsAPreconditionOfTheOperator) {
  std::string page = Contents(kGolden / "v2/record.bin").substr(0, kPage);
  page[8] = 3;
  StoreLittle(page.data() + 4, Crc32c(AsBytes(page).subspan(8, 56)));
  EXPECT_TRUE(absl::IsFailedPrecondition(ParseSegmentHeader(AsBytes(page)).status()));
}

TEST(SegmentFormatTest, HeadMayBeReadBeforeTheRest) {
  const std::string descriptor(10'000, 'd');
  PayloadRecord record = MakeRecord("payload", descriptor);
  RecordHeader header = GoldenHeader();
  header.descriptor_bytes = static_cast<std::uint32_t>(descriptor.size());
  const auto head = record.memory().first(record.payload_offset());
  WriteRecordHeader(header, head);
  EXPECT_EQ(RecordHeadBytes(head.first(64)), head.size());
  EXPECT_TRUE(absl::IsDataLoss(ParseRecordHeader(head.first(head.size() - 1)).status()));
  EXPECT_TRUE(ParseRecordHeader(head).ok());
}

}  // namespace
}  // namespace kvtrie
