#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/deadline.h"
#include "client/worker_call.h"
#include "client/worker_options.h"
#include "client/worker_pool.h"
#include "storage/base/clock.h"
#include "storage/codec/block_coder.h"

namespace kvtrie {

struct WorkerBackendStats {
  std::uint64_t blocks_total = 0;        // that workers coded
  std::uint64_t own_blocks_total = 0;    // that this process coded, since no worker did in time
  std::uint64_t failed_calls_total = 0;  // to workers
  std::uint64_t sent_profiles_total = 0;
  std::size_t usable_workers = 0;
  std::size_t workers = 0;
};

// Workers as the device that codes: blocks go to one of them, and what does not come back in time,
// for whatever reason, is coded by the thread that called. So nothing is lost with a worker, and a
// call takes the options' timeout longer at most.
//
// When the time is over, a worker is at fault that had more than half of the timeout, or that had a
// third of it and answered nothing. One that had less is taken for busy, as is one that refuses
// blocks for now.
//
// What no worker does is done here as well: exact frames with a profile, and blocks with references
// that are not finer than they are to be.
//
// Thread-safe.
class WorkerBackend final : public CodecBackend {
 public:
  // The bytes of a profile, for a worker that has it not; by the deadline, after which nobody wants
  // them. Blocks whose profile cannot be had are coded here.
  using ProfileBytes = std::shared_ptr<const std::vector<std::byte>>;
  using ProfileSource =
      std::function<absl::StatusOr<ProfileBytes>(const ProfileId&, Deadline deadline)>;

  // REQUIRES: options.Validate() is OK.
  WorkerBackend(WorkerOptions options, ProfileSource profiles, Clock& clock = SystemClock());
  ~WorkerBackend() override;

  std::string_view name() const override { return "worker"; }
  std::string device() const override;
  absl::StatusOr<std::shared_ptr<const BlockCoder>> CoderFor(
      const ModelSpec& spec, std::shared_ptr<const ResidualCodec> codec) const override;
  // Unavailable: no worker is usable now.
  absl::Status Probe() const override;

  WorkerBackendStats Stats() const;

  // From now on this process codes. Calls to workers that are under way end soon.
  void Stop() { stopped_ = true; }

 private:
  class Coder;

  // Has items coded, by one worker or another. Some may be left unanswered.
  void Run(WorkerMethod method, const v1::CodecOpen& open, const ProfileId& profile,
           std::span<WorkerItem> items) const;
  // The same by this one. Not OK: the worker itself failed, or this stops.
  absl::Status RunAt(WorkerPool::Worker& worker, WorkerMethod method, const v1::CodecOpen& open,
                     std::span<WorkerItem*> items, Deadline deadline) const;
  // What a call, that had so much time, says of the worker.
  WorkerPool::Outcome OutcomeOf(const absl::Status& status, std::span<WorkerItem* const> items,
                                std::chrono::nanoseconds time) const;
  // Sends what a worker misses, unless it was sent since it had been so often. NotFound: it cannot
  // be had. Aborted: another thread has sent a profile all the time.
  absl::Status Send(WorkerPool::Worker& worker, const ProfileId& profile, std::uint64_t sent_before,
                    Deadline deadline) const;
  absl::Status Upload(WorkerPool::Worker& worker, const ProfileId& profile,
                      Deadline deadline) const;

  const WorkerOptions options_;
  const ProfileSource profiles_;
  mutable WorkerPool pool_;
  std::atomic<bool> stopped_{false};
  mutable std::atomic<std::uint64_t> blocks_{0};
  mutable std::atomic<std::uint64_t> own_blocks_{0};
  mutable std::atomic<std::uint64_t> failed_calls_{0};
  mutable std::atomic<std::uint64_t> sent_profiles_{0};
};

}  // namespace kvtrie
