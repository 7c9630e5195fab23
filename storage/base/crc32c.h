#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrie {

// CRC-32C (Castagnoli, RFC 3720) of `bytes`, or of what `crc` covers followed by `bytes`.
// Uses ISA-L's vectorised kernel: 17-21 GB/s per core where RocksDB's fallback makes 1.2.
std::uint32_t Crc32c(std::span<const std::byte> bytes, std::uint32_t crc = 0);

// The same for any length; copies to `to` while the bytes are in the cache.
// REQUIRES: `to` has room for `from.size()` bytes and does not overlap it.
std::uint32_t CopyAndCrc32c(std::span<const std::byte> from, std::byte* to, std::uint32_t crc = 0);

// The checksum of two pieces one behind the other, from theirs, without reading them again:
// `shift` is Crc32cShift(bytes of the second). Costs as much as 2 KiB through Crc32c.
std::uint32_t Crc32cShift(std::uint64_t bytes);
std::uint32_t JoinCrc32c(std::uint32_t first, std::uint32_t second, std::uint32_t shift);

}  // namespace kvtrie
