#include "tests/bench/eviction/block_cache.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <set>
#include <utility>

#include "storage/base/check.h"

namespace kvtrie::bench {
namespace {

// What all baselines share: which blocks are there, and which of them are leaves.
class ResidentBlocks : public BlockCache {
 public:
  ResidentBlocks(const RequestTrace& trace, std::size_t capacity_blocks)
      : trace_(trace), capacity_(capacity_blocks), blocks_(trace.blocks.size()) {}

  std::uint32_t Serve(const TraceRequest& request) override {
    ++now_;
    std::uint32_t hits = 0;
    while (hits < request.prompt_blocks && blocks_[request.path[hits]].resident) ++hits;
    for (const BlockIndex block : request.path) blocks_[block].on_path_of = now_;
    Arrive(request);
    // From the end, as leaves go first.
    for (std::uint32_t i = hits; i > 0; --i) Hit(request.path[i - 1]);
    for (std::size_t i = hits; i < request.path.size(); ++i) {
      const BlockIndex block = request.path[i];
      if (blocks_[block].resident) continue;
      if (held_ == capacity_ && !EvictOne()) break;
      blocks_[block].resident = true;
      ++held_;
      const BlockIndex parent = trace_.blocks[block].parent;
      if (parent != kNoBlock && ++blocks_[parent].resident_children == 1) NoLeaf(parent);
    }
    for (std::size_t i = request.path.size(); i > hits; --i) {
      if (blocks_[request.path[i - 1]].resident && !blocks_[request.path[i - 1]].known) {
        blocks_[request.path[i - 1]].known = true;
        Insert(request.path[i - 1]);
      }
    }
    return hits;
  }
  std::uint64_t evicted_blocks() const override { return evicted_; }
  std::uint64_t held_blocks() const override { return held_; }

 protected:
  virtual void Arrive(const TraceRequest&) {}
  virtual void Hit(BlockIndex block) = 0;
  virtual void Insert(BlockIndex block) = 0;
  virtual void NoLeaf(BlockIndex block) = 0;
  virtual void Leaf(BlockIndex block) = 0;
  virtual bool EvictOne() = 0;

  bool is_leaf(BlockIndex block) const { return blocks_[block].resident_children == 0; }
  bool on_path(BlockIndex block) const { return blocks_[block].on_path_of == now_; }
  void Remove(BlockIndex block) {
    KV_CHECK(blocks_[block].resident && is_leaf(block));
    blocks_[block].resident = false;
    blocks_[block].known = false;
    --held_;
    ++evicted_;
    const BlockIndex parent = trace_.blocks[block].parent;
    if (parent != kNoBlock && --blocks_[parent].resident_children == 0) Leaf(parent);
  }

  const RequestTrace& trace_;
  const std::size_t capacity_;
  std::uint64_t now_ = 0;  // requests

 private:
  struct Block {
    bool resident = false;
    bool known = false;  // to the policy
    std::uint32_t resident_children = 0;
    std::uint64_t on_path_of = 0;
  };
  std::vector<Block> blocks_;
  std::size_t held_ = 0;
  std::uint64_t evicted_ = 0;
};

// Takes the leaf with the smallest rank.
class RankedLeaves : public ResidentBlocks {
 public:
  using Rank = std::pair<double, std::uint64_t>;

  RankedLeaves(const RequestTrace& trace, std::size_t capacity_blocks)
      : ResidentBlocks(trace, capacity_blocks), ranks_(trace.blocks.size()) {}

 protected:
  virtual Rank RankOf(BlockIndex block, bool is_new) = 0;
  virtual void Evicted(const Rank&) {}

 private:
  void Hit(BlockIndex block) override { SetRank(block, RankOf(block, false)); }
  void Insert(BlockIndex block) override { SetRank(block, RankOf(block, true)); }
  void NoLeaf(BlockIndex block) override { leaves_.erase({ranks_[block], block}); }
  void Leaf(BlockIndex block) override { leaves_.insert({ranks_[block], block}); }
  bool EvictOne() override {
    for (auto at = leaves_.begin(); at != leaves_.end(); ++at) {
      const auto [rank, block] = *at;
      if (on_path(block)) continue;
      leaves_.erase(at);
      Evicted(rank);
      Remove(block);
      return true;
    }
    return false;
  }
  void SetRank(BlockIndex block, const Rank& rank) {
    if (is_leaf(block)) {
      leaves_.erase({ranks_[block], block});
      leaves_.insert({rank, block});
    }
    ranks_[block] = rank;
  }

  std::vector<Rank> ranks_;
  std::set<std::pair<Rank, BlockIndex>> leaves_;
};

class LruCache final : public RankedLeaves {
  using RankedLeaves::RankedLeaves;
  Rank RankOf(BlockIndex, bool) override { return {0, now_}; }
};

// Ranks by how often a block was used since it came.
class UseCounted : public RankedLeaves {
 public:
  UseCounted(const RequestTrace& trace, std::size_t capacity_blocks)
      : RankedLeaves(trace, capacity_blocks), uses_(trace.blocks.size()) {}

 protected:
  double CountUse(BlockIndex block, bool is_new) {
    return uses_[block] = is_new ? 1 : uses_[block] + 1;
  }

 private:
  std::vector<double> uses_;
};

class LfuCache final : public UseCounted {
  using UseCounted::UseCounted;
  Rank RankOf(BlockIndex block, bool is_new) override { return {CountUse(block, is_new), now_}; }
};

class GdsfCache final : public UseCounted {
  using UseCounted::UseCounted;
  Rank RankOf(BlockIndex block, bool is_new) override {
    return {age_ + CountUse(block, is_new) * trace_.RecomputeSeconds(block), now_};
  }
  void Evicted(const Rank& rank) override { age_ = rank.first; }

  double age_ = 0;
};

// Where each block is in the prompts of a trace.
std::vector<std::vector<std::uint32_t>> UsesOfBlocks(const RequestTrace& trace) {
  std::vector<std::vector<std::uint32_t>> uses(trace.blocks.size());
  for (std::uint32_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    for (std::uint32_t block = 0; block < request.prompt_blocks; ++block)
      uses[request.path[block]].push_back(i + 1);
  }
  return uses;
}

class BeladyCache final : public RankedLeaves {
 public:
  BeladyCache(const RequestTrace& trace, std::size_t capacity_blocks)
      : RankedLeaves(trace, capacity_blocks), uses_(UsesOfBlocks(trace)) {}

 private:
  Rank RankOf(BlockIndex block, bool) override {
    const auto next = std::upper_bound(uses_[block].begin(), uses_[block].end(), now_);
    const double next_use =
        next == uses_[block].end() ? std::numeric_limits<double>::infinity() : *next;
    return {-next_use, 0};
  }
  const std::vector<std::vector<std::uint32_t>> uses_;
};

class S3FifoCache final : public ResidentBlocks {
 public:
  S3FifoCache(const RequestTrace& trace, std::size_t capacity_blocks)
      : ResidentBlocks(trace, capacity_blocks), entries_(trace.blocks.size()) {}

 private:
  static constexpr std::uint8_t kUsesMax = 3;
  struct Entry {
    std::uint8_t uses = 0;
    std::uint64_t ghost_serial = 0;  // 0: no ghost
  };

  void Hit(BlockIndex block) override {
    entries_[block].uses =
        std::min<std::uint8_t>(kUsesMax, static_cast<std::uint8_t>(entries_[block].uses + 1));
  }
  void Insert(BlockIndex block) override {
    Entry& entry = entries_[block];
    const bool was_ghost =
        entry.ghost_serial != 0 && entry.ghost_serial + capacity_ > ghost_serial_;
    entry = {};
    (was_ghost ? main_ : small_).push_back(block);
  }
  void NoLeaf(BlockIndex) override {}
  void Leaf(BlockIndex) override {}
  bool EvictOne() override {
    // Twice round both queues, with what uses keep in the main one: then all that is left is on the
    // path.
    for (std::size_t steps = (small_.size() + main_.size()) * (kUsesMax + 2); steps > 0; --steps) {
      const bool from_small = main_.empty() || (!small_.empty() && small_.size() >= capacity_ / 10);
      std::deque<BlockIndex>& queue = from_small ? small_ : main_;
      if (queue.empty()) return false;
      const BlockIndex block = queue.front();
      queue.pop_front();
      Entry& entry = entries_[block];
      if (on_path(block)) {
        queue.push_back(block);
        continue;
      }
      if (entry.uses > 0 || !is_leaf(block)) {
        entry.uses = from_small || entry.uses == 0 ? 0 : static_cast<std::uint8_t>(entry.uses - 1);
        main_.push_back(block);
        continue;
      }
      if (from_small) entry.ghost_serial = ++ghost_serial_;
      Remove(block);
      return true;
    }
    return false;
  }

  std::vector<Entry> entries_;
  std::deque<BlockIndex> small_;
  std::deque<BlockIndex> main_;
  std::uint64_t ghost_serial_ = 0;
};

}  // namespace

std::vector<std::string> BaselineNames() { return {"lru", "lfu", "s3-fifo", "gdsf", "belady"}; }

std::unique_ptr<BlockCache> MakeBaseline(std::string_view name, const RequestTrace& trace,
                                         std::size_t capacity_blocks) {
  if (name == "lru") return std::make_unique<LruCache>(trace, capacity_blocks);
  if (name == "lfu") return std::make_unique<LfuCache>(trace, capacity_blocks);
  if (name == "s3-fifo") return std::make_unique<S3FifoCache>(trace, capacity_blocks);
  if (name == "gdsf") return std::make_unique<GdsfCache>(trace, capacity_blocks);
  if (name == "belady") return std::make_unique<BeladyCache>(trace, capacity_blocks);
  return nullptr;
}

double RecomputeSecondsBound(const RequestTrace& trace, std::size_t capacity_blocks) {
  struct Interval {
    double seconds;
    double requests;
  };
  std::vector<Interval> intervals;
  std::vector<std::uint32_t> last_seen(trace.blocks.size(), 0);  // request number from 1
  for (std::uint32_t i = 1; i <= trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i - 1];
    for (std::uint32_t at = 0; at < request.path.size(); ++at) {
      const BlockIndex block = request.path[at];
      if (at < request.prompt_blocks && last_seen[block] != 0) {
        intervals.push_back(
            {trace.RecomputeSeconds(block), static_cast<double>(i - last_seen[block])});
      }
      last_seen[block] = i;
    }
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) {
    return a.seconds * b.requests > b.seconds * a.requests;
  });
  double left = static_cast<double>(capacity_blocks) * static_cast<double>(trace.requests.size());
  double saved = 0;
  for (const Interval& interval : intervals) {
    if (left <= 0) break;
    saved += interval.seconds * std::min(1.0, left / interval.requests);
    left -= interval.requests;
  }
  return saved;
}

}  // namespace kvtrie::bench
