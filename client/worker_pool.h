#pragma once

#include <grpcpp/channel.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/worker_addresses.h"
#include "client/worker_options.h"
#include "storage/base/clock.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// The workers that one process knows, and which of them to ask. One that cannot be reached, or
// whose health fails (grpc.health), is asked again once it can be: a thread of the pool waits for
// that, not those who want blocks coded. One that failed otherwise is left alone for a while,
// longer each time; one that takes no work now, for as long as it says. Destruction waits for no
// name that is looked up. Thread-safe.
class WorkerPool {
 public:
  // One address.
  struct Worker {
    std::string target;
    std::shared_ptr<grpc::Channel> channel;
    absl::Mutex mutex;
    // While a profile is sent, others that need it wait, instead of sending it too.
    bool uploading ABSL_GUARDED_BY(mutex) = false;
    std::map<ProfileId, std::uint64_t> uploads ABSL_GUARDED_BY(mutex);  // how often
    std::map<ProfileId, Clock::Duration> no_room_until ABSL_GUARDED_BY(mutex);
  };

  WorkerPool(const WorkerOptions& options, Clock& clock);
  ~WorkerPool();

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // The one with the least under way, that is not `except`, and has room for the profile; null:
  // there is none to ask now. Done() gives it back.
  std::shared_ptr<Worker> Take(const Worker* except = nullptr, const ProfileId& profile = {});
  // It takes no such profile, and need not be asked for a while.
  void HasNoRoom(Worker& worker, const ProfileId& profile);
  enum class Outcome {
    kWell,         // whatever became of what it was asked
    kBusy,         // it is well, and takes no more work now
    kFailed,       // it did not answer in time, or not as it should
    kUnreachable,  // there is no connection to it, or it refuses calls
  };
  // `busy_for`: how long it wants to be left alone, of kBusy; 0: it does not say.
  void Done(const std::shared_ptr<Worker>& worker, Outcome outcome,
            std::chrono::milliseconds busy_for = {});

  // How many could be asked now, and how many there are.
  struct Count {
    std::size_t usable = 0;
    std::size_t all = 0;
  };
  Count Workers();

 private:
  struct Entry {
    std::shared_ptr<Worker> worker;
    std::size_t under_way = 0;
    std::uint64_t failures = 0;  // since its last success
    Clock::Duration left_alone_until{};
    Clock::Duration busy_until{};  // a call that began before, and went well, does not change it
    bool unreachable = false;

    bool MayBeAsked(Clock::Duration now) const {
      return !unreachable && left_alone_until <= now && busy_until <= now;
    }
    void StayBusy(Clock::Duration until) { busy_until = std::max(busy_until, until); }
  };

  // Takes over what names stand for by now.
  void Update();
  // Waits for workers that cannot be reached.
  void Watch();
  bool stopping() const;
  bool HasUnreachable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitWorkers();

  const WorkerOptions options_;
  Clock& clock_;
  const WorkerAddresses addresses_;
  mutable absl::Mutex mutex_;
  std::uint64_t addresses_version_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

}  // namespace kvtrie
