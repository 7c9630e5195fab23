#pragma once

#include <grpcpp/channel.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/worker_options.h"
#include "storage/base/clock.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// The workers that one process knows, and which of them to ask. One that cannot be reached, or
// whose health fails (grpc.health), is asked again once it can be: a thread of the pool waits for
// that, not those who want blocks coded. One that failed otherwise is left alone for a while,
// longer each time. Thread-safe.
class WorkerPool {
 public:
  // One address.
  struct Worker {
    std::string target;
    std::shared_ptr<grpc::Channel> channel;
    // Held while a profile is sent: others that need it wait, instead of sending it too.
    absl::Mutex upload_mutex;
    absl::Mutex mutex;
    std::map<ProfileId, std::uint64_t> uploads ABSL_GUARDED_BY(mutex);  // how often
  };

  WorkerPool(const WorkerOptions& options, Clock& clock);
  ~WorkerPool();

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // The one with the least under way, that is not `except`; null: there is none to ask now. Done()
  // gives it back.
  std::shared_ptr<Worker> Take(const Worker* except = nullptr);
  enum class Outcome {
    kWell,         // whatever became of what it was asked
    kFailed,       // it did not answer in time, or not as it should
    kUnreachable,  // there is no connection to it
  };
  void Done(const std::shared_ptr<Worker>& worker, Outcome outcome);

  // How many could be asked now, and how many there are.
  struct Count {
    std::size_t usable = 0;
    std::size_t all = 0;
  };
  Count Workers() const;

 private:
  struct Entry {
    std::shared_ptr<Worker> worker;
    std::size_t under_way = 0;
    std::uint64_t failures = 0;  // since its last success
    Clock::Duration left_alone_until{};
    bool unreachable = false;

    bool MayBeAsked(Clock::Duration now) const { return !unreachable && left_alone_until <= now; }
  };

  void Resolve(bool first);
  // Asks names for their addresses, and waits for workers that cannot be reached.
  void Watch();
  bool HasUnreachable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitWorkers();

  const WorkerOptions options_;
  Clock& clock_;
  mutable absl::Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

}  // namespace kvtrie
