#pragma once

#include <cstddef>
#include <list>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/shared_bytes.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

// Frames in memory, at most `limit_bytes` of them, least recently used out first. What is handed
// out stays alive while it is used, even after it left the tier. Thread-safe.
class MemoryTier {
 public:
  explicit MemoryTier(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Empty when it is not there.
  SharedBytes Get(const PayloadLocation& at);
  bool Contains(const PayloadLocation& at) const;
  void Insert(const PayloadLocation& at, SharedBytes frame);
  void Erase(const PayloadLocation& at);

  std::size_t used_bytes() const;

 private:
  struct Entry {
    PayloadLocation at;
    SharedBytes frame;
  };
  using Recency = std::list<Entry>;  // most recent first

  const std::size_t limit_bytes_;
  mutable absl::Mutex mutex_;
  std::size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  Recency recency_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<PayloadLocation, Recency::iterator> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
