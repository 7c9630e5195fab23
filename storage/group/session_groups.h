#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// Groups of sessions that share at least a threshold T of surprisal, kept up to date as sessions
// come and go.
//
// A session is a named one, which ends where its name says, or without a name a maximal path: a
// leaf that no name ends at. So a node is the end of max(names, 1) sessions if it is a leaf, else
// of as many as names end at it.
//
// Why a group is a subtree. Agglomeration joins what is nearest until no two groups share T bits.
// What two sessions share is I of their lowest common ancestor, and I grows along every path, so
// for any three sessions the two smaller of I(a^b), I(b^c), I(a^c) are equal: the similarity is an
// ultrametric. Then single, complete and average linkage all give one tree, and that tree is the
// trie. Cutting it at T joins a and b exactly if I(a^b) >= T, that is if a node with I >= T lies
// above both; the highest such node on a path is its cut node. Hence: a group is what ends at or
// below one cut node, if that is two sessions or more. No pair has to be compared, the order in
// which sessions arrive does not matter, and a restart finds the same groups.
//
// What of this changes with traffic: a second session under a cut node makes a group, the last but
// one that goes dissolves it. What all members share is the path to their lowest common ancestor
// (GroupTree), which moves up when a member comes that leaves it earlier, and down when one goes.
// The cut node stays, and its id names the group. What a stored node's surprisal is does not
// change, so cuts do not move, and groups never merge or split otherwise than by the sessions in
// them.
//
// Bounded memory: an entry for each group and none for a session; a lone session is known by its
// cut node having no entry. Work: O(1) for a block that continues a path, else a walk up to the cut
// node.
//
// Not thread-safe; const methods may run side by side. Belongs under the index's lock.
class SessionGroups {
 public:
  // `threshold_bits` 0: no groups. The index outlives this.
  SessionGroups(TrieIndex& index, double threshold_bits)
      : index_(index), threshold_bits_(threshold_bits) {}

  bool enabled() const { return threshold_bits_ > 0; }
  double threshold_bits() const { return threshold_bits_; }

  // Counts anew, after the index was loaded. O(nodes).
  void Rebuild();

  // What happens to the index. An erased leaf is told before, all else after.
  void OnInserted(NodeRef ref);
  void OnErasing(NodeRef ref);
  // A named session ends here from now on, or does no more. Removing a name that is not there does
  // nothing.
  void AddName(NodeRef ref);
  void RemoveName(NodeRef ref);

  // Whether paths share enough down to this node.
  bool IsBelowThreshold(NodeRef ref) const {
    return static_cast<double>(index_.node(ref).surprisal_bits) < threshold_bits_;
  }
  // The cut node at or above this node; 0: none, what the path to it shares is less than T.
  NodeRef CutOf(NodeRef ref) const;
  // Sessions of the group that this node is the cut node of; 0: it is not one.
  std::uint32_t SessionCount(NodeRef cut) const;

  // Cut nodes of groups behind `after` (0: from the first) in the order of their refs, at most
  // `count` of those that pass.
  std::vector<NodeRef> List(NodeRef after, std::size_t count,
                            const std::function<bool(NodeRef)>& pass) const;

  std::size_t group_count() const { return session_counts_.size(); }
  std::size_t memory_bytes() const;

  // Groups and their counts are those of the index. Internal names the first fault. O(nodes).
  absl::Status CheckInvariants() const;

 private:
  using SessionCounts = absl::btree_map<NodeRef, std::uint32_t>;  // by cut node, 2 or more

  std::uint32_t SessionsEndingAt(NodeRef ref, bool is_leaf) const;
  void Add(NodeRef ref, std::int64_t sessions);
  void SetNames(NodeRef ref, std::uint32_t count);
  std::uint64_t CountBelow(NodeRef cut) const;
  SessionCounts CountAnew() const;

  TrieIndex& index_;
  const double threshold_bits_;
  SessionCounts session_counts_;
};

}  // namespace kvtrie
