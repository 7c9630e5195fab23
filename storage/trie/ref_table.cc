#include "storage/trie/ref_table.h"

#include "storage/base/check.h"

namespace kvtrie {

void RefTable::Erase(std::uint32_t hash, NodeRef ref) {
  Part& part = parts_[hash >> 24];
  KV_CHECK(!part.refs.empty());
  std::size_t at = Home(hash) & part.mask;
  while (part.refs[at] != ref) {
    KV_CHECK(part.refs[at] != 0);
    at = (at + 1) & part.mask;
  }
  // Empty instead of a tombstone where no probe can pass through.
  if (part.refs[(at + 1) & part.mask] == 0) {
    part.refs[at] = 0;
    --part.used;
  } else {
    part.refs[at] = kTombstone;
  }
  --part.live;
  --size_;
}

std::size_t RefTable::memory_bytes() const {
  std::size_t bytes = parts_.size() * sizeof(Part);
  for (const Part& part : parts_) {
    bytes += part.refs.capacity() * sizeof(NodeRef) + part.tags.capacity() * sizeof(std::uint8_t);
  }
  return bytes;
}

}  // namespace kvtrie
