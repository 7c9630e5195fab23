#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"
#include "storage/base/shared_bytes.h"
#include "storage/engine/memory_tier.h"
#include "storage/engine/work_pool.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

struct StoredFrame;

// Reads frames into the memory tier before they are asked for, while the threads that read the disk
// have nothing better to do: half of them are always left alone, and as soon as anything waits for
// them all that is still to be read ahead is forgotten.
//
// Bounded: frames that wait, are on their way or came and were not asked for yet take `bytes_max`
// of memory together. While they fill it what more is wanted is forgotten too, rather than pushing
// out what may be asked for at any moment; after kKeepUnasked they make way. Thread-safe.
class Prefetcher {
 public:
  // Longer than a client takes from a lookup to the fetch that it leads to.
  static constexpr std::chrono::seconds kKeepUnasked{2};

  // The frame as it is stored, from the disk; nullopt: it is gone, or bad.
  using Read = std::function<std::optional<SharedBytes>(const StoredFrame&)>;

  // All outlive it; REQUIRES: Stop, and the end of the pool's work, before it is destroyed.
  Prefetcher(std::uint64_t bytes_max, const Clock& clock, MemoryTier& tier, WorkPool& pool,
             Read read);
  ~Prefetcher();

  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Frames that are not in memory, in the order in which they will be asked for. Does not block.
  void Want(std::span<const StoredFrame> frames, MemoryTier::MayReplace may_replace);

  // Somebody is about to read the frame: if it is on its way, waits until it has come, or failed
  // to.
  void AwaitReading(const PayloadLocation& at);

  // What waits is forgotten, now and later.
  void Stop();

  struct Stats {
    std::uint64_t frames = 0;  // that were read
    std::uint64_t bytes = 0;
    // Of them, those that found no room any more, or somebody who had read them too.
    std::uint64_t late_frames = 0;
    std::uint64_t late_bytes = 0;
    std::uint64_t pending_bytes = 0;  // wait, or are on their way
  };
  Stats stats() const;

 private:
  struct Item;

  void ForgetWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartReaders() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadWaiting();

  const std::uint64_t bytes_max_;
  const Clock& clock_;
  MemoryTier& tier_;
  WorkPool& pool_;
  const Read read_;
  const std::ptrdiff_t spared_threads_;  // of the pool

  mutable absl::Mutex mutex_;
  std::deque<Item> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<PayloadLocation> pending_ ABSL_GUARDED_BY(mutex_);  // wait, or are read
  absl::flat_hash_set<PayloadLocation> reading_ ABSL_GUARDED_BY(mutex_);  // of them, on their way
  std::ptrdiff_t readers_ ABSL_GUARDED_BY(mutex_) = 0;                    // of the pool's work
  std::size_t posted_ ABSL_GUARDED_BY(mutex_) = 0;  // of them, not started yet
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  Stats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
