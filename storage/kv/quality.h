#pragma once

#include <cstdint>

namespace kvtrie {

// Stored and sent; values equal those of the protos. Zero is never valid.

// What a block is stored as.
enum class Rung : std::uint8_t { kTokens = 1, kCoded = 2, kExact = 3 };

// A bound on what a block's KV costs the model's output (mean KL to the uncompressed cache):
// ordered, greater is better.
enum class Quality : std::uint8_t { kHigh = 1, kNearExact = 2, kExact = 3 };

inline constexpr std::uint8_t RungBit(Rung rung) {
  return static_cast<std::uint8_t>(1u << static_cast<unsigned>(rung));
}

}  // namespace kvtrie
