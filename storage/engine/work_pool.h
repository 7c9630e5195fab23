#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace kvtrie {

// Threads that may block, behind a bounded queue. Destruction finishes.
// Thread-safe.
class WorkPool {
 public:
  WorkPool(unsigned thread_count, std::size_t queue_max);
  ~WorkPool();

  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // False: the queue is full and `work` was not taken.
  bool TryPost(std::function<void()> work);
  // For work whose number is bounded elsewhere.
  void Post(std::function<void()> work);

  std::size_t queue_length() const;
  // Threads that have nothing to do, less what is queued: below 0, so much waits for others to end.
  std::ptrdiff_t spare_threads() const;
  std::size_t thread_count() const { return thread_count_; }

  // Runs what is queued (and what that posts), then ends the threads; what is posted later never
  // runs. Not to be called from two threads at once.
  void Finish();

 private:
  void Run();

  const std::size_t thread_count_;
  const std::size_t queue_max_;
  mutable absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  std::size_t working_ ABSL_GUARDED_BY(mutex_) = 0;  // threads
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvtrie
