#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include "absl/status/status.h"

namespace kvtrie {

// Messages that carry bulk bytes have them in field 15, `bytes data`, which stands last. Here it is written
// and read beside the message proper, as slices of memory that somebody else owns: protobuf's own code would
// copy each byte into a string. On the wire it is the same; any protobuf client reads and writes it.
inline constexpr std::uint32_t kBulkField = 15;

// `header` (with its `data` unset) followed by field 15 made of `payload`, which is shared, not copied.
grpc::ByteBuffer ComposeBulkMessage(const google::protobuf::MessageLite& header,
                                    std::span<const grpc::Slice> payload);

// The bulk bytes of a received message: they live as long as this does.
class BulkPayload {
 public:
  std::size_t size() const { return size_; }
  // In order; none is empty.
  std::span<const std::span<const std::byte>> pieces() const { return pieces_; }

  // The pieces of [offset, offset + count). REQUIRES: within size().
  std::vector<std::span<const std::byte>> Range(std::size_t offset, std::size_t count) const;

 private:
  friend absl::Status ParseBulkMessage(const grpc::ByteBuffer&, google::protobuf::MessageLite*,
                                       BulkPayload*);
  std::vector<grpc::Slice> slices_;
  std::vector<std::span<const std::byte>> pieces_;
  std::size_t size_ = 0;
};

// Splits a received message. A repeated field 15 counts as protobuf has it: the last one.
// InvalidArgument: the bytes are not a message of this type.
absl::Status ParseBulkMessage(const grpc::ByteBuffer& buffer,
                              google::protobuf::MessageLite* header, BulkPayload* payload);

}  // namespace kvtrie
