#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "storage/kv/ids.h"
#include "storage/kv/quality.h"
#include "storage/kv/trie_node_id.h"
#include "storage/trie/node_traffic.h"
#include "storage/trie/path_hash.h"
#include "storage/trie/ref_table.h"
#include "storage/trie/token_cache.h"

namespace kvtrie {

// Place of a (tenant, model) in the index.
using ModelSlot = std::uint16_t;

// Where a node's frame lies; mirrors PayloadLocation, which this folder may not include. segment 0
// = no frame.
struct FrameRef {
  std::uint32_t segment = 0;
  std::uint32_t offset_units = 0;
  std::uint32_t record_bytes = 0;

  bool operator==(const FrameRef&) const = default;
};

// The frames of a node as the index keeps them: the smaller one, and what the other one is good
// for. Where that lies is said by the node's row.
struct NodeFrames {
  FrameRef frame;
  Quality quality = Quality::kExact;
  CodecId codec = CodecId::kRaw;
  std::optional<Quality> other_quality{};  // nullopt: there is no other
};

// What the index keeps of a trie node in memory. Links are the index's own; the rest may be read by
// whoever holds the index's lock.
struct IndexNode {
  TrieNodeId id;
  NodeRef parent = 0;  // kRootBit | model for first blocks
  NodeRef first_child = 0;
  NodeRef next_sibling = 0;
  NodeRef previous_sibling = 0;
  FrameRef frame;
  TokenCache::Slot token_slot = 0;
  std::uint32_t edge_hash = 0;
  std::uint32_t last_used_seconds = 0;  // atomic_ref
  std::uint32_t traffic_bits = 0;       // atomic_ref
  std::uint32_t expires_seconds = 0;    // 0 = never
  float surprisal_bits = 0;             // of the whole path; see NewNode
  std::uint32_t depth : 22 = 0;         // 1 = first block
  std::uint32_t priority : 4 = 0;
  std::uint32_t quality_bits : 3 = 0;  // of the frame
  std::uint32_t on_lossy : 1 = 0;
  std::uint32_t has_extra : 1 = 0;
  std::uint32_t not_codable : 1 = 0;  // coding the frame was tried and gave nothing smaller
  ModelSlot model = 0;
  std::uint8_t alive : 1 = 0;
  std::uint8_t name_bits : 7 = 0;           // sessions with a name that end here, up to 127
  std::uint8_t codec_bits : 3 = 0;          // of the frame
  std::uint8_t other_quality_bits : 3 = 0;  // 0: there is no other frame
  std::uint8_t is_known : 1 = 0;            // the block's surprisal was given
  std::uint8_t path_is_known : 1 = 0;       // and that of all blocks above it

  static constexpr NodeRef kRootBit = 0x80000000u;
  // Both may be read while others touch the node.
  NodeTraffic traffic() const {
    return NodeTraffic(std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(traffic_bits))
                           .load(std::memory_order_relaxed));
  }
  std::uint32_t idle_seconds(std::uint32_t now_seconds) const {
    const std::uint32_t last =
        std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(last_used_seconds))
            .load(std::memory_order_relaxed);
    return now_seconds > last ? now_seconds - last : 0;
  }
  // How often a path through it was asked for.
  std::uint32_t use_count() const { return traffic().uses(); }
  bool has_frame() const { return frame.segment != 0; }
  Quality quality() const { return static_cast<Quality>(quality_bits); }
  CodecId codec() const { return static_cast<CodecId>(codec_bits); }
  bool has_other() const { return other_quality_bits != 0; }
  Quality other_quality() const { return static_cast<Quality>(other_quality_bits); }
  // The frame in the index is good enough; it is the one to serve then, being the smaller.
  bool serves(Quality min_quality) const {
    return has_frame() && IsAtLeast(quality(), min_quality);
  }
  // Exact KV that could be kept in coded form beside.
  bool may_be_coded() const {
    return has_frame() && !has_other() && quality() == Quality::kExact && on_lossy == 0 &&
           not_codable == 0;
  }
  // Only the other one is.
  bool only_other_serves(Quality min_quality) const {
    return !serves(min_quality) && has_other() && IsAtLeast(other_quality(), min_quality);
  }
  bool any_serves(Quality min_quality) const {
    return serves(min_quality) || only_other_serves(min_quality);
  }
  std::optional<Quality> quality_on(Rung rung) const {
    if (!has_frame()) return std::nullopt;
    if (RungOf(codec()) == rung) return quality();
    return has_other() ? std::optional(other_quality()) : std::nullopt;
  }
  bool expired(std::uint32_t now_seconds) const {
    return expires_seconds != 0 && expires_seconds <= now_seconds;
  }
  bool is_leaf() const { return first_child == 0; }
};
static_assert(sizeof(IndexNode) <= 76,
              "the index promises at most 100 bytes per node, tables included");

// What a new node is made of.
struct NewNode {
  TrieNodeId id{};
  NodeRef parent = 0;  // 0: a first block
  ModelSlot model = 0;
  std::uint64_t path_hash = 0;
  Provenance provenance = Provenance::kExact;
  std::string_view salt{};  // first blocks only
  std::string_view extra_key{};
  std::span<const TokenId> tokens{};
  NodeFrames frames{};
  // I(block | path above) as the client gave it; 0 = not known, and estimated (surprisal.h).
  float block_surprisal_bits = 0;
  std::uint32_t last_used_seconds = 0;
  NodeTraffic traffic{};
  std::uint32_t expires_seconds = 0;
  std::uint32_t priority = 0;
  std::uint32_t depth = 0;  // InsertUnlinked only
};

struct ModelRoot {
  TenantId tenant;
  ModelId model;
  std::uint32_t block_tokens = 0;  // 0 until the model is registered
  NodeRef first_child = 0;
  std::uint64_t node_count = 0;
  std::uint64_t frame_count = 0;         // nodes that have one
  std::uint64_t other_frame_count = 0;   // nodes that have two
  std::uint64_t codable_node_count = 0;  // IndexNode::may_be_coded
  std::uint64_t lossy_node_count = 0;
  std::uint64_t record_bytes = 0;  // of the frames that the index keeps
};

struct WalkResult {
  std::vector<NodeRef> refs;              // block by block
  std::vector<std::uint32_t> unverified;  // blocks of `refs` whose tokens are not in memory
};

// The probabilistic language trie of all tenants and models as it lies in memory: nodes, edges by
// keyed hash, traffic. At most 100 bytes per node beside the tokens, which lie in a bounded cache
// of their own.
//
// A walk looks at every block of a path: it finds an edge by hash, then compares parent, tokens,
// salt and extra key in full; where a node's tokens are not in memory the block is reported as
// unverified, and the caller compares with the stored row.
//
// Not thread-safe; const methods (and Touch) may run side by side.
class TrieIndex {
 public:
  explicit TrieIndex(std::size_t token_cache_bytes) : tokens_(token_cache_bytes) {}

  // Adds a model or completes one that was only known by name. Idempotent. nullopt: 65,535 are
  // there.
  std::optional<ModelSlot> AddModel(TenantId tenant, const ModelId& model,
                                    std::uint32_t block_tokens);
  std::optional<ModelSlot> FindModel(TenantId tenant, const ModelId& model) const;
  const ModelRoot& model(ModelSlot slot) const { return models_[slot]; }
  std::size_t model_count() const { return models_.size(); }

  // Leading blocks that are stored with any frame of at least `min_quality` and have not expired.
  // Where nodes on lossy KV are allowed and lead further than the exact path, the longer one wins.
  WalkResult Walk(ModelSlot slot, const PathHasher& hasher, const HashedPath& path,
                  Quality min_quality, std::uint32_t now_seconds) const;

  // Exactly the node of this block under this parent (0 = root), or 0, with or without a frame.
  // `*verified` false: its tokens are not in memory.
  NodeRef FindChild(ModelSlot slot, NodeRef parent, const HashedPath& path, std::uint32_t block,
                    std::uint64_t hash, Provenance provenance, bool* verified) const;

  NodeRef FindById(const TrieNodeId& id) const;

  NodeRef Insert(const NewNode& node);

  // For loading in any order: InsertUnlinked all, Link those whose parent (0 = root) is there,
  // Erase the others with what hangs on them, leaves first, then FinishLoading.
  NodeRef InsertUnlinked(const NewNode& node);
  void Link(NodeRef ref, NodeRef parent);
  void FinishLoading();

  // REQUIRES: a leaf.
  void Erase(NodeRef ref);

  void SetFrames(NodeRef ref, const NodeFrames& frames);
  // Until its frames change, may_be_coded is false.
  void MarkNotCodable(NodeRef ref);
  void SetRetention(NodeRef ref, std::uint32_t expires_seconds, std::uint32_t priority);
  // Sessions with a name that end at a node. Gone with the node.
  std::uint32_t name_count(NodeRef ref) const;
  void SetNameCount(NodeRef ref, std::uint32_t count);
  // Puts a node's tokens into the cache, if they are not there.
  void CacheTokens(NodeRef ref, std::span<const TokenId> tokens);
  // Tokens of a node, or empty when they are not in memory.
  std::span<const TokenId> CachedTokens(NodeRef ref) const;
  std::string_view extra_key(NodeRef ref) const;
  std::string_view salt(NodeRef ref) const;

  // Counts a use. Safe beside other const calls.
  void Touch(NodeRef ref, std::uint32_t now_seconds) const;

  const IndexNode& node(NodeRef ref) const { return chunks_[ref / kChunkNodes][ref % kChunkNodes]; }
  // 0 for first blocks.
  NodeRef parent(NodeRef ref) const {
    const NodeRef up = node(ref).parent;
    return (up & IndexNode::kRootBit) != 0 ? 0 : up;
  }
  // Refs are [1, ref_end()); those that are not alive are holes.
  NodeRef ref_end() const { return ref_end_; }
  bool alive(NodeRef ref) const { return ref != 0 && ref < ref_end_ && node(ref).alive != 0; }

  std::size_t node_count() const { return node_count_; }
  std::size_t memory_bytes() const;  // without tokens
  // What of it nodes fill: falls when nodes go, where memory_bytes stays.
  std::size_t used_bytes() const { return node_count_ * kNodeBytesMax + extra_bytes_; }
  static constexpr std::size_t kNodeBytesMax = 100;
  std::size_t token_cache_bytes() const { return tokens_.memory_bytes(); }

  // The structure is what it should be: links both ways, depths, tables, counts, sums.
  // Internal names the first fault.
  absl::Status CheckInvariants() const;

 private:
  static constexpr std::size_t kChunkNodes = 4096;
  static constexpr std::uint32_t kNameBitsMax = 127;  // stands for what many_names_ says

  struct Extra {
    std::string salt;
    std::string extra_key;
  };

  IndexNode& mutable_node(NodeRef ref) { return chunks_[ref / kChunkNodes][ref % kChunkNodes]; }
  NodeRef AllocateRef();
  void LinkChild(NodeRef ref, NodeRef parent_link);
  void AddSurprisalAbove(NodeRef ref, NodeRef parent);
  bool Matches(NodeRef ref, NodeRef parent_link, Provenance provenance, std::string_view salt,
               std::string_view extra_key, std::span<const TokenId> tokens, bool* verified) const;
  void PrefetchNode(std::uint32_t edge_hash) const;
  void PrefetchTokens(std::uint32_t edge_hash) const;
  NodeRef FindEdge(std::uint32_t edge_hash, NodeRef parent_link, Provenance provenance,
                   std::string_view salt, std::string_view extra_key,
                   std::span<const TokenId> tokens, bool* verified) const;
  static std::uint32_t EdgeHash(std::uint64_t path_hash) {
    return static_cast<std::uint32_t>(path_hash >> 32);
  }
  static std::uint32_t IdHash(const TrieNodeId& id);

  std::vector<std::unique_ptr<IndexNode[]>> chunks_;
  NodeRef ref_end_ = 1;
  NodeRef free_ref_ = 0;  // list through `parent`
  std::size_t node_count_ = 0;
  RefTable edges_;
  RefTable ids_;
  TokenCache tokens_;
  absl::flat_hash_map<NodeRef, Extra> extras_;
  absl::flat_hash_map<NodeRef, std::uint32_t> many_names_;  // of nodes with more than fit
  std::size_t extra_bytes_ = 0;
  std::vector<ModelRoot> models_;
  absl::flat_hash_map<std::pair<TenantId, ModelId>, ModelSlot> model_slots_;
};

}  // namespace kvtrie
