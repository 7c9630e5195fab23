#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "storage/trie/trie_index.h"

namespace kvtrie {

// What a group comes to. Blocks and bytes are those of all its members' paths from the first block,
// so blocks above the cut node count for every group below them.
struct GroupSums {
  std::uint64_t sessions = 0;
  std::uint64_t blocks = 0;  // stored
  std::uint64_t stored_bytes = 0;
  // What the members would take, if each stored its own path, less what is stored.
  std::uint64_t saved_bytes = 0;
  // The prefix of all members.
  std::uint32_t shared_blocks = 0;
  double shared_bits = 0;
  bool is_estimated = false;  // clients did not say the surprisal of all of it
  NodeRef shared_end = 0;
  // The centroid: the most probable path of the group.
  NodeRef centroid_end = 0;
  std::uint32_t centroid_blocks = 0;
};

// Blocks in a row that the same sessions pass.
struct GroupBranch {
  std::int32_t parent = -1;  // place of the branch that it hangs on; -1: the shared prefix
  NodeRef first = 0;
  NodeRef last = 0;
  std::uint32_t blocks = 0;
  double surprisal_bits = 0;  // of these blocks
  bool is_estimated = false;
  std::uint64_t stored_bytes = 0;
  std::uint64_t sessions = 0;
  double probability = 1;  // P(first block | where it branches off), of traffic
  bool on_centroid = false;
};

// One session group, looked at in full: sums, and its subtree as branches. O(blocks of the group)
// to make. Reads the index only, and only while it is made or asked: belongs under the index's
// lock.
class GroupTree {
 public:
  // What the frames of a node take on disk.
  using BytesOf = std::function<std::uint64_t(NodeRef)>;

  // REQUIRES: `cut` is the cut node of a group.
  GroupTree(const TrieIndex& index, NodeRef cut, const BytesOf& bytes_of);

  const GroupSums& sums() const { return sums_; }

  // Parents first, among siblings those with most sessions first, then by id. Of more than
  // `branches_max` (at least 1) those that most sessions pass; `is_all` says whether that is all.
  std::vector<GroupBranch> Branches(std::size_t branches_max, bool* is_all) const;

 private:
  struct Place {
    NodeRef ref = 0;
    std::uint32_t parent = 0;  // place of it
    std::uint32_t first_child = 0;
    std::uint32_t child_count = 0;
    std::uint64_t sessions = 0;  // that pass it or end at it
    // Through it: those that were counted, and no fewer than went on, since each stored path was
    // passed once.
    std::uint64_t passes = 0;
    std::uint64_t bytes = 0;
  };

  void FindCentroid();
  // The last place of the branch that begins with this one.
  std::uint32_t EndOfBranch(std::uint32_t place) const;
  GroupBranch MakeBranch(std::uint32_t first, std::uint32_t last) const;

  const TrieIndex& index_;
  std::vector<Place> places_;      // breadth first from the cut node
  std::vector<NodeRef> centroid_;  // from the cut node
  std::uint64_t bytes_above_ = 0;
  GroupSums sums_;
};

}  // namespace kvtrie
