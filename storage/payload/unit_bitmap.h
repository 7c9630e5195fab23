#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrie {

// A set of unit numbers, one bit each: memory for all up to the largest one that was ever in it.
class UnitBitmap {
 public:
  struct Range {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
  };

  // Takes memory for units below `end` at once, where growing would take up to twice as much.
  void Reserve(std::uint64_t end) { words_.reserve((end + kWordBits - 1) / kWordBits); }

  void Add(const Range& range) {
    words_.resize(std::max<std::size_t>(words_.size(), (range.end + kWordBits - 1) / kWordBits));
    ForEachWord(range, [this](std::size_t word, std::uint64_t mask) { words_[word] |= mask; });
  }
  void Remove(const Range& range) {
    ForEachWord(range, [this](std::size_t word, std::uint64_t mask) {
      if (word < words_.size()) words_[word] &= ~mask;
    });
  }

  bool HoldsAll(const Range& range) const {
    bool all = true;
    ForEachWord(range, [&](std::size_t word, std::uint64_t mask) {
      all = all && (WordAt(word) & mask) == mask;
    });
    return all;
  }
  bool HoldsAny(const Range& range) const {
    bool any = false;
    ForEachWord(range, [&](std::size_t word, std::uint64_t mask) {
      any = any || (WordAt(word) & mask) != 0;
    });
    return any;
  }

  // Behind the last unit that is in the set; 0 when it is empty.
  std::uint64_t End() const {
    for (std::size_t word = words_.size(); word > 0; --word) {
      if (words_[word - 1] != 0) {
        return word * kWordBits - static_cast<std::uint64_t>(std::countl_zero(words_[word - 1]));
      }
    }
    return 0;
  }

  // The first run of units outside the set at or after `from`, cut at `end`; empty when there is
  // none.
  Range NextGap(std::uint64_t from, std::uint64_t end) const {
    const std::uint64_t first = std::min(FindNext(from, false), end);
    return {first, std::min(FindNext(first, true), end)};
  }

 private:
  static constexpr std::uint64_t kWordBits = 64;

  std::uint64_t WordAt(std::size_t word) const { return word < words_.size() ? words_[word] : 0; }

  template <typename Visit>
  static void ForEachWord(const Range& range, Visit visit) {
    for (std::uint64_t unit = range.first; unit < range.end;) {
      const std::uint64_t bit = unit % kWordBits;
      const std::uint64_t count = std::min(kWordBits - bit, range.end - unit);
      const std::uint64_t ones =
          count == kWordBits ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
      visit(static_cast<std::size_t>(unit / kWordBits), ones << bit);
      unit += count;
    }
  }

  // The first unit at or after `from` that is in the set (or is not); behind the last word none is.
  std::uint64_t FindNext(std::uint64_t from, bool in_set) const {
    const std::uint64_t limit = words_.size() * kWordBits;
    while (from < limit) {
      const std::uint64_t word = words_[from / kWordBits];
      const std::uint64_t rest = (in_set ? word : ~word) >> (from % kWordBits);
      if (rest != 0) return from + static_cast<std::uint64_t>(std::countr_zero(rest));
      from = (from / kWordBits + 1) * kWordBits;
    }
    return in_set ? ~std::uint64_t{0} : from;
  }

  std::vector<std::uint64_t> words_;
};

}  // namespace kvtrie
