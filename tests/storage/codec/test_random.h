#pragma once

#include <cstdint>

namespace kvtrie {

// The high bits of a 64-bit linear congruence; tests/golden/make_codec.py has the same.
class TestRandom {
 public:
  explicit TestRandom(std::uint64_t seed) : state_(seed) {}

  std::uint32_t Below(std::uint32_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>((state_ >> 33) % bound);
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvtrie
