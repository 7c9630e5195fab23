#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "storage/base/byte_reader.h"
#include "storage/kv/sealed_bytes.h"

namespace kvtrie {

// The bytes with the checksum that they should have at their end, so that mutations come past it.
inline std::string MendSeal(const std::string& bytes) {
  constexpr std::size_t kChecksumBytes = sizeof(std::uint32_t);
  if (bytes.size() < kChecksumBytes) return bytes;
  ByteWriter writer;
  writer.WriteText(std::string_view(bytes).substr(0, bytes.size() - kChecksumBytes));
  return Seal(std::move(writer));
}

}  // namespace kvtrie
