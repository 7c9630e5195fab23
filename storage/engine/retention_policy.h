#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/engine/compute_speeds.h"
#include "storage/engine/ghost_table.h"
#include "storage/engine/leaf_set.h"
#include "storage/engine/reuse_model.h"
#include "storage/kv/recompute_cost.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// Decides what is dropped first: what loses least, which is the chance that it is used again, per
// time that it is kept, times what it costs to compute it again, per byte. Leaves go before their
// parents, so no prefix loses its beginning before its end. Nothing is refused: a scan's blocks are
// stored, and are the first to go once the store has seen that such blocks do not come back.
//
// It follows the trie by what it is told of, and remembers for a while what was evicted.
//
// OnUse is thread-safe beside itself and const calls of the index; all other calls exclude each
// other and it.
class RetentionPolicy {
 public:
  explicit RetentionPolicy(const TrieIndex& index) : index_(index) {}

  // Until then, blocks of a model cost what their tokens are.
  void SetModel(ModelSlot slot, const ModelSpec& spec) {
    costs_.insert_or_assign(slot, RecomputeCost(spec));
  }

  // A client says what computing blocks [first_depth, last_depth] of a path of the model took it,
  // per token, mean over them. REQUIRES: IsComputeSecondsPerToken(seconds_per_token).
  void ComputeMeasured(ModelSlot slot, std::uint32_t first_depth, std::uint32_t last_depth,
                       double seconds_per_token);

  // Where a node stands in the put that brings it.
  struct PutPlace {
    std::uint64_t new_blocks = 0;  // of the put
    bool is_first = false;         // of them
  };
  // Traffic of a node that is about to hang under `parent` (0: it is a first block).
  NodeTraffic Arrives(const TrieNodeId& id, NodeRef parent, const PutPlace& place,
                      std::uint32_t now_seconds);
  // It is in the index.
  void OnInsert(NodeRef ref) { leaves_.Add(index_, ref); }
  // Before it is taken out of it.
  void BeforeErase(NodeRef ref, bool evicted, std::uint32_t now_seconds);
  void AfterErase(NodeRef parent) {
    if (parent != 0 && index_.node(parent).is_leaf()) leaves_.Add(index_, parent);
  }
  // All leaves of an index that was loaded.
  void OnLoaded();

  // Uses of several nodes by one path: before each is touched. Counted together, when it goes.
  class Uses {
   public:
    explicit Uses(RetentionPolicy& retention) : retention_(retention) {}
    ~Uses() { Flush(); }
    Uses(const Uses&) = delete;
    Uses& operator=(const Uses&) = delete;
    // In the order of the path.
    void Add(NodeRef ref, std::uint32_t now_seconds);

   private:
    void Flush();
    RetentionPolicy& retention_;
    ReuseModel::Cell cell_ = 0;
    std::uint32_t blocks_ = 0;
    bool was_new_ = false;  // the node before had not been used
  };

  // What dropping `bytes` of the node costs, per byte, in operations per second of a model that is
  // computed as fast as most; 4 times as much for each step of priority.
  double Value(const IndexNode& node, std::uint64_t bytes, std::uint32_t now_seconds) const;

  // Leaves, and then those that become leaves, until they have at least `bytes` (by `bytes_of`) and
  // are `nodes`: those of least value among as many as can be looked at cheaply. Children come
  // before parents. What `is_held` stays, with all above it.
  std::vector<NodeRef> ChooseVictims(std::uint64_t bytes, std::uint64_t nodes,
                                     std::uint32_t now_seconds,
                                     const std::function<std::uint64_t(const IndexNode&)>& bytes_of,
                                     const std::function<bool(NodeRef)>& is_held);

  const ReuseModel& reuse() const { return reuse_; }
  const GhostTable& ghosts() const { return ghosts_; }
  std::size_t memory_bytes() const { return ghosts_.memory_bytes() + leaves_.memory_bytes(); }

 private:
  // Of paths that left others at a node: how many there were, and how many of them were used again.
  // By some bits of the node's id: nodes that share a place are taken for one. Counts fade.
  struct Forks {
    std::atomic<std::uint32_t> arrived{0};
    std::atomic<std::uint32_t> reused{0};
  };
  static constexpr std::size_t kForkPlaces = 4096;
  Forks& ForksAt(NodeRef ref);
  void Learn(std::uint32_t now_seconds);

  const TrieIndex& index_;
  std::vector<Forks> forks_ = std::vector<Forks>(kForkPlaces);
  absl::flat_hash_map<ModelSlot, RecomputeCost> costs_;
  ComputeSpeeds speeds_;
  ReuseModel reuse_;
  GhostTable ghosts_;
  LeafSet leaves_;
  std::uint64_t random_ = 1;  // state of the draws
};

}  // namespace kvtrie
