#pragma once

#include "storage/base/check.h"
#include "tests/storage/codec/body_checks.h"

namespace kvtrie {

// Any bytes as a body without a profile: each kernel set finds the same in them, and what they
// decode to is given to code_again.
template <typename CodeAgain>
void TryBody(const KvGeometry& geometry, const Bytes& body, DecodeBody decode,
             CodeAgain code_again) {
  Bytes first;
  absl::Status first_status;
  WithEachKernelSet([&] {
    Bytes raw(geometry.raw_block_bytes());
    const absl::Status status = decode(geometry, body, raw);
    if (first.empty()) {
      first = raw;
      first_status = status;
    }
    KV_CHECK(status == first_status);
    KV_CHECK(status.ok() || absl::IsDataLoss(status));
    if (!status.ok()) return;
    KV_CHECK(raw == first);
    code_again(raw);
  });
}

// A copy of exactly this size: the sanitizer sees what is read beyond.
inline Bytes ExactBytes(const std::uint8_t* data, std::size_t size) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  return Bytes(bytes, bytes + size);
}

}  // namespace kvtrie
