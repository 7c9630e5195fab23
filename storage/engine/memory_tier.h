#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"
#include "storage/base/shared_bytes.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

// Frames in memory, at most `limit_bytes` of them, least recently used out first. What is handed
// out stays alive while it is used, even after it left the tier. Thread-safe.
//
// Frames that were read ahead and that nobody has asked for yet stand apart: at most
// `prefetch_limit_bytes` of them, the first to leave when room is needed.
class MemoryTier {
 public:
  explicit MemoryTier(std::size_t limit_bytes, std::size_t prefetch_limit_bytes = 0)
      : limit_bytes_(limit_bytes), prefetch_limit_bytes_(prefetch_limit_bytes) {}

  // Empty when it is not there.
  SharedBytes Get(const PayloadLocation& at);
  bool Contains(const PayloadLocation& at) const;
  std::vector<bool> Contains(std::span<const PayloadLocation> places) const;
  void Insert(const PayloadLocation& at, SharedBytes frame);
  void Erase(const PayloadLocation& at);

  // What a frame that is read ahead may take the place of, beside free room.
  enum class MayReplace {
    kNeverRead,  // what nobody has read since it came, and nobody has for longest
    kOldest,     // what nobody has for longest: the frame is about to be read, and would do so then
  };
  // False: it is there, or there is no room for it.
  bool InsertPrefetched(const PayloadLocation& at, SharedBytes frame, MayReplace may_replace,
                        Clock::Duration now);
  // Of those that were read ahead, drops what came before a time and has not been asked for.
  void DropPrefetched(Clock::Duration came_before);

  std::size_t used_bytes() const;

  struct PrefetchStats {
    std::size_t unasked_bytes = 0;  // of memory
    // Of frames, as they are served.
    std::uint64_t useful_frames = 0;  // asked for after they had come
    std::uint64_t useful_bytes = 0;
    std::uint64_t wasted_frames = 0;  // left unasked, or were read by others too
    std::uint64_t wasted_bytes = 0;
  };
  PrefetchStats prefetch_stats() const;

 private:
  struct Entry {
    PayloadLocation at;
    SharedBytes frame;
    bool was_read = false;
    bool is_unasked = false;  // and in `unasked_`
    Clock::Duration came{};   // of those
  };
  using Entries = std::list<Entry>;  // most recent first

  // The last of a list leaves.
  void Drop(Entries& list, std::vector<SharedBytes>* dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountLeaving(const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountUnaskedLeft(const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::size_t limit_bytes_;
  const std::size_t prefetch_limit_bytes_;
  mutable absl::Mutex mutex_;
  std::size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  Entries recency_ ABSL_GUARDED_BY(mutex_);
  Entries unasked_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<PayloadLocation, Entries::iterator> entries_ ABSL_GUARDED_BY(mutex_);
  PrefetchStats prefetch_stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
