#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/codec/profile_header.h"

namespace kvtrie {
namespace {

void TryHeader(const std::string& bytes) {
  const auto header = ParseProfileHeader(AsBytes(bytes));
  if (!header.ok()) return;
  // What was accepted is what a writer makes.
  std::string again(header->header_bytes(), '\xaa');
  WriteProfileHeader(*header, std::as_writable_bytes(std::span(again)));
  KV_CHECK(again == bytes.substr(0, again.size()));
}

// Gives the header the checksum that it should have, so that mutations come past it.
void MendChecksum(std::string& bytes) {
  constexpr std::size_t kHeaderBytesOffset = 6;
  if (bytes.size() < kHeaderBytesOffset + 2) return;
  const std::size_t header_bytes = LoadLittle<std::uint16_t>(bytes.data() + kHeaderBytesOffset);
  if (header_bytes < 4 || header_bytes > bytes.size()) return;
  StoreLittle(bytes.data() + header_bytes - 4, Crc32c(AsBytes(bytes).first(header_bytes - 4)));
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  kvtrie::TryHeader(bytes);
  kvtrie::MendChecksum(bytes);
  kvtrie::TryHeader(bytes);
  return 0;
}
