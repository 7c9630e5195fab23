#include "storage/group/group_tree.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "storage/trie/trie_probability.h"

namespace kvtrie {

GroupTree::GroupTree(const TrieIndex& index, NodeRef cut, const BytesOf& bytes_of) : index_(index) {
  places_.push_back({.ref = cut});
  for (std::uint32_t at = 0; at < places_.size(); ++at) {
    const IndexNode& node = index_.node(places_[at].ref);
    places_[at].bytes = bytes_of(places_[at].ref);
    places_[at].sessions = std::max(index_.name_count(places_[at].ref), node.is_leaf() ? 1u : 0u);
    places_[at].passes = PassCount(index_, places_[at].ref);
    places_[at].first_child = static_cast<std::uint32_t>(places_.size());
    for (NodeRef child = node.first_child; child != 0; child = index_.node(child).next_sibling) {
      places_.push_back({.ref = child, .parent = at});
    }
    places_[at].child_count = static_cast<std::uint32_t>(places_.size()) - places_[at].first_child;
  }
  for (std::size_t at = places_.size(); at-- > 0;) {
    Place& place = places_[at];
    std::uint64_t went_on = 0;
    for (std::uint32_t i = 0; i < place.child_count; ++i) {
      place.sessions += places_[place.first_child + i].sessions;
      went_on += places_[place.first_child + i].passes;
    }
    place.passes = std::max(place.passes, went_on);
  }
  FindCentroid();

  sums_.sessions = places_.front().sessions;
  sums_.blocks = places_.size();
  for (const Place& place : places_) {
    sums_.stored_bytes += place.bytes;
    sums_.saved_bytes += place.bytes * (place.sessions - 1);
  }
  for (NodeRef above = index_.parent(cut); above != 0; above = index_.parent(above)) {
    bytes_above_ += bytes_of(above);
    ++sums_.blocks;
  }
  sums_.stored_bytes += bytes_above_;
  sums_.saved_bytes += bytes_above_ * (sums_.sessions - 1);

  sums_.shared_end = places_[EndOfBranch(0)].ref;
  const IndexNode& shared = index_.node(sums_.shared_end);
  sums_.shared_blocks = shared.depth;
  sums_.shared_bits = static_cast<double>(shared.surprisal_bits);
  sums_.is_estimated = shared.path_is_known == 0;
  sums_.centroid_end = centroid_.back();
  sums_.centroid_blocks = index_.node(centroid_.back()).depth;
}

// Greedily by P(next block): the child with most passes, of equal ones that with the smaller id.
void GroupTree::FindCentroid() {
  std::uint32_t at = 0;
  while (true) {
    centroid_.push_back(places_[at].ref);
    const Place& place = places_[at];
    if (place.child_count == 0) return;
    at = place.first_child;
    for (std::uint32_t child = at + 1; child < place.first_child + place.child_count; ++child) {
      const std::uint64_t passes = places_[child].passes;
      const bool is_equal = passes == places_[at].passes;
      if (passes > places_[at].passes ||
          (is_equal && index_.node(places_[child].ref).id < index_.node(places_[at].ref).id)) {
        at = child;
      }
    }
  }
}

std::uint32_t GroupTree::EndOfBranch(std::uint32_t place) const {
  while (places_[place].child_count == 1 && index_.name_count(places_[place].ref) == 0) {
    place = places_[place].first_child;
  }
  return place;
}

GroupBranch GroupTree::MakeBranch(std::uint32_t first, std::uint32_t last) const {
  GroupBranch branch;
  branch.first = places_[first].ref;
  branch.last = places_[last].ref;
  branch.sessions = places_[first].sessions;
  for (std::uint32_t at = last;; at = places_[at].parent) {
    branch.stored_bytes += places_[at].bytes;
    if (index_.node(places_[at].ref).is_known == 0) branch.is_estimated = true;
    if (at == first) break;
  }
  const IndexNode& first_node = index_.node(branch.first);
  const IndexNode& last_node = index_.node(branch.last);
  if (first == 0) {
    // The shared prefix, from the first block.
    branch.blocks = last_node.depth;
    branch.surprisal_bits = static_cast<double>(last_node.surprisal_bits);
    branch.is_estimated = last_node.path_is_known == 0;
    branch.stored_bytes += bytes_above_;
    branch.on_centroid = true;
    for (NodeRef above = index_.parent(branch.first); above != 0; above = index_.parent(above)) {
      branch.first = above;
    }
    return branch;
  }
  const NodeRef parent = index_.parent(branch.first);
  branch.blocks = last_node.depth - first_node.depth + 1;
  branch.surprisal_bits = static_cast<double>(last_node.surprisal_bits) -
                          static_cast<double>(index_.node(parent).surprisal_bits);
  const std::size_t on_path = first_node.depth - index_.node(places_.front().ref).depth;
  branch.on_centroid = on_path < centroid_.size() && centroid_[on_path] == branch.first;
  return branch;
}

std::vector<GroupBranch> GroupTree::Branches(std::size_t branches_max, bool* is_all) const {
  struct Found {
    std::uint32_t first = 0;
    std::uint32_t last = 0;
    std::vector<std::size_t> children;  // in `found`
  };
  // Most sessions first, then the smaller id.
  struct Candidate {
    std::uint64_t sessions = 0;
    TrieNodeId id;
    std::uint32_t place = 0;
    std::size_t parent = 0;  // in `found`
    bool operator<(const Candidate& other) const {
      if (sessions != other.sessions) return sessions < other.sessions;
      return other.id < id;
    }
  };
  std::vector<Found> found;
  std::priority_queue<Candidate> candidates;
  candidates.push({places_.front().sessions, index_.node(places_.front().ref).id, 0, 0});
  while (!candidates.empty() && found.size() < branches_max) {
    const Candidate next = candidates.top();
    candidates.pop();
    const std::size_t index = found.size();
    found.push_back({next.place, EndOfBranch(next.place), {}});
    if (index > 0) found[next.parent].children.push_back(index);
    const Place& end = places_[found.back().last];
    for (std::uint32_t child = end.first_child; child < end.first_child + end.child_count;
         ++child) {
      candidates.push({places_[child].sessions, index_.node(places_[child].ref).id, child, index});
    }
  }
  *is_all = candidates.empty();

  absl::flat_hash_map<NodeRef, double> probabilities;
  for (const Found& branch : found) {
    if (branch.children.empty()) continue;
    const Place& end = places_[branch.last];
    std::vector<std::pair<NodeRef, double>> child_passes;
    for (std::uint32_t child = end.first_child; child < end.first_child + end.child_count;
         ++child) {
      child_passes.emplace_back(places_[child].ref, static_cast<double>(places_[child].passes));
    }
    for (const NextBlock& next :
         NextBlocksOf(index_, static_cast<double>(end.passes), child_passes).seen) {
      probabilities.emplace(next.child, next.probability);
    }
  }
  std::vector<GroupBranch> branches;
  std::vector<std::pair<std::size_t, std::int32_t>> stack = {{0, -1}};
  while (!stack.empty()) {
    const auto [index, parent] = stack.back();
    stack.pop_back();
    const auto place = static_cast<std::int32_t>(branches.size());
    branches.push_back(MakeBranch(found[index].first, found[index].last));
    branches.back().parent = parent;
    if (parent >= 0) branches.back().probability = probabilities[branches.back().first];
    const auto& children = found[index].children;
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      stack.emplace_back(*child, place);
    }
  }
  return branches;
}

}  // namespace kvtrie
