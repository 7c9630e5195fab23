#include "storage/engine/leaf_set.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"

namespace kvtrie {
namespace {

constexpr int kLooksPerAdd = 2;

}  // namespace

void LeafSet::DropAt(std::size_t at) {
  refs_[at] = refs_.back();
  refs_.pop_back();
}

void LeafSet::Add(const TrieIndex& index, NodeRef ref) {
  refs_.push_back(ref);
  for (int look = 0; look < kLooksPerAdd; ++look) {
    if (hand_ + 1 >= refs_.size()) hand_ = 0;
    if (!IsLeaf(index, refs_[hand_])) DropAt(hand_);
    if (refs_.empty()) return;
    ++hand_;  // also past the one that was moved there: it is the newest
  }
}

std::vector<NodeRef> LeafSet::Draw(const TrieIndex& index, std::size_t count) {
  std::vector<NodeRef> drawn;
  absl::flat_hash_set<NodeRef> seen;
  const auto take = [&](NodeRef ref) {
    if (seen.insert(ref).second) drawn.push_back(ref);
  };
  if (refs_.size() <= 2 * count) {
    for (std::size_t at = 0; at < refs_.size();) {
      if (IsLeaf(index, refs_[at]) && !seen.contains(refs_[at])) {
        take(refs_[at++]);
      } else {
        DropAt(at);
      }
    }
    return drawn;
  }
  // The first places, after each has been exchanged with one behind it.
  for (std::size_t place = 0; drawn.size() < count && place < refs_.size();) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    std::swap(refs_[place], refs_[place + (random_ >> 33) % (refs_.size() - place)]);
    if (IsLeaf(index, refs_[place]) && !seen.contains(refs_[place])) {
      take(refs_[place++]);
    } else {
      DropAt(place);
    }
  }
  return drawn;
}

}  // namespace kvtrie
