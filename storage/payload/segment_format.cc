#include "storage/payload/segment_format.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kRecordMagic = 0x5250564b;   // "KVPR"
constexpr std::uint32_t kSegmentMagic = 0x4753564b;  // "KVSG"

// Record and segment header begin alike in every version:
//   0 magic u32 | 4 crc32c u32 of all that follows in the head | 8 version u16
constexpr std::size_t kCrcOffset = 4;
constexpr std::size_t kVersionOffset = 8;
// The checksum covers what lies behind it.
constexpr std::size_t kCoveredOffset = 8;

// Record: 10 zero u16 | 12 payload_crc32c u32 | 16 store_id u64 | 24 segment u32 |
//         28 offset_units u32 (version 1: offset_pages) |
//         32 descriptor_bytes u32 | 36 payload_bytes u32 | 40 zeros | 64 descriptor
constexpr std::size_t kPayloadCrcOffset = 12;
constexpr std::size_t kStoreIdOffset = 16;
constexpr std::size_t kSegmentOffset = 24;
constexpr std::size_t kOffsetOffset = 28;
constexpr std::size_t kDescriptorBytesOffset = 32;
constexpr std::size_t kPayloadBytesOffset = 36;
constexpr std::size_t kRecordFieldsEnd = 40;

// Segment header: 10 zeros | 16 store_id u64 | 24 segment u32 | 28 zeros up to 64
constexpr std::size_t kSegmentFieldsEnd = 28;
constexpr std::size_t kSegmentHeaderBytes = 64;

constexpr std::size_t kPayloadAlignment = 64;

// Counts a record's place in pages.
constexpr std::uint16_t kPagesVersion = 1;
constexpr std::uint64_t kUnitsPerPage = PayloadLocation::kUnitsPerPage;

void Seal(std::span<std::byte> head, std::uint32_t magic) {
  StoreLittle(head.data(), magic);
  StoreLittle(head.data() + kVersionOffset, kSegmentFormatVersion);
  StoreLittle(head.data() + kCrcOffset, Crc32c(head.subspan(kCoveredOffset)));
}

bool ChecksumHolds(std::span<const std::byte> head) {
  return LoadLittle<std::uint32_t>(head.data() + kCrcOffset) ==
         Crc32c(head.subspan(kCoveredOffset));
}

bool AllZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{}; });
}

}  // namespace

std::size_t PayloadOffset(std::size_t descriptor_bytes) {
  const std::size_t end = PayloadRecord::kHeaderBytes + descriptor_bytes;
  return (end + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

std::size_t RecordHeader::payload_offset() const { return PayloadOffset(descriptor_bytes); }

void WriteRecordHeader(const RecordHeader& header, std::span<std::byte> head) {
  KV_CHECK(head.size() == header.payload_offset());
  KV_CHECK(header.version == kSegmentFormatVersion);
  std::fill_n(head.begin(), PayloadRecord::kHeaderBytes, std::byte{});
  StoreLittle(head.data() + kPayloadCrcOffset, header.payload_crc32c);
  StoreLittle(head.data() + kStoreIdOffset, header.store_id);
  StoreLittle(head.data() + kSegmentOffset, header.segment);
  StoreLittle(head.data() + kOffsetOffset, header.offset_units);
  StoreLittle(head.data() + kDescriptorBytesOffset, header.descriptor_bytes);
  StoreLittle(head.data() + kPayloadBytesOffset, header.payload_bytes);
  Seal(head, kRecordMagic);
}

std::size_t RecordHeadBytes(std::span<const std::byte> bytes) {
  KV_CHECK(bytes.size() >= PayloadRecord::kHeaderBytes);
  const auto descriptor_bytes = LoadLittle<std::uint32_t>(bytes.data() + kDescriptorBytesOffset);
  if (LoadLittle<std::uint32_t>(bytes.data()) != kRecordMagic ||
      descriptor_bytes > PayloadRecord::kDescriptorBytesMax) {
    return 0;
  }
  return PayloadOffset(descriptor_bytes);
}

absl::StatusOr<RecordHeader> ParseRecordHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < PayloadRecord::kHeaderBytes) return absl::DataLossError("record is cut short");
  const std::size_t head_bytes = RecordHeadBytes(bytes);
  if (head_bytes == 0) return absl::DataLossError("no record starts here");
  if (bytes.size() < head_bytes) return absl::DataLossError("record is cut short");
  const auto head = bytes.first(head_bytes);
  if (!ChecksumHolds(head)) return absl::DataLossError("record header fails its checksum");

  RecordHeader header;
  header.payload_crc32c = LoadLittle<std::uint32_t>(head.data() + kPayloadCrcOffset);
  header.store_id = LoadLittle<std::uint64_t>(head.data() + kStoreIdOffset);
  header.segment = LoadLittle<std::uint32_t>(head.data() + kSegmentOffset);
  std::uint64_t offset_units = LoadLittle<std::uint32_t>(head.data() + kOffsetOffset);
  header.descriptor_bytes = LoadLittle<std::uint32_t>(head.data() + kDescriptorBytesOffset);
  header.payload_bytes = LoadLittle<std::uint32_t>(head.data() + kPayloadBytesOffset);

  header.version = LoadLittle<std::uint16_t>(head.data() + kVersionOffset);
  const auto unused =
      head.subspan(kRecordFieldsEnd, PayloadRecord::kHeaderBytes - kRecordFieldsEnd);
  if (header.version == kPagesVersion) {
    offset_units *= kUnitsPerPage;
  } else if (header.version != kSegmentFormatVersion) {
    return absl::DataLossError(absl::StrCat("record has version ", header.version));
  }
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint32_t>::max();
  if (header.segment == 0 || offset_units < kUnitsPerPage || offset_units > kMax ||
      header.payload_bytes == 0 || header.record_bytes() > kMax || !AllZero(unused) ||
      !AllZero(head.subspan(kVersionOffset + sizeof header.version,
                            kPayloadCrcOffset - kVersionOffset - sizeof header.version))) {
    return absl::DataLossError("record header holds a field that no writer writes");
  }
  header.offset_units = static_cast<std::uint32_t>(offset_units);
  return header;
}

void WriteSegmentHeader(const SegmentHeader& header, std::span<std::byte> page) {
  KV_CHECK(page.size() == PayloadLocation::kPageBytes);
  std::fill(page.begin(), page.end(), std::byte{});
  StoreLittle(page.data() + kStoreIdOffset, header.store_id);
  StoreLittle(page.data() + kSegmentOffset, header.segment);
  Seal(page.first(kSegmentHeaderBytes), kSegmentMagic);
}

absl::StatusOr<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < kSegmentHeaderBytes) {
    return absl::DataLossError("segment header is cut short");
  }
  const auto head = bytes.first(kSegmentHeaderBytes);
  if (LoadLittle<std::uint32_t>(head.data()) != kSegmentMagic) {
    return absl::DataLossError("no segment header");
  }
  if (!ChecksumHolds(head)) return absl::DataLossError("segment header fails its checksum");
  const auto version = LoadLittle<std::uint16_t>(head.data() + kVersionOffset);
  if (version > kSegmentFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("segment format ", version, " is newer than ", kSegmentFormatVersion));
  }
  if (version == 0 ||
      !AllZero(head.subspan(kVersionOffset + sizeof version,
                            kStoreIdOffset - kVersionOffset - sizeof version)) ||
      !AllZero(head.subspan(kSegmentFieldsEnd))) {
    return absl::DataLossError("segment header holds a field that no writer writes");
  }
  return SegmentHeader{LoadLittle<std::uint64_t>(head.data() + kStoreIdOffset),
                       LoadLittle<std::uint32_t>(head.data() + kSegmentOffset)};
}

}  // namespace kvtrie
