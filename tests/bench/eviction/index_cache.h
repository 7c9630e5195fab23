#pragma once

#include <vector>

#include "storage/engine/retention_policy.h"
#include "tests/bench/eviction/block_cache.h"

namespace kvtrie::bench {

// The store's choice of what to drop, over the store's index, without the store around it: for
// tuning, and to see what each choice costs at sizes for which frames would be in the way.
class IndexCache final : public BlockCache {
 public:
  IndexCache(const RequestTrace& trace, std::size_t capacity_blocks);

  std::uint32_t Serve(const TraceRequest& request) override;
  std::uint64_t evicted_blocks() const override { return evicted_; }
  std::uint64_t held_blocks() const override { return index_.node_count(); }
  double choose_seconds() const { return choose_seconds_; }

 private:
  const RequestTrace& trace_;
  const std::size_t capacity_;
  TrieIndex index_{std::size_t{1} << 20};
  RetentionPolicy retention_{index_};
  ModelSlot slot_ = 0;
  std::vector<NodeRef> refs_;              // of blocks that are held
  std::vector<BlockIndex> blocks_;         // of refs
  std::vector<std::uint32_t> on_path_of_;  // request, of refs
  std::uint32_t request_ = 0;
  std::uint64_t evicted_ = 0;
  double choose_seconds_ = 0;
};

}  // namespace kvtrie::bench
