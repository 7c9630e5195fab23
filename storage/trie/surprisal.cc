#include "storage/trie/surprisal.h"

#include <cmath>
#include <limits>
#include <numbers>

namespace kvtrie {

float HalfToFloat(std::uint16_t half) {
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity()
                              : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

std::vector<float> BlockSurprisalBits(std::span<const std::uint16_t> log_probs_f16,
                                      std::uint32_t block_tokens) {
  std::vector<float> bits;
  const std::size_t block_count = log_probs_f16.size() / block_tokens;
  bits.reserve(block_count);
  for (std::size_t block = 0; block < block_count; ++block) {
    double nats = 0;
    for (const std::uint16_t half : log_probs_f16.subspan(block * block_tokens, block_tokens)) {
      const float log_prob = HalfToFloat(half);
      if (std::isfinite(log_prob) && log_prob < 0) nats -= static_cast<double>(log_prob);
    }
    bits.push_back(static_cast<float>(nats / std::numbers::ln2));
  }
  return bits;
}

}  // namespace kvtrie
