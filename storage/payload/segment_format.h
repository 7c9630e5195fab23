#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

// The bytes of segment files and of the STORE file (SEGMENTS.md beside this file).

// What is written. Version 1, which counts places in pages, is read too.
inline constexpr std::uint16_t kSegmentFormatVersion = 2;

// What a record says about itself: enough to tell it from a stale copy, a misdirected read or a
// record of another store.
struct RecordHeader {
  std::uint16_t version = kSegmentFormatVersion;
  std::uint64_t store_id = 0;
  std::uint32_t segment = 0;
  std::uint32_t offset_units = 0;
  std::uint32_t descriptor_bytes = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t payload_crc32c = 0;

  // From the start of the record.
  std::size_t payload_offset() const;
  std::uint64_t record_bytes() const { return payload_offset() + std::uint64_t{payload_bytes}; }
  PayloadLocation location() const {
    return {segment, offset_units, static_cast<std::uint32_t>(record_bytes())};
  }
};

// Where the payload of a record with such a descriptor starts.
std::size_t PayloadOffset(std::size_t descriptor_bytes);

// Writes the header in front of a descriptor that is there already.
// REQUIRES: `head` has PayloadOffset(header.descriptor_bytes) bytes; those behind the descriptor
// are zero. The version is the one that is written.
void WriteRecordHeader(const RecordHeader& header, std::span<std::byte> head);

// How many bytes ParseRecordHeader needs to see, or 0 when no record starts here.
// REQUIRES: at least PayloadRecord::kHeaderBytes.
std::size_t RecordHeadBytes(std::span<const std::byte> bytes);

// Checks all in front of the payload; `bytes` starts with the record and may end anywhere behind
// its head. DataLoss: there is no intact record head.
absl::StatusOr<RecordHeader> ParseRecordHeader(std::span<const std::byte> bytes);

// The first page of a segment file, or (with segment 0) all of the STORE file.
struct SegmentHeader {
  std::uint64_t store_id = 0;
  std::uint32_t segment = 0;
};

// REQUIRES: `page` has PayloadLocation::kPageBytes bytes.
void WriteSegmentHeader(const SegmentHeader& header, std::span<std::byte> page);

// DataLoss: not an intact header. FailedPrecondition: written by a newer version.
absl::StatusOr<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> bytes);

}  // namespace kvtrie
