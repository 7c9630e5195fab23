#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/trie/trie_index.h"

namespace kvtrie {

// The leaves of a trie in an array, so that some can be drawn without a walk. It is told of nodes
// that become leaves and finds out by itself which no longer are: each node that is added has two
// others looked at, so at most half of what is in it is stale in the long run, and no call takes
// long. A node may be in it twice.
//
// Not thread-safe.
class LeafSet {
 public:
  void Add(const TrieIndex& index, NodeRef ref);
  // Up to `count` different leaves, other ones than the last time as far as there are any.
  std::vector<NodeRef> Draw(const TrieIndex& index, std::size_t count);
  std::size_t size() const { return refs_.size(); }
  std::size_t memory_bytes() const { return refs_.capacity() * sizeof(NodeRef); }

 private:
  static bool IsLeaf(const TrieIndex& index, NodeRef ref) {
    return index.alive(ref) && index.node(ref).is_leaf();
  }
  void DropAt(std::size_t at);

  std::vector<NodeRef> refs_;
  std::size_t hand_ = 0;      // where the next look for stale ones is
  std::uint64_t random_ = 1;  // state of the draws
};

}  // namespace kvtrie
