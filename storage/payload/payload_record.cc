#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/payload/payload_store.h"
#include "storage/payload/segment_format.h"

namespace kvtrie {

PayloadRecord::PayloadRecord(std::string_view descriptor, std::size_t payload_bytes)
    : descriptor_bytes_(descriptor.size()),
      payload_offset_(PayloadOffset(descriptor.size())),
      payload_bytes_(payload_bytes) {
  KV_CHECK(descriptor.size() <= kDescriptorBytesMax);
  KV_CHECK(payload_bytes >= 1);
  KV_CHECK(payload_bytes <= std::numeric_limits<std::uint32_t>::max() - payload_offset_);
  buffer_ = std::make_shared<AlignedBuffer>(record_bytes());
  std::byte* const data = buffer_->data();
  std::fill(data, data + kHeaderBytes, std::byte{});
  if (!descriptor.empty()) std::memcpy(data + kHeaderBytes, descriptor.data(), descriptor.size());
  std::fill(data + kHeaderBytes + descriptor.size(), data + payload_offset_, std::byte{});
  std::fill(data + record_bytes(), data + buffer_->size(), std::byte{});
}

std::span<std::byte> PayloadRecord::payload() {
  return {buffer_->data() + payload_offset_, payload_bytes_};
}

std::span<const std::byte> PayloadRecord::descriptor() const {
  return {buffer_->data() + kHeaderBytes, descriptor_bytes_};
}

void PayloadRecord::ReplaceDescriptor(std::string_view descriptor) {
  KV_CHECK(descriptor.size() == descriptor_bytes_);
  std::memcpy(buffer_->data() + kHeaderBytes, descriptor.data(), descriptor.size());
}

std::span<std::byte> PayloadRecord::memory() { return {buffer_->data(), buffer_->size()}; }

std::uint64_t GroupDiskBytes(std::span<PayloadRecord* const> records) {
  std::uint64_t bytes = 0;
  for (const PayloadRecord* record : records) {
    bytes += PayloadLocation::DiskBytes(record->record_bytes());
  }
  return (bytes + PayloadLocation::kPageBytes - 1) / PayloadLocation::kPageBytes *
         PayloadLocation::kPageBytes;
}

absl::StatusOr<PayloadLocation> PayloadStore::Append(PayloadRecord& record) {
  PayloadRecord* const group[] = {&record};
  KV_ASSIGN_OR_RETURN(const std::vector<PayloadLocation> places, AppendGroup(group));
  return places.front();
}

SharedBytes PayloadRecord::TakePayload() && {
  const auto view = payload();
  return {std::move(buffer_), view};
}

}  // namespace kvtrie
