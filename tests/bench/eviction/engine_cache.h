#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/engine/engine.h"
#include "tests/bench/eviction/block_cache.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie::bench {

// The model whose KV a trace is about: the smallest frames that there are.
ModelSpec SmallModelSpec(std::uint32_t block_tokens);

// The store itself behind the interface of the baselines: lookups and puts of an Engine with a
// clock that follows the trace. Frames are small, and the limit on the index stands for the
// capacity, since it counts nodes and not what a file system makes of them; which nodes go is
// decided as it is when the disk is full.
class EngineCache final : public BlockCache {
 public:
  // `folder` is used for the store and is empty. `capacity_blocks` below 10,486 are refused by the
  // engine's options.
  static absl::StatusOr<std::unique_ptr<EngineCache>> Open(const std::string& folder,
                                                           const RequestTrace& trace,
                                                           std::size_t capacity_blocks);

  std::uint32_t Serve(const TraceRequest& request) override;
  std::uint64_t evicted_blocks() const override { return engine_->Stats().evicted_blocks_total; }
  std::uint64_t held_blocks() const override { return engine_->Stats().node_count; }

 private:
  explicit EngineCache(const RequestTrace& trace) : trace_(trace) {}

  const RequestTrace& trace_;
  FakeClock clock_;
  double seconds_ = 0;  // of the trace that the clock has gone through
  std::unique_ptr<Engine> engine_;
  ModelId model_;
  std::vector<std::byte> raw_;  // of every block
  std::uint32_t raw_crc_ = 0;
};

}  // namespace kvtrie::bench
