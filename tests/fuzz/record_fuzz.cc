// Record and segment headers as a start-up or a scan meets them on a damaged disk. The first byte
// chooses the parser (bit 0) and whether the checksum is made right first (bit 1).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/payload/segment_format.h"

namespace kvtrie {
namespace {

void TryRecord(std::span<const std::byte> bytes) {
  const auto header = ParseRecordHeader(bytes);
  if (!header.ok()) return;
  KV_CHECK(header->payload_offset() <= bytes.size());
  KV_CHECK(RecordHeadBytes(bytes) == header->payload_offset());
  KV_CHECK(header->descriptor_bytes <= PayloadRecord::kDescriptorBytesMax);
  KV_CHECK(header->location().record_bytes == header->record_bytes());
  if (header->version != kSegmentFormatVersion) return;
  // There is one way to write it.
  std::vector<std::byte> head(
      bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(header->payload_offset()));
  WriteRecordHeader(*header, head);
  KV_CHECK(std::equal(head.begin(), head.end(), bytes.begin()));
}

void TrySegment(std::span<const std::byte> bytes) {
  const auto header = ParseSegmentHeader(bytes);
  if (!header.ok()) return;
  std::vector<std::byte> page(PayloadLocation::kPageBytes);
  WriteSegmentHeader(*header, page);
  const auto again = ParseSegmentHeader(page);
  KV_CHECK(again.ok());
  KV_CHECK(again->store_id == header->store_id);
  KV_CHECK(again->segment == header->segment);
}

// Makes the checksum right, so that what stands behind it is tried too.
void Reseal(std::span<std::byte> bytes, std::size_t head_bytes) {
  if (head_bytes == 0 || bytes.size() < head_bytes) return;
  const auto covered = bytes.first(head_bytes).subspan(8);
  StoreLittle(bytes.data() + 4, Crc32c(covered));
}

int FuzzOne(std::span<const std::uint8_t> input) {
  if (input.empty()) return 0;
  const auto rest = std::as_bytes(input.subspan(1));
  std::vector<std::byte> bytes(rest.begin(), rest.end());
  const bool segment = (input.front() & 1) != 0;
  const bool reseal = (input.front() & 2) != 0;
  if (reseal && bytes.size() >= PayloadRecord::kHeaderBytes) {
    Reseal(bytes, segment ? PayloadRecord::kHeaderBytes : RecordHeadBytes(bytes));
  }
  if (segment) {
    TrySegment(bytes);
  } else {
    TryRecord(bytes);
  }
  return 0;
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return kvtrie::FuzzOne({data, size});
}
