#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "storage/trie/ref_table.h"

namespace kvtrie {

// Where pieces of text are stored: a multimap from keyed 64-bit hashes to trie nodes, of which 34
// bits are kept; the caller compares the text. 8 bytes per entry, tables 5/8 to 3/4 full, and a
// byte per node ref: about 13 bytes per entry at most.
//
// Bounds. Of one hash the first kPlacesMax nodes are kept, so text that is everywhere takes no
// room; a place that goes makes room for the next that comes. All together take at most
// `limit_bytes`: a full table forgets entries in the order of its slots (which is none), first
// those of nodes that are gone, sparing once those that were of use since it last came by (CLOCK).
//
// Removing a node costs nothing but a count: its entries are not found any more at once, and are
// swept out in the course of later insertions and removals. A node ref that is used again meets
// entries of the node that had it 256 removals earlier; they are found, and fail the comparison.
//
// Split by the hash's top bits into parts that grow on their own, so that growth never stops the
// store for longer than it takes to move 1/1,024 of the entries. Not thread-safe; concurrent Find
// are.
class RunIndexTable {
 public:
  static constexpr std::size_t kPlacesMax = 4;

  explicit RunIndexTable(std::size_t limit_bytes);

  void Insert(std::uint64_t hash, NodeRef ref);

  // Forgets the node; `entry_count`: how many were inserted of it, which paces the sweep.
  void Remove(NodeRef ref, std::size_t entry_count);

  void Prefetch(std::uint64_t hash) const {
    const Part& part = parts_[PartOf(hash)];
    if (!part.slots.empty()) __builtin_prefetch(&part.slots[Home(part, CheckOf(hash))]);
  }

  // Calls `is_of_use(ref)` for each place whose hash may be `hash`; true spares the entry when the
  // table is full.
  template <typename IsOfUse>
  void Find(std::uint64_t hash, const IsOfUse& is_of_use) const {
    const Part& part = parts_[PartOf(hash)];
    if (part.slots.empty()) return;
    const std::uint64_t check = CheckOf(hash);
    for (std::size_t at = Home(part, check);; at = Next(part, at)) {
      // Other readers may set the bit beside this one.
      std::atomic_ref<std::uint64_t> shared(const_cast<std::uint64_t&>(part.slots[at]));
      const std::uint64_t slot = shared.load(std::memory_order_relaxed);
      if (slot == 0) return;
      if (slot >> kCheckShift != check || IsStale(slot)) continue;
      if (is_of_use(RefOf(slot)) && (slot & kUsedBit) == 0) {
        shared.fetch_or(kUsedBit, std::memory_order_relaxed);
      }
    }
  }

  std::size_t size() const { return size_; }  // with those that wait for the sweep
  std::size_t memory_bytes() const;
  std::uint64_t forgotten_total() const { return forgotten_total_; }  // for want of room
  std::uint64_t crowded_total() const {
    return crowded_total_;
  }  // not kept: text known often enough

  // The table is what it should be, and whom it names (of those that are not to be swept) is alive.
  // Internal names the first fault.
  absl::Status CheckInvariants(const std::function<bool(NodeRef)>& is_alive) const;

 private:
  // A slot: 24 bits of the hash, 8 of the ref's generation, whether it was of use, the ref. 0:
  // empty.
  static constexpr unsigned kPartBits = 10;
  static constexpr unsigned kCheckBits = 24;
  static constexpr unsigned kCheckShift = 64 - kCheckBits;
  static constexpr unsigned kGenerationShift = 32;
  static constexpr std::uint64_t kUsedBit = std::uint64_t{1} << 31;
  static constexpr std::size_t kSlotsMin = 8;

  struct Part {
    std::vector<std::uint64_t> slots;
    std::uint32_t used = 0;
    std::uint32_t hand = 0;  // where forgetting goes on
  };

  static std::size_t PartOf(std::uint64_t hash) { return hash >> (64 - kPartBits); }
  static std::uint64_t CheckOf(std::uint64_t hash) {
    return hash >> (64 - kPartBits - kCheckBits) & ((std::uint64_t{1} << kCheckBits) - 1);
  }
  static NodeRef RefOf(std::uint64_t slot) { return static_cast<NodeRef>(slot & (kUsedBit - 1)); }
  static std::size_t Home(const Part& part, std::uint64_t check) {
    return check * part.slots.size() >> kCheckBits;
  }
  static std::size_t Next(const Part& part, std::size_t at) {
    return at + 1 == part.slots.size() ? 0 : at + 1;
  }
  bool IsStale(std::uint64_t slot) const {
    return static_cast<std::uint8_t>(slot >> kGenerationShift) != generations_[RefOf(slot)];
  }
  // A part without room for one more.
  static bool IsFull(const Part& part) { return (part.used + 1) * 4 > part.slots.size() * 3; }

  bool MakeRoom(Part* part);
  void Rebuild(Part* part, std::size_t more);
  void Erase(Part* part, std::size_t at);
  static void Place(Part* part, std::uint64_t slot);

  const std::size_t limit_bytes_;
  std::vector<Part> parts_;
  std::vector<std::uint8_t> generations_;  // by node ref
  std::size_t slot_count_ = 0;
  std::size_t size_ = 0;
  std::size_t sweep_part_ = 0;
  std::size_t sweep_debt_ = 0;  // slots that are due to be looked at
  std::uint64_t forgotten_total_ = 0;
  std::uint64_t crowded_total_ = 0;
};

}  // namespace kvtrie
