#include "storage/trie/trie_probability.h"

#include <algorithm>
#include <cmath>

namespace kvtrie {
namespace {

double PathBits(const TrieIndex& index, NodeRef ref) {
  return ref == 0 ? 0 : static_cast<double>(index.node(ref).surprisal_bits);
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
  return std::uint64_t{1} + index.node(ref).use_count();
}

NextBlocks NextBlocksOf(const TrieIndex& index, double passes,
                        std::span<const std::pair<NodeRef, double>> child_passes) {
  double on = 0;
  for (const auto& [child, count] : child_passes) on += count;
  const double through = std::max(passes, on);
  const double all = through + kConcentration;
  NextBlocks next;
  next.seen.reserve(child_passes.size());
  for (const auto& [child, count] : child_passes) {
    next.seen.push_back({child, (count - kDiscount) / all});
  }
  std::sort(next.seen.begin(), next.seen.end(), [&index](const NextBlock& a, const NextBlock& b) {
    if (a.probability != b.probability) return a.probability > b.probability;
    return index.node(a.child).id < index.node(b.child).id;
  });
  next.unseen = (kConcentration + kDiscount * static_cast<double>(next.seen.size())) / all;
  next.end = (through - on) / all;
  return next;
}

NextBlocks NextBlocksAfter(const TrieIndex& index, ModelSlot slot, NodeRef parent) {
  std::vector<std::pair<NodeRef, double>> child_passes;
  NodeRef child = parent == 0 ? index.model(slot).first_child : index.node(parent).first_child;
  for (; child != 0; child = index.node(child).next_sibling) {
    child_passes.emplace_back(child, static_cast<double>(PassCount(index, child)));
  }
  const double passes = parent == 0 ? 0 : static_cast<double>(PassCount(index, parent));
  return NextBlocksOf(index, passes, child_passes);
}

std::optional<NextBlock> LikelyNextBlock(const TrieIndex& index, NodeRef parent, double least) {
  constexpr int kChildrenMax = 64;
  double on = 0;
  double most = 0;
  NodeRef likeliest = 0;
  int children = 0;
  for (NodeRef child = index.node(parent).first_child; child != 0;
       child = index.node(child).next_sibling) {
    if (++children > kChildrenMax) return std::nullopt;
    const auto passes = static_cast<double>(PassCount(index, child));
    on += passes;
    if (passes <= most) continue;
    most = passes;
    likeliest = child;
  }
  if (likeliest == 0) return std::nullopt;
  const double through = std::max(static_cast<double>(PassCount(index, parent)), on);
  const double probability = (most - kDiscount) / (through + kConcentration);
  if (probability < least) return std::nullopt;
  return NextBlock{likeliest, probability};
}

double NextBlockProbability(const TrieIndex& index, NodeRef child) {
  const NextBlocks next = NextBlocksAfter(index, index.node(child).model, index.parent(child));
  for (const NextBlock& block : next.seen) {
    if (block.child == child) return block.probability;
  }
  return 0;
}

double UnseenBlockBits(const NextBlocks& next, std::uint32_t block_tokens) {
  return -std::log2(next.unseen) + block_tokens * kPriorBitsPerToken;
}

}  // namespace kvtrie
