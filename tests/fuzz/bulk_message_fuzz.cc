#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvtrie/v1/cache.pb.h"
#include "proto/bulk_message.h"
#include "storage/base/check.h"

// The first byte says how the rest is cut into slices. What is accepted means the same to protobuf.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t slice_bytes = 1 + data[0];
  std::vector<grpc::Slice> slices;
  for (std::size_t offset = 1; offset < size; offset += slice_bytes) {
    slices.emplace_back(data + offset, std::min(slice_bytes, size - offset));
  }
  kvtrie::v1::PutRequest header;
  kvtrie::BulkPayload payload;
  const absl::Status status =
      kvtrie::ParseBulkMessage(grpc::ByteBuffer(slices.data(), slices.size()), &header, &payload);
  if (!status.ok()) return 0;

  kvtrie::v1::PutRequest whole;
  KV_CHECK(whole.ParseFromArray(data + 1, static_cast<int>(size - 1)));
  KV_CHECK(whole.data().size() == payload.size());
  std::string bytes;
  for (const auto piece : payload.Range(0, payload.size())) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  KV_CHECK(bytes == whole.data());
  whole.clear_data();
  KV_CHECK(whole.SerializeAsString() == header.SerializeAsString());
  return 0;
}
