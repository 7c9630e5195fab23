#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtrie {

// A bound on bytes that are in flight, shared by many. First come, first served: a large request
// is not starved by small ones.
// Thread-safe. Callbacks run on the thread that releases, outside the lock; they must be short.
class ByteBudget {
 public:
  explicit ByteBudget(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // True: `bytes` are taken. False: they are not, and `on_granted` will be called once they have
  // been taken. A request over the whole limit is granted when nothing else is in flight.
  bool AcquireOrWait(std::size_t bytes, std::function<void()> on_granted);

  // True and taken, or false and nothing changed. `keep_free_bytes` are left for others.
  bool TryAcquire(std::size_t bytes, std::size_t keep_free_bytes = 0);

  void Release(std::size_t bytes);

  std::size_t used_bytes() const;
  // Requests that were not granted yet.
  std::size_t waiting() const;
  std::size_t limit_bytes() const { return limit_bytes_; }

 private:
  struct Waiter {
    std::size_t bytes;
    std::function<void()> on_granted;
  };

  bool Fits(std::size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return used_bytes_ == 0 || used_bytes_ + bytes <= limit_bytes_;
  }

  const std::size_t limit_bytes_;
  mutable absl::Mutex mutex_;
  std::size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
};

// Bytes taken from a budget, given back on destruction.
class ByteReservation {
 public:
  ByteReservation() = default;
  // Adopts bytes that were acquired already.
  ByteReservation(ByteBudget* budget, std::size_t bytes) : budget_(budget), bytes_(bytes) {}
  ByteReservation(ByteReservation&& other) noexcept { *this = std::move(other); }
  ByteReservation& operator=(ByteReservation&& other) noexcept {
    if (this != &other) {
      Reset();
      budget_ = std::exchange(other.budget_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  ~ByteReservation() { Reset(); }

  void Reset() {
    if (budget_ != nullptr) budget_->Release(bytes_);
    budget_ = nullptr;
    bytes_ = 0;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  ByteBudget* budget_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace kvtrie
