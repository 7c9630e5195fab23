#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"

namespace kvtrie {

// Tells whether work that waits for the disk still moves: sends one small piece of it after the
// other through the same queue, and looks at how long the last has been under way. A disk that
// hangs answers nothing, so there is nothing else to see. Thread-safe.
class Watchdog {
 public:
  // `submit` queues work; false: the queue is full.
  using Submit = std::function<bool(std::function<void()>)>;
  Watchdog(Submit submit, std::chrono::milliseconds stuck_limit, Clock& clock);

  // Called about once a second.
  void Tick();

  // Empty: all is well. Else what is stuck, for people.
  std::string Complaint() const;

 private:
  struct State {
    absl::Mutex mutex;
    bool under_way ABSL_GUARDED_BY(mutex) = false;
    Clock::Duration started ABSL_GUARDED_BY(mutex){};
  };

  const Submit submit_;
  const std::chrono::milliseconds stuck_limit_;
  Clock& clock_;
  // Shared with what is under way, which may outlive this.
  const std::shared_ptr<State> state_;
};

}  // namespace kvtrie
