#include "storage/trie/trie_probability.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvtrie {
namespace {

double PathBits(const TrieIndex& index, NodeRef ref) {
  return ref == 0 ? 0 : static_cast<double>(index.node(ref).surprisal_bits);
}

// What one restaurant has counted. Gathered once: lookups may count on meanwhile.
struct Passes {
  double through = 0;  // N: no less than what went on
  double on = 0;       // the sum of c
  std::vector<std::pair<NodeRef, double>> of_children;

  double Share(double child_passes) const {
    return (child_passes - kDiscount) / (through + kConcentration);
  }
};

Passes CountPasses(const TrieIndex& index, NodeRef first_child, NodeRef parent) {
  Passes passes;
  for (NodeRef child = first_child; child != 0; child = index.node(child).next_sibling) {
    passes.of_children.emplace_back(child, static_cast<double>(PassCount(index, child)));
    passes.on += passes.of_children.back().second;
  }
  const double counted = parent == 0 ? 0 : static_cast<double>(PassCount(index, parent));
  passes.through = std::max(counted, passes.on);
  return passes;
}

NodeRef FirstChild(const TrieIndex& index, ModelSlot slot, NodeRef parent) {
  return parent == 0 ? index.model(slot).first_child : index.node(parent).first_child;
}

}  // namespace

NodeRef LowestCommonAncestor(const TrieIndex& index, NodeRef a, NodeRef b) {
  while (a != b) {
    if (a == 0 || b == 0) return 0;
    const std::uint32_t depth_a = index.node(a).depth;
    const std::uint32_t depth_b = index.node(b).depth;
    if (depth_a >= depth_b) a = index.parent(a);
    if (depth_b >= depth_a) b = index.parent(b);
  }
  return a;
}

double SharedSurprisalBits(const TrieIndex& index, NodeRef a, NodeRef b) {
  return PathBits(index, LowestCommonAncestor(index, a, b));
}

double SurprisalDistanceBits(const TrieIndex& index, NodeRef a, NodeRef b) {
  return PathBits(index, a) + PathBits(index, b) - 2 * SharedSurprisalBits(index, a, b);
}

double BlockSurprisalBitsOf(const TrieIndex& index, NodeRef ref) {
  return PathBits(index, ref) - PathBits(index, index.parent(ref));
}

std::uint64_t PassCount(const TrieIndex& index, NodeRef ref) {
  return std::uint64_t{1} + index.use_count(ref);
}

NextBlocks NextBlocksAfter(const TrieIndex& index, ModelSlot slot, NodeRef parent) {
  const Passes passes = CountPasses(index, FirstChild(index, slot, parent), parent);
  NextBlocks next;
  next.seen.reserve(passes.of_children.size());
  for (const auto& [child, count] : passes.of_children) {
    next.seen.push_back({child, passes.Share(count)});
  }
  std::sort(next.seen.begin(), next.seen.end(), [&index](const NextBlock& a, const NextBlock& b) {
    if (a.probability != b.probability) return a.probability > b.probability;
    return index.node(a.child).id < index.node(b.child).id;
  });
  const double all = passes.through + kConcentration;
  next.unseen = (kConcentration + kDiscount * static_cast<double>(next.seen.size())) / all;
  next.end = (passes.through - passes.on) / all;
  return next;
}

double NextBlockProbability(const TrieIndex& index, NodeRef child) {
  const NodeRef parent = index.parent(child);
  const Passes passes =
      CountPasses(index, FirstChild(index, index.node(child).model, parent), parent);
  for (const auto& [other, count] : passes.of_children) {
    if (other == child) return passes.Share(count);
  }
  return 0;
}

double UnseenBlockBits(const NextBlocks& next, std::uint32_t block_tokens) {
  return -std::log2(next.unseen) + block_tokens * kPriorBitsPerToken;
}

std::vector<NodeRef> MostProbablePath(const TrieIndex& index, NodeRef from) {
  std::vector<NodeRef> path = {from};
  while (true) {
    // The likeliest child is that with most passes.
    NodeRef best = 0;
    std::uint64_t most = 0;
    for (NodeRef child = index.node(path.back()).first_child; child != 0;
         child = index.node(child).next_sibling) {
      const std::uint64_t passes = PassCount(index, child);
      if (passes > most || (passes == most && index.node(child).id < index.node(best).id)) {
        best = child;
        most = passes;
      }
    }
    if (best == 0) return path;
    path.push_back(best);
  }
}

}  // namespace kvtrie
