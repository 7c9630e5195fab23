#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace kvtrie {

// How the blocks of a put came to hang where they do: it tells what becomes of them before any of
// them has been used.
enum class NodeOrigin : std::uint8_t {
  kRoot = 0,          // a prompt that shares nothing
  kFork = 1,          // a path that leaves others
  kContinuation = 2,  // the end of a path, which goes on
};

// What a trie node remembers of its traffic, in 32 bits: how often a path through it was asked for,
// how long it is between such uses, and how it came. Zero is a node that is new.
class NodeTraffic {
 public:
  static constexpr std::uint32_t kUsesMax = (1u << 24) - 1;
  static constexpr std::uint32_t kGapClasses = 16;
  static constexpr std::uint32_t kTraits = 4;

  NodeTraffic() = default;
  explicit NodeTraffic(std::uint32_t bits) : bits_(bits) {}
  // `trait`: below kTraits, what more was known of it then; the number means what the caller means
  // by it.
  NodeTraffic(NodeOrigin origin, std::uint32_t trait)
      : bits_(static_cast<std::uint32_t>(origin) << 24 | (trait & 3u) << 26) {}

  std::uint32_t bits() const { return bits_; }
  // Stays at kUsesMax once it is there.
  std::uint32_t uses() const { return bits_ & kUsesMax; }
  NodeOrigin origin() const { return static_cast<NodeOrigin>(bits_ >> 24 & 3u); }
  std::uint32_t trait() const { return bits_ >> 26 & 3u; }
  // Of the time between uses, a mean in which late ones count most: n = from 2^n - 1 seconds on. 0
  // until there is a use.
  std::uint32_t gap_class() const { return bits_ >> 28; }

  NodeTraffic Used(std::uint32_t gap_seconds) const {
    const auto last = std::min<std::uint32_t>(
        kGapClasses - 1, static_cast<std::uint32_t>(std::bit_width(gap_seconds)));
    // Rounds towards the last one, so that a lasting change arrives.
    const std::uint32_t before = gap_class();
    const std::uint32_t gap = uses() == 0     ? last
                              : last > before ? (before + last + 1) / 2
                                              : (before + last) / 2;
    return NodeTraffic((bits_ & 0x0f000000u) | gap << 28 | std::min(kUsesMax, uses() + 1));
  }

  bool operator==(const NodeTraffic&) const = default;

 private:
  std::uint32_t bits_ = 0;
};

}  // namespace kvtrie
