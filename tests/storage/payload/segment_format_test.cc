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

// What tests/golden/v1/make_record.py writes.
constexpr std::uint64_t kGoldenStoreId = 0x0123456789abcdef;
constexpr std::uint32_t kGoldenSegment = 7;
std::string GoldenPayload() {
  std::string payload(1000, '\0');
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 7 + 3);
  return payload;
}

RecordHeader GoldenHeader() {
  RecordHeader header;
  header.store_id = kGoldenStoreId;
  header.segment = kGoldenSegment;
  header.offset_pages = 1;
  header.descriptor_bytes = 17;
  header.payload_bytes = 1000;
  header.payload_crc32c = Crc32c(AsBytes(GoldenPayload()));
  return header;
}

TEST(SegmentFormatTest, WritesTheGoldenBytes) {
  std::string page(kPage, '\0');
  const auto bytes = std::as_writable_bytes(std::span(page));
  WriteSegmentHeader({kGoldenStoreId, kGoldenSegment}, bytes);
  PayloadRecord record = MakeRecord(GoldenPayload(), "golden descriptor");
  WriteRecordHeader(GoldenHeader(), record.memory().first(record.payload_offset()));
  page += AsText(record.memory());
  EXPECT_EQ(page, Contents(kGolden / "v1/record.bin"));
}

TEST(SegmentFormatTest, ReadsTheGoldenBytes) {
  const std::string file = Contents(kGolden / "v1/record.bin");
  ASSERT_EQ(file.size(), 2 * kPage);
  const auto segment = ParseSegmentHeader(AsBytes(file));
  ASSERT_TRUE(segment.ok()) << segment.status();
  EXPECT_EQ(segment->store_id, kGoldenStoreId);
  EXPECT_EQ(segment->segment, kGoldenSegment);

  const auto bytes = AsBytes(file).subspan(kPage);
  const auto record = ParseRecordHeader(bytes);
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->location(), GoldenHeader().location());
  EXPECT_EQ(record->store_id, kGoldenStoreId);
  EXPECT_EQ(record->payload_offset(), 128u);
  EXPECT_EQ(AsText(bytes.subspan(64, record->descriptor_bytes)), "golden descriptor");
  EXPECT_EQ(AsText(bytes.subspan(128, record->payload_bytes)), GoldenPayload());
  EXPECT_EQ(record->payload_crc32c, Crc32c(AsBytes(GoldenPayload())));
}

TEST(SegmentFormatTest, RefusesTheCorruptRecords) {
  int seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden / "corrupt")) {
    if (!entry.path().filename().string().starts_with("record_")) continue;
    ++seen;
    const std::string file = Contents(entry.path());
    EXPECT_TRUE(absl::IsDataLoss(ParseRecordHeader(AsBytes(file)).status())) << entry.path();
  }
  EXPECT_GE(seen, 11);
}

TEST(SegmentFormatTest, EveryFlippedBitOfARecordHeadIsSeen) {
  const std::string file = Contents(kGolden / "v1/record.bin").substr(kPage);
  for (std::size_t bit = 0; bit < 8 * GoldenHeader().payload_offset(); ++bit) {
    std::string damaged = file;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(ParseRecordHeader(AsBytes(damaged)).status())) << bit;
  }
}

TEST(SegmentFormatTest, EveryFlippedBitOfASegmentHeaderIsSeen) {
  const std::string file = Contents(kGolden / "v1/record.bin").substr(0, kPage);
  for (std::size_t bit = 0; bit < std::size_t{8} * 64; ++bit) {
    std::string damaged = file;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(ParseSegmentHeader(AsBytes(damaged)).status())) << bit;
  }
}

TEST(SegmentFormatTest, NewerSegmentVersionIsAPreconditionOfTheOperator) {
  std::string page = Contents(kGolden / "v1/record.bin").substr(0, kPage);
  page[8] = 2;
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
