#include "storage/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstring>

namespace kvtrie {
namespace {

// ISA-L takes int lengths, and a span may be larger.
constexpr std::size_t kPieceBytes = std::size_t{1} << 30;
// Half of an L1 cache.
constexpr std::size_t kCopyBytes = std::size_t{16} << 10;

}  // namespace

std::uint32_t Crc32c(std::span<const std::byte> bytes, std::uint32_t crc) {
  std::uint32_t state = ~crc;
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kPieceBytes));
    // The kernel reads only; its signature lacks the const.
    auto* data = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(piece.data()));
    state = crc32_iscsi(data, static_cast<int>(piece.size()), state);
    bytes = bytes.subspan(piece.size());
  }
  return ~state;
}

std::uint32_t CopyAndCrc32c(std::span<const std::byte> from, std::byte* to, std::uint32_t crc) {
  while (!from.empty()) {
    const auto piece = from.first(std::min(from.size(), kCopyBytes));
    std::memcpy(to, piece.data(), piece.size());
    // Of the copy: the source may be shared with somebody who changes it meanwhile.
    crc = Crc32c({to, piece.size()}, crc);
    to += piece.size();
    from = from.subspan(piece.size());
  }
  return crc;
}

}  // namespace kvtrie
