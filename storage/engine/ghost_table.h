#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "storage/kv/trie_node_id.h"
#include "storage/trie/node_traffic.h"

namespace kvtrie {

// What is remembered of nodes that were evicted: their traffic and when they were last used, under
// 32 bits of their id. A node that comes back is then no stranger, and one that does not tells that
// it was right to let it go. 12 bytes per place, in sets of 8; a full set forgets the one that was
// used longest ago. Ids are digests, so two nodes are taken for one in about one of 10^8 look-ups,
// which costs a wrong guess.
//
// Not thread-safe.
class GhostTable {
 public:
  struct Ghost {
    NodeTraffic traffic;
    std::uint32_t last_used_seconds = 0;
  };

  // Places for at least so many ghosts from now on; those that are there stay. Never less than
  // before.
  void Reserve(std::size_t count);

  // Returns what had to be forgotten for it. Forgets it at once where there are no places.
  std::optional<Ghost> Add(const TrieNodeId& id, const Ghost& ghost);
  // Returns what is known of the node, and forgets it.
  std::optional<Ghost> Take(const TrieNodeId& id);

  // Of any place: nullopt where it is free.
  std::optional<Ghost> At(std::size_t place) const {
    if (places_[place].key == 0) return std::nullopt;
    return Ghost{NodeTraffic(places_[place].traffic_bits), places_[place].last_used_seconds};
  }
  std::size_t place_count() const { return places_.size(); }
  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const { return places_.capacity() * sizeof(Place); }

 private:
  static constexpr std::size_t kSetPlaces = 8;
  struct Place {
    std::uint32_t key = 0;  // 0: free
    std::uint32_t traffic_bits = 0;
    std::uint32_t last_used_seconds = 0;
  };

  // Of a set for this key.
  Place* SetOf(std::uint32_t key) { return &places_[(key & (set_count_ - 1)) * kSetPlaces]; }
  static std::uint32_t KeyOf(const TrieNodeId& id);
  std::optional<Ghost> Add(const Place& place);

  std::size_t set_count_ = 0;  // a power of two, or 0
  std::vector<Place> places_;
  std::size_t size_ = 0;
};

}  // namespace kvtrie
