#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "storage/group/session_groups.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// An index of one model, to grow by hand, with groups at a threshold of 100 bits.
class GroupFixture : public testing::Test {
 protected:
  static constexpr double kThresholdBits = 100;
  static constexpr std::uint32_t kBlockTokens = 4;

  GroupFixture() { slot_ = *index_.AddModel(TenantId{1}, ModelId{}, kBlockTokens); }

  static TrieNodeId IdOf(std::uint64_t number) {
    TrieNodeId id;
    std::mt19937_64 random(number);
    for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
    return id;
  }

  // A block under `parent` (0: a first one) of so many bits; 0: not said, so 4 * 3.75 bits.
  NodeRef Grow(NodeRef parent, float bits) {
    const std::vector<TokenId> tokens(kBlockTokens);
    const std::uint64_t number = next_++;
    const NodeRef ref = index_.Insert({.id = IdOf(number),
                                       .parent = parent,
                                       .model = slot_,
                                       .path_hash = number * 0x9e3779b97f4a7c15u,
                                       .tokens = tokens,
                                       .frames = {.frame = {1, 1, 100}},
                                       .block_surprisal_bits = bits});
    groups_.OnInserted(ref);
    return ref;
  }
  // Blocks of 20 bits each in a row; the last one.
  NodeRef GrowPath(NodeRef parent, int blocks) {
    for (int block = 0; block < blocks; ++block) parent = Grow(parent, 20);
    return parent;
  }
  void Drop(NodeRef leaf) {
    groups_.OnErasing(leaf);
    index_.Erase(leaf);
  }
  // Drops a leaf and what has no other use above it.
  void DropPath(NodeRef leaf) {
    while (leaf != 0 && index_.node(leaf).is_leaf() && index_.name_count(leaf) == 0) {
      const NodeRef parent = index_.parent(leaf);
      Drop(leaf);
      leaf = parent;
    }
  }
  std::vector<NodeRef> AliveNodes() const {
    std::vector<NodeRef> alive;
    for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
      if (index_.alive(ref)) alive.push_back(ref);
    }
    return alive;
  }
  std::vector<NodeRef> AllGroups() const {
    return groups_.List(0, SIZE_MAX, [](NodeRef) { return true; });
  }
  // Where each session ends.
  std::vector<NodeRef> SessionEnds() const {
    std::vector<NodeRef> ends;
    for (const NodeRef ref : AliveNodes()) {
      const std::uint32_t least = index_.node(ref).is_leaf() ? 1 : 0;
      ends.insert(ends.end(), std::max(index_.name_count(ref), least), ref);
    }
    return ends;
  }
  // The path to a node, first block first.
  std::vector<NodeRef> PathTo(NodeRef ref) const {
    std::vector<NodeRef> path;
    for (; ref != 0; ref = index_.parent(ref)) path.insert(path.begin(), ref);
    return path;
  }

  TrieIndex index_{std::size_t{1} << 20};
  SessionGroups groups_{index_, kThresholdBits};
  ModelSlot slot_ = 0;
  std::uint64_t next_ = 1;
};

}  // namespace kvtrie
