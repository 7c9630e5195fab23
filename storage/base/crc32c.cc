#include "storage/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace kvtrie {
namespace {

// ISA-L takes int lengths, and a span may be larger.
constexpr std::size_t kPieceBytes = std::size_t{1} << 30;
// Half of an L1 cache.
constexpr std::size_t kCopyBytes = std::size_t{16} << 10;

// A checksum is a polynomial over GF(2) modulo the CRC's, its highest bit the coefficient of x^0.
// Appending n bytes multiplies what stood before by x^(8n).
constexpr std::uint32_t kPolynomial = 0x82f63b78;
constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t Multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & kOne) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^8, x^16, x^32, ...
constexpr auto kPowers = [] {
  std::array<std::uint32_t, 64> powers{};
  powers[0] = kOne >> 8;
  for (std::size_t i = 1; i < powers.size(); ++i) {
    powers[i] = Multiply(powers[i - 1], powers[i - 1]);
  }
  return powers;
}();

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

std::uint32_t Crc32cShift(std::uint64_t bytes) {
  std::uint32_t shift = kOne;
  for (std::size_t i = 0; bytes != 0; ++i, bytes >>= 1) {
    if ((bytes & 1) != 0) shift = Multiply(shift, kPowers[i]);
  }
  return shift;
}

std::uint32_t JoinCrc32c(std::uint32_t first, std::uint32_t second, std::uint32_t shift) {
  return Multiply(first, shift) ^ second;
}

}  // namespace kvtrie
