#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "storage/kv/ids.h"

namespace kvtrie {

enum class StoreEventKind : std::uint8_t { kStored = 1, kRemoved = 2, kCleared = 3 };

struct StoreEvent {
  std::uint64_t sequence = 0;
  StoreEventKind kind = StoreEventKind::kStored;
  TenantId tenant;
  ModelId model;
  TrieNodeId node;
  TrieNodeId parent;
  std::uint32_t depth = 0;
  std::vector<TokenId> tokens;  // of a stored block
};

// The last events of the store, numbered from 1 without gaps, for watchers. Thread-safe.
class EventLog {
 public:
  EventLog(std::uint64_t epoch, std::size_t events_max) : epoch_(epoch), events_max_(events_max) {}

  void Append(std::vector<StoreEvent> events);

  struct Page {
    std::vector<StoreEvent> events;
    std::uint64_t next_sequence = 0;
    // Events from `from` on are gone, or `from` was counted by another log (it lies ahead of this
    // one): these are the oldest that are left.
    bool gap = false;
  };
  // At most `count` events of the tenant from sequence `from` on. `next_sequence` is where to go
  // on.
  Page Read(TenantId tenant, std::uint64_t from, std::size_t count) const;

  // Calls `on_event` once, when an event with sequence >= from exists or comes (perhaps at once, on
  // this thread). The returned number cancels it, unless it is being called already.
  std::uint64_t NotifyAt(std::uint64_t from, std::function<void()> on_event) const;
  void Cancel(std::uint64_t notification) const;

  std::uint64_t epoch() const { return epoch_; }
  std::uint64_t next_sequence() const;

 private:
  struct Waiter {
    std::uint64_t from;
    std::function<void()> on_event;
  };

  const std::uint64_t epoch_;
  const std::size_t events_max_;
  mutable absl::Mutex mutex_;
  std::deque<StoreEvent> events_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 1;
  mutable std::map<std::uint64_t, Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
  mutable std::uint64_t next_waiter_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace kvtrie
