#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/worker/codec_job.h"
#include "storage/base/clock.h"

namespace kvtrie {

struct CodecQueueOptions {
  int threads = 1;
  std::size_t jobs_max = 1024;
  // Tokens of the jobs that are coded together: as many as the device needs to be fast.
  std::size_t batch_tokens = 256;
  // Raw KV that has to be coded before the speed is known well enough to refuse anything by it.
  std::size_t speed_bytes = std::size_t{4} << 20;
};

struct CodecQueueStats {
  struct Tenant {
    std::string name;
    std::uint64_t jobs = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Tenant> tenants;  // that have jobs waiting
  std::uint64_t waiting_jobs = 0;
  std::uint64_t running_jobs = 0;
  std::uint64_t batches_total = 0;
  std::uint64_t jobs_total = 0;   // coded, or failed while they were
  std::uint64_t bytes_total = 0;  // raw, of these
  std::uint64_t refused_total = 0;
  std::uint64_t expired_total = 0;
  double coding_seconds_total = 0;  // of all threads
  std::chrono::milliseconds expected_wait{0};
};

// Jobs of all callers, on their way to the threads that code them.
//
// Tenants that have jobs waiting get the same share of bytes, however many each has; of one tenant,
// first come, first served. Jobs that agree are coded together, of several tenants too. When it is
// full, a tenant that has more than its share waiting is refused, with a hint when to come back.
// Jobs that nobody waits for any more are dropped.
//
// Thread-safe. Destruction lets running batches end, and refuses what waits.
class CodecQueue {
 public:
  // Codes jobs that share a batch: sets what became of each. On several threads at a time.
  using Code = std::function<void(std::span<const std::unique_ptr<CodecJob>>)>;

  CodecQueue(const CodecQueueOptions& options, Code code, Clock& clock);
  ~CodecQueue();

  CodecQueue(const CodecQueue&) = delete;
  CodecQueue& operator=(const CodecQueue&) = delete;

  // The job's on_done says how it ends, perhaps before this returns: ResourceExhausted where it was
  // refused, DeadlineExceeded where it waited for too long, Unavailable while the queue drains.
  void Submit(std::unique_ptr<CodecJob> job);

  // Whether the job would be refused now.
  struct Refusal {
    absl::Status status;
    std::chrono::milliseconds retry_after{0};
  };
  std::optional<Refusal> Refuses(const CodecJob& job);

  // Ends jobs that have waited for too long, when all threads are at work. From time to time.
  void Tick();

  // Refuses jobs from now on; what waits is still coded.
  void Drain();

  // How long the oldest batch that is being coded has been; zero: none is.
  Clock::Duration LongestRunning() const;
  CodecQueueStats Stats() const;

 private:
  using Jobs = std::deque<std::unique_ptr<CodecJob>>;
  struct Tenant {
    Jobs waiting;
    std::uint64_t waiting_bytes = 0;
    // Bytes that it was served, or would have been if it had always had jobs: the least goes next.
    std::uint64_t served_bytes = 0;
  };
  using Tenants = std::map<std::string, Tenant>;

  // Raw bytes that have to be coded for it: references are decoded first.
  static std::uint64_t BytesOf(const CodecJob& job);

  void Run(std::size_t thread);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !tenants_.empty();
  }
  Tenants::iterator NextTenant() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next batch, in `batch`, and what expired on the way, in `expired`.
  void TakeBatch(Jobs* batch, Jobs* expired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeLike(const CodecJob& first, Tenant& tenant, std::size_t* tokens, Jobs* batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::unique_ptr<CodecJob> Take(Tenant& tenant, std::size_t at)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropIdleTenants() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Expire(Jobs* expired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Refusal> Admit(const CodecJob& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Bytes that are coded before the job is, by all that wait now.
  std::uint64_t BytesBefore(const CodecJob& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LearnSpeed(std::uint64_t bytes, double seconds) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::chrono::milliseconds TimeOf(std::uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndAll(Jobs jobs, const absl::Status& status);

  const CodecQueueOptions options_;
  const Code code_;
  Clock& clock_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  Tenants tenants_ ABSL_GUARDED_BY(mutex_);  // that have jobs waiting
  std::uint64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Where a tenant begins that had nothing waiting: what it did not ask for is not owed to it.
  std::uint64_t served_floor_ ABSL_GUARDED_BY(mutex_) = 0;
  // What one thread has coded, of late, and how long it took.
  double coded_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  double coded_seconds_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Clock::Duration> running_since_ ABSL_GUARDED_BY(mutex_);  // [thread]; 0: idle
  CodecQueueStats stats_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace kvtrie
