#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace kvtrie {

// One thread for short work: what must not run on the thread that noticed it, and what is due from
// time to time. Thread-safe. Destruction ends the thread; work that has not begun is dropped.
class TimerThread {
 public:
  TimerThread();
  ~TimerThread();

  TimerThread(const TimerThread&) = delete;
  TimerThread& operator=(const TimerThread&) = delete;

  void Post(std::function<void()> work);
  // First after one period, then again and again.
  void Every(std::chrono::milliseconds period, std::function<void()> work);
  // Drops all work and ends the thread; what is posted later is dropped too.
  void Stop();

 private:
  struct Periodic {
    absl::Time due;
    absl::Duration period;
    std::function<void()> work;
  };

  void Run();
  absl::Time NextDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || changed_ || !posted_.empty();
  }

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  std::vector<Periodic> periodic_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace kvtrie
