#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/bench/eviction/request_trace.h"

namespace kvtrie::bench {

// A cache of KV blocks that is asked for a trace, request by request: it answers how many leading
// blocks of the prompt it holds, then takes all blocks of the path. It never holds more than its
// capacity, and never drops the path that is being put.
class BlockCache {
 public:
  virtual ~BlockCache() = default;

  virtual std::uint32_t Serve(const TraceRequest& request) = 0;
  virtual std::uint64_t evicted_blocks() const = 0;
  virtual std::uint64_t held_blocks() const = 0;
};

// Policies that others use, on blocks of equal size. A block whose parent is gone is of no use, so
// all of them take leaves only: that is what their block-level form does by itself where the blocks
// of a path are touched from its end to its beginning, and better than what it does otherwise.
//   lru      least recently used (the leaf-first LRU of prefix caches)
//   lfu      fewest uses since it was stored, then least recently used
//   s3-fifo  a small queue of 10 %, a main queue, and as many ghosts as blocks (SOSP '23). A block
//   that has children
//            goes round its queue once more.
//   gdsf     greedy dual size frequency: age + uses x recompute time / bytes
//   belady   knows the trace: the leaf whose next use is farthest. Feasible; not the optimum where
//   costs differ.
// nullptr: no policy of this name. `trace` outlives the cache.
std::vector<std::string> BaselineNames();
std::unique_ptr<BlockCache> MakeBaseline(std::string_view name, const RequestTrace& trace,
                                         std::size_t capacity_blocks);

// An upper bound on the recompute seconds that any policy can save, also one that knows the trace.
// A block that is served at a request must have lain in the cache since it was last there to be
// stored, at one block for each request between. All such intervals together cannot take more than
// capacity x requests, so the bound is what is saved by those with the most seconds per block and
// request, until that is used up (the last one in part). The capacity holds on average over the
// trace instead of at each moment, and prefixes are not asked for: no policy reaches it.
double RecomputeSecondsBound(const RequestTrace& trace, std::size_t capacity_blocks);

}  // namespace kvtrie::bench
