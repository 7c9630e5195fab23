#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "storage/trie/surprisal.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// The trie as a probability model (PLT: arXiv:2604.06228, arXiv:2604.15356), in the papers'
// symbols:
//
//   s, s'       paths, named here by their deepest nodes
//   P(s)        the model's probability of a path;  I(s) = -log2 P(s), bits, grows along the path
//   s ^ s'      longest common prefix: the lowest common ancestor of the two nodes
//   d_T(s, s') = -log2 P(s ^ s') = I(s ^ s'), as arXiv:2604.15356 prints it. It grows with what two
//               paths share and d_T(s, s) = I(s): a similarity, whatever its name says. Here it is
//               SharedSurprisalBits, and SurprisalDistanceBits is the distance.
//
// I is what clients sent with their puts, and for blocks of which they said nothing an estimate
// (surprisal.h); IndexNode::path_is_known tells which.
//
// P(next block | node) is another thing: what the fleet is likely to send next, from counted
// traffic. A pass through a node is its put, and each lookup or touch that reached it; a put does
// not pass the stored prefix that it extends, since the lookup before it has. Uses are not stored,
// so counts begin anew with each start of the store.
//
// All read the index only: safe beside what its const methods are safe beside. Nodes of different
// models or tenants share nothing.

// The node of s ^ s'; 0: they share no block. O(depth).
NodeRef LowestCommonAncestor(const TrieIndex& index, NodeRef a, NodeRef b);

// I(s ^ s'), at least 0.
double SharedSurprisalBits(const TrieIndex& index, NodeRef a, NodeRef b);

// I(s) + I(s') - 2 I(s ^ s'): a metric on paths, 0 for equal ones, up to the rounding of floats.
double SurprisalDistanceBits(const TrieIndex& index, NodeRef a, NodeRef b);

// I(block of this node | path above).
double BlockSurprisalBitsOf(const TrieIndex& index, NodeRef ref);

// The Chinese restaurant with two parameters (Pitman-Yor), of which a node is one restaurant and
// each child a table: with N passes, of which c went on to a child and K children,
//   P(child)  = (c - kDiscount) / (N + kConcentration)
//   P(unseen) = (kConcentration + kDiscount K) / (N + kConcentration)
//   P(end)    = what is left: passes that went no further
// A block that was seen once after a node that was passed once is so expected with 1/4.
inline constexpr double kDiscount = 0.5;
inline constexpr double kConcentration = 1;

struct NextBlock {
  NodeRef child = 0;
  double probability = 0;
};
struct NextBlocks {
  std::vector<NextBlock> seen;  // likeliest first, equal ones by id: the same on every machine
  double unseen = 1;            // of all blocks that are no child
  double end = 0;
};

// Passes through a node; at least 1.
std::uint64_t PassCount(const TrieIndex& index, NodeRef ref);

// What follows a node, or begins a path where `parent` is 0. O(children).
NextBlocks NextBlocksAfter(const TrieIndex& index, ModelSlot slot, NodeRef parent);

// The same from counts of one's own: N, and the c of each child. N is taken for no less than their
// sum.
NextBlocks NextBlocksOf(const TrieIndex& index, double passes,
                        std::span<const std::pair<NodeRef, double>> child_passes);

// The likeliest block after a node; nullopt: none has probability `least`, or there are so many
// children that to look at them would take long. REQUIRES: `least` at least 0.5, so that there is
// one at most.
std::optional<NextBlock> LikelyNextBlock(const TrieIndex& index, NodeRef parent, double least);

// P(block of this node | its parent). O(siblings).
double NextBlockProbability(const TrieIndex& index, NodeRef child);

// -log2 of the probability of one block that is no child: P(unseen), and for its tokens what text
// costs (kPriorBitsPerToken).
double UnseenBlockBits(const NextBlocks& next, std::uint32_t block_tokens);

}  // namespace kvtrie
