#include "storage/engine/ghost_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace kvtrie {

std::uint32_t GhostTable::KeyOf(const TrieNodeId& id) {
  std::uint32_t key;
  std::memcpy(&key, id.bytes.data() + 8, sizeof(key));
  return std::max(1u, key);
}

void GhostTable::Reserve(std::size_t count) {
  const std::size_t set_count = std::bit_floor(std::max<std::size_t>(1, count / kSetPlaces));
  if (set_count <= set_count_) return;
  const std::vector<Place> before =
      std::exchange(places_, std::vector<Place>(set_count * kSetPlaces));
  set_count_ = set_count;
  size_ = 0;
  // More sets: each place of a set finds one in those that it is split into.
  for (const Place& place : before) {
    if (place.key != 0) Add(place);
  }
}

std::optional<GhostTable::Ghost> GhostTable::Add(const Place& place) {
  Place* const set = SetOf(place.key);
  Place* to = set;
  for (Place* at = set; at != set + kSetPlaces; ++at) {
    if (at->key == 0 || at->key == place.key) {
      to = at;
      break;
    }
    if (at->last_used_seconds < to->last_used_seconds) to = at;
  }
  std::optional<Ghost> forgotten;
  if (to->key == 0) {
    ++size_;
  } else if (to->key != place.key) {
    forgotten = Ghost{NodeTraffic(to->traffic_bits), to->last_used_seconds};
  }
  *to = place;
  return forgotten;
}

std::optional<GhostTable::Ghost> GhostTable::Add(const TrieNodeId& id, const Ghost& ghost) {
  if (set_count_ == 0) return ghost;
  return Add({KeyOf(id), ghost.traffic.bits(), ghost.last_used_seconds});
}

std::optional<GhostTable::Ghost> GhostTable::Take(const TrieNodeId& id) {
  if (set_count_ == 0) return std::nullopt;
  const std::uint32_t key = KeyOf(id);
  Place* const set = SetOf(key);
  Place* const last = set + kSetPlaces - 1;
  Place* const found =
      std::find_if(set, set + kSetPlaces, [key](const Place& at) { return at.key == key; });
  if (found == set + kSetPlaces) return std::nullopt;
  const Ghost ghost{NodeTraffic(found->traffic_bits), found->last_used_seconds};
  // Free places stay behind the others.
  Place* const last_used =
      std::find_if(found, last, [](const Place& at) { return (&at)[1].key == 0; });
  *found = *last_used;
  *last_used = {};
  --size_;
  return ghost;
}

}  // namespace kvtrie
