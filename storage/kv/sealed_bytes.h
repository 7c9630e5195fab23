#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "storage/base/byte_reader.h"

namespace kvtrie {

// What is stored outside of frames and payload records is sealed: a version byte, fields, and the
// CRC-32C of all before it as u32. A newer version keeps these two places, so that it is told from
// damage.

// A writer that has written the version.
ByteWriter StartSealed(std::uint8_t version);
std::string Seal(ByteWriter writer);

// A reader of the fields between version and checksum, which points into `bytes`.
// Errors: DataLoss when length, checksum or version cannot be; Unimplemented when the bytes are
// intact and of a newer version. `what` names them in messages.
absl::StatusOr<ByteReader> Unseal(const char* what, std::uint8_t version, std::string_view bytes);

// The same where versions from 1 to `newest` can be read.
struct UnsealedBytes {
  std::uint8_t version = 0;
  ByteReader reader;
};
absl::StatusOr<UnsealedBytes> UnsealUpTo(const char* what, std::uint8_t newest,
                                         std::string_view bytes);

}  // namespace kvtrie
