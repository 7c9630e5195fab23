#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/shared_bytes.h"

namespace kvtrie {

// Where a record lies. Opaque outside the store that gave it; stored in node rows.
struct PayloadLocation {
  std::uint32_t segment = 0;       // 0 = no location
  std::uint32_t offset_units = 0;  // in units of kUnitBytes
  std::uint32_t record_bytes = 0;  // header, descriptor and payload, before rounding up to units

  // Records start on units. What is written at once starts and ends on pages, and so does what is
  // given back.
  static constexpr std::size_t kUnitBytes = 512;
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr std::uint64_t kUnitsPerPage = kPageBytes / kUnitBytes;

  explicit operator bool() const { return segment != 0; }
  auto operator<=>(const PayloadLocation&) const = default;
  // Bytes that the record takes on disk: whole units.
  std::uint64_t disk_bytes() const { return DiskBytes(record_bytes); }
  static std::uint64_t DiskBytes(std::uint64_t record_bytes) {
    return (record_bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  }

  template <typename H>
  friend H AbslHashValue(H hash, const PayloadLocation& at) {
    return H::combine(std::move(hash), at.segment, at.offset_units, at.record_bytes);
  }
};

// A record under construction: aligned memory with room for the store's header in front, so that
// the payload is written (and later served from memory) where the caller has put it, without a
// copy.
class PayloadRecord {
 public:
  // Bytes in front of the descriptor that belong to the store.
  static constexpr std::size_t kHeaderBytes = 64;
  static constexpr std::size_t kDescriptorBytesMax = std::size_t{16} << 10;

  // `descriptor` says what the payload is, in the caller's format; Scan hands it back when the
  // metadata is lost. REQUIRES: descriptor.size() <= kDescriptorBytesMax, payload_bytes >= 1,
  // record below 4 GiB.
  PayloadRecord(std::string_view descriptor, std::size_t payload_bytes);

  // Aligned to 64 bytes.
  std::span<std::byte> payload();
  std::span<const std::byte> descriptor() const;
  // Puts another descriptor in its place. REQUIRES: one of as many bytes.
  void ReplaceDescriptor(std::string_view descriptor);
  // Spares Append a pass over the payload when the caller has its CRC-32C from copying it here. A
  // wrong one makes the record unreadable (DataLoss).
  void SetPayloadCrc32c(std::uint32_t crc) { payload_crc32c_ = crc; }
  std::optional<std::uint32_t> payload_crc32c() const { return payload_crc32c_; }

  std::size_t record_bytes() const { return payload_offset_ + payload_bytes_; }
  std::size_t payload_offset() const { return payload_offset_; }

  // For stores: the whole memory, rounded up to pages; what lies behind the record is zero.
  std::span<std::byte> memory();

  // The payload as shared bytes; the record gives its memory up.
  SharedBytes TakePayload() &&;

 private:
  std::shared_ptr<AlignedBuffer> buffer_;
  std::size_t descriptor_bytes_;
  std::size_t payload_offset_;
  std::size_t payload_bytes_;
  std::optional<std::uint32_t> payload_crc32c_;
};

// Bytes that a group of records takes on disk: units behind each other, up to a page.
std::uint64_t GroupDiskBytes(std::span<PayloadRecord* const> records);

struct PayloadUsage {
  std::uint64_t disk_bytes = 0;  // what the file system has allocated for the store's files
  std::uint64_t live_bytes = 0;  // records that were not freed, rounded up to units
  std::uint64_t segment_count = 0;
};

struct PayloadRecoveryStats {
  std::uint64_t unreferenced_bytes = 0;  // found and freed
  std::vector<std::string> foreign_files;
  std::vector<std::string> notes;  // damaged segment headers and the like
};

// The payload of a record as it was read, with the descriptor that stands before it in the same
// memory: so the reader can see that the record is the one that it meant.
struct StoredPayload : SharedBytes {
  std::span<const std::byte> descriptor;
};

// Keeps immutable records. A record is written once, read often, freed once.
//
// Opening: call MarkLive for every location that the metadata names, then FinishRecovery, which
// frees all else; only then Append. (To rebuild the metadata: Scan first.)
//
// Thread-safe after FinishRecovery; calls block on the disk, so give them threads of their own.
class PayloadStore {
 public:
  virtual ~PayloadStore() = default;

  // Errors: NotFound when the location lies outside of what exists, DataLoss when it overlaps one
  // that was marked before. Then it is not live.
  virtual absl::Status MarkLive(const PayloadLocation& at) = 0;
  virtual absl::StatusOr<PayloadRecoveryStats> FinishRecovery() = 0;

  // Calls `visit` with each record whose header and descriptor are intact; payloads are not read.
  // REQUIRES: FinishRecovery was not called yet.
  using RecordVisitor = std::function<void(const PayloadLocation& at, std::string_view descriptor)>;
  virtual absl::Status Scan(const RecordVisitor& visit) = 0;

  // Writes a group of records behind each other, in one write, and returns their places in the same
  // order: all or none of them are stored. On return their bytes are with the operating system:
  // they survive the end of this process. After a Sync that starts later they also survive a loss
  // of power, whatever is written after them. REQUIRES: 1 to kGroupRecordsMax records, below 4 GiB
  // together. Errors: ResourceExhausted when the disk is full (nothing is kept; later appends may
  // work again), Unavailable for other I/O errors.
  virtual absl::StatusOr<std::vector<PayloadLocation>> AppendGroup(
      std::span<PayloadRecord* const> records) = 0;
  static constexpr std::size_t kGroupRecordsMax = 1000;

  // A group of one.
  absl::StatusOr<PayloadLocation> Append(PayloadRecord& record);

  // The payload of a record, after its header, identity, length and checksum were found right.
  // Errors: DataLoss when they are not, or nothing is there; Unavailable when the device fails to
  // answer.
  virtual absl::StatusOr<StoredPayload> Read(const PayloadLocation& at) = 0;

  // Gives the space back; that of a page which records share, with the last of them. The caller has
  // made sure that nobody names the location any more.
  virtual void Free(const PayloadLocation& at) = 0;

  // All records appended before are durable on OK.
  virtual absl::Status Sync() = 0;

  virtual PayloadUsage Usage() const = 0;
};

}  // namespace kvtrie
