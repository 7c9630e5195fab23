#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrie {

// Place of a trie node in the index; 0 = none.
using NodeRef = std::uint32_t;

// Hash table from 32-bit hashes to node refs; several refs may have one hash, the caller compares.
// 5 bytes per slot, at most 7/8 full. Split by the hash's top byte into parts that grow on their
// own, so that growth never stops the store for longer than it takes to move 1/256 of the refs. Not
// thread-safe; concurrent reads are.
class RefTable {
 public:
  RefTable() : parts_(256) {}

  // Calls `matches(ref)` for refs whose hash may be `hash`, until it returns true; returns that ref
  // or 0.
  template <typename Matches>
  NodeRef Find(std::uint32_t hash, const Matches& matches) const {
    const Part& part = parts_[hash >> 24];
    if (part.refs.empty()) return 0;
    const std::uint8_t tag = Tag(hash);
    for (std::size_t at = Home(hash) & part.mask;; at = (at + 1) & part.mask) {
      const NodeRef ref = part.refs[at];
      if (ref == 0) return 0;
      if (part.tags[at] == tag && ref != kTombstone && matches(ref)) return ref;
    }
  }

  void Prefetch(std::uint32_t hash) const {
    const Part& part = parts_[hash >> 24];
    if (part.refs.empty()) return;
    const std::size_t at = Home(hash) & part.mask;
    __builtin_prefetch(&part.tags[at]);
    __builtin_prefetch(&part.refs[at]);
  }

  // First ref whose tag matches, or 0: a guess, to prefetch what Find will look at.
  NodeRef Guess(std::uint32_t hash) const {
    return Find(hash, [](NodeRef) { return true; });
  }

  // `hash_of(ref)` gives the hash that a ref was inserted with; needed to grow.
  template <typename HashOf>
  void Insert(std::uint32_t hash, NodeRef ref, const HashOf& hash_of) {
    Part& part = parts_[hash >> 24];
    if ((part.used + 1) * 8 > part.refs.size() * 7) Grow(part, hash_of);
    Place(part, hash, ref);
    ++part.live;
    ++size_;
  }

  // REQUIRES: the ref is there.
  void Erase(std::uint32_t hash, NodeRef ref);

  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const;

 private:
  static constexpr NodeRef kTombstone = 0xffffffffu;
  static constexpr std::size_t kSlotsMin = 16;

  struct Part {
    std::vector<NodeRef> refs;
    std::vector<std::uint8_t> tags;
    std::size_t mask = 0;
    std::size_t used = 0;  // slots that are not empty, tombstones included
    std::size_t live = 0;
  };

  static std::size_t Home(std::uint32_t hash) { return hash * 0x9e3779b1u >> 8; }
  static std::uint8_t Tag(std::uint32_t hash) { return static_cast<std::uint8_t>(hash); }

  static void Place(Part& part, std::uint32_t hash, NodeRef ref) {
    std::size_t at = Home(hash) & part.mask;
    while (part.refs[at] != 0 && part.refs[at] != kTombstone) at = (at + 1) & part.mask;
    if (part.refs[at] == 0) ++part.used;
    part.refs[at] = ref;
    part.tags[at] = Tag(hash);
  }

  template <typename HashOf>
  static void Grow(Part& part, const HashOf& hash_of) {
    std::size_t slots = kSlotsMin;
    while (slots * 7 < part.live * 16) slots *= 2;  // at most 7/16 full afterwards
    Part grown;
    grown.refs.assign(slots, 0);
    grown.tags.assign(slots, 0);
    grown.mask = slots - 1;
    grown.live = part.live;
    for (const NodeRef ref : part.refs) {
      if (ref != 0 && ref != kTombstone) Place(grown, hash_of(ref), ref);
    }
    part = std::move(grown);
  }

  std::vector<Part> parts_;
  std::size_t size_ = 0;
};

}  // namespace kvtrie
