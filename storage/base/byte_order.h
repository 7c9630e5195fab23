#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvtrie {

// Formats are little-endian; we run on little-endian machines only.
static_assert(std::endian::native == std::endian::little);

template <typename T>
T LoadLittle(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
void StoreLittle(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Row keys are big-endian, so that byte order is numeric order.
inline std::uint32_t LoadBig32(const void* from) {
  return __builtin_bswap32(LoadLittle<std::uint32_t>(from));
}
inline std::uint64_t LoadBig64(const void* from) {
  return __builtin_bswap64(LoadLittle<std::uint64_t>(from));
}
inline void StoreBig32(void* to, std::uint32_t value) { StoreLittle(to, __builtin_bswap32(value)); }
inline void StoreBig64(void* to, std::uint64_t value) { StoreLittle(to, __builtin_bswap64(value)); }

}  // namespace kvtrie
