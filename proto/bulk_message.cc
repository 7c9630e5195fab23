#include "proto/bulk_message.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace kvtrie {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr std::uint32_t kBulkTag =
    WireFormatLite::MakeTag(kBulkField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);

// Bytes spread over slices, read from front to back.
class SliceCursor {
 public:
  explicit SliceCursor(const std::vector<grpc::Slice>& slices) : slices_(slices) { Settle(); }

  bool AtEnd() const { return index_ == slices_.size(); }

  bool ReadByte(std::uint8_t* byte) {
    if (AtEnd()) return false;
    *byte = slices_[index_].begin()[offset_++];
    Settle();
    return true;
  }

  bool ReadVarint(std::uint64_t* value) { return ReadVarint(value, 64); }
  // Tags and sizes: protobuf refuses longer encodings of them, so we do too.
  bool ReadVarint32(std::uint64_t* value) { return ReadVarint(value, 35) && *value <= 0xffffffffu; }

  // Hands the next `count` bytes to `take`, piece by piece.
  template <typename Take>
  bool Consume(std::uint64_t count, const Take& take) {
    while (count > 0) {
      if (AtEnd()) return false;
      const std::size_t here = static_cast<std::size_t>(
          std::min<std::uint64_t>(count, slices_[index_].size() - offset_));
      take(slices_[index_].begin() + offset_, here);
      offset_ += here;
      count -= here;
      Settle();
    }
    return true;
  }

 private:
  bool ReadVarint(std::uint64_t* value, int bits_max) {
    *value = 0;
    for (int shift = 0; shift < bits_max; shift += 7) {
      std::uint8_t byte;
      if (!ReadByte(&byte)) return false;
      *value |= std::uint64_t{byte & 0x7fu} << shift;
      if ((byte & 0x80u) == 0) return true;
    }
    return false;
  }

  void Settle() {
    while (index_ < slices_.size() && offset_ == slices_[index_].size()) {
      ++index_;
      offset_ = 0;
    }
  }

  const std::vector<grpc::Slice>& slices_;
  std::size_t index_ = 0;
  std::size_t offset_ = 0;
};

void AppendVarint(std::uint64_t value, std::string* to) {
  while (value >= 0x80) {
    to->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  to->push_back(static_cast<char>(value));
}

// Moves one field that is not bulk from the cursor to `to`, tag included.
bool CopyField(std::uint64_t tag, SliceCursor& cursor, std::string* to) {
  AppendVarint(tag, to);
  std::uint64_t count = 0;
  switch (tag & 7u) {
    case WireFormatLite::WIRETYPE_VARINT: {
      std::uint64_t value;
      if (!cursor.ReadVarint(&value)) return false;
      AppendVarint(value, to);
      return true;
    }
    case WireFormatLite::WIRETYPE_FIXED64:
      count = 8;
      break;
    case WireFormatLite::WIRETYPE_FIXED32:
      count = 4;
      break;
    case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
      if (!cursor.ReadVarint32(&count)) return false;
      AppendVarint(count, to);
      break;
    default:
      return false;  // groups: no message of ours has them
  }
  return cursor.Consume(count, [to](const std::uint8_t* bytes, std::size_t size) {
    to->append(reinterpret_cast<const char*>(bytes), size);
  });
}

}  // namespace

grpc::ByteBuffer ComposeBulkMessage(const google::protobuf::MessageLite& header,
                                    std::span<const grpc::Slice> payload) {
  std::size_t payload_bytes = 0;
  for (const grpc::Slice& slice : payload) payload_bytes += slice.size();

  std::string head;
  head.reserve(header.ByteSizeLong() + 12);
  header.AppendToString(&head);
  std::vector<grpc::Slice> slices;
  slices.reserve(payload.size() + 1);
  if (payload_bytes > 0) {
    AppendVarint(kBulkTag, &head);
    AppendVarint(payload_bytes, &head);
  }
  slices.emplace_back(head.data(), head.size());
  slices.insert(slices.end(), payload.begin(), payload.end());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::vector<std::span<const std::byte>> BulkPayload::Range(std::size_t offset,
                                                           std::size_t count) const {
  std::vector<std::span<const std::byte>> range;
  for (const auto& piece : pieces_) {
    if (count == 0) break;
    if (offset >= piece.size()) {
      offset -= piece.size();
      continue;
    }
    const std::size_t here = std::min(count, piece.size() - offset);
    range.push_back(piece.subspan(offset, here));
    offset = 0;
    count -= here;
  }
  return range;
}

absl::Status ParseBulkMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* header,
                              BulkPayload* payload) {
  payload->slices_.clear();
  payload->pieces_.clear();
  payload->size_ = 0;
  if (!buffer.Dump(&payload->slices_).ok()) {
    return absl::InvalidArgumentError("message: cannot be read");
  }

  std::string head;
  SliceCursor cursor(payload->slices_);
  while (!cursor.AtEnd()) {
    std::uint64_t tag;
    if (!cursor.ReadVarint32(&tag)) {
      return absl::InvalidArgumentError("message: malformed tag");
    }
    if (tag != kBulkTag) {
      if (!CopyField(tag, cursor, &head)) {
        return absl::InvalidArgumentError("message: malformed field");
      }
      continue;
    }
    std::uint64_t count;
    if (!cursor.ReadVarint32(&count)) return absl::InvalidArgumentError("message: malformed data");
    payload->pieces_.clear();
    payload->size_ = 0;
    const bool whole =
        cursor.Consume(count, [payload](const std::uint8_t* bytes, std::size_t size) {
          payload->pieces_.emplace_back(reinterpret_cast<const std::byte*>(bytes), size);
          payload->size_ += size;
        });
    if (!whole) return absl::InvalidArgumentError("message: data is shorter than its length");
  }
  if (!header->ParseFromString(head)) {
    return absl::InvalidArgumentError("message: fields do not parse");
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
