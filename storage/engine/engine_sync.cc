#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "storage/engine/engine_core.h"

namespace kvtrie {
namespace {

// How long syncs that nobody waits for yet may be late for giving back space, which takes the file
// system milliseconds per record.
constexpr std::chrono::seconds kFreeTimePerSync{1};
constexpr std::size_t kFreesAtOnce = 16;

}  // namespace

absl::Status Engine::Core::SyncAndFree() {
  absl::MutexLock syncing(&syncing_mutex_);
  std::vector<Outcome> waiters;
  std::vector<PayloadLocation> frees;
  {
    absl::MutexLock lock(&sync_mutex_);
    waiters.swap(durable_waiters_);
    frees.swap(pending_frees_);
  }
  if (waiters.empty() && frees.empty() && !dirty_.exchange(false)) {
    FreeSome();
    return absl::OkStatus();
  }
  dirty_ = false;
  // Payload first: a row that is durable names payload that is.
  absl::Status status = payload_->Sync();
  const bool payload_is_durable = status.ok();
  if (payload_is_durable) status = meta_->Sync();
  if (absl::IsResourceExhausted(status)) {
    bool dropped;
    {
      absl::MutexLock change(&change_mutex_);
      dropped = DropBallast();
    }
    // A file system that could not write something says so once, and nothing of it afterwards.
    if (dropped && payload_is_durable) status = meta_->Sync();
  }
  counters_.syncs.fetch_add(1, std::memory_order_relaxed);
  SetDegraded(Degradation::kNotSynced, !status.ok());
  if (!status.ok()) {
    counters_.sync_errors.fetch_add(1, std::memory_order_relaxed);
    dirty_ = true;
    absl::MutexLock lock(&sync_mutex_);
    pending_frees_.insert(pending_frees_.end(), frees.begin(), frees.end());
  } else {
    absl::MutexLock lock(&sync_mutex_);
    to_free_.insert(to_free_.end(), frees.begin(), frees.end());
  }
  for (Outcome& waiter : waiters) {
    if (!status.ok()) waiter.result = status;
    waiter.on_done(std::move(waiter.result));
  }
  FreeSome();
  return status;
}

void Engine::Core::FreeSome() {
  const Clock::Duration until = clock_.Monotonic() + kFreeTimePerSync;
  do {
    std::vector<PayloadLocation> some;
    {
      absl::MutexLock lock(&sync_mutex_);
      const std::size_t count = std::min(kFreesAtOnce, to_free_.size());
      some.assign(to_free_.end() - static_cast<std::ptrdiff_t>(count), to_free_.end());
      to_free_.resize(to_free_.size() - count);
    }
    std::uint64_t freed_bytes = 0;
    for (const PayloadLocation& at : some) {
      reference_digests_.Forget(at);
      payload_->Free(at);
      freed_bytes += at.disk_bytes();
    }
    absl::MutexLock lock(&sync_mutex_);
    pending_free_bytes_ -= freed_bytes;
    if (to_free_.empty() || !durable_waiters_.empty()) return;
  } while (clock_.Monotonic() < until);
}

void Engine::Core::RunMaintenance() {
  {
    absl::MutexLock lock(&index_mutex_);
    holds_.DropEndedLeases(clock_.Monotonic());
  }
  DropEndedPins();
  ExpireNodes();
  DetachQueued();
  SweepSessions();
  {
    absl::MutexLock change(&change_mutex_);
    KeepBallast();
    CountMetaBytes();
  }
  SyncAndFree().IgnoreError();  // counted, and shown as degraded
  const std::uint64_t used = DiskBytes();
  if (options_.eviction && used > options_.disk_limit_bytes) {
    if (Evict(used - options_.disk_limit_bytes, 0).ok()) {
      SyncAndFree().IgnoreError();
    }
  }
}

void Engine::Core::RunSyncer() {
  const auto due = [this]() ABSL_SHARED_LOCKS_REQUIRED(sync_mutex_) {
    return ending_ || !durable_waiters_.empty();
  };
  auto next_round = std::chrono::steady_clock::now() + options_.sync_interval;
  while (true) {
    {
      absl::MutexLock lock(&sync_mutex_);
      const auto wait = next_round - std::chrono::steady_clock::now();
      sync_mutex_.AwaitWithTimeout(absl::Condition(&due), absl::FromChrono(wait));
      if (ending_) return;
    }
    if (std::chrono::steady_clock::now() < next_round) {
      SyncAndFree().IgnoreError();  // those who wait are told
      continue;
    }
    RunMaintenance();
    next_round = std::chrono::steady_clock::now() + options_.sync_interval;
  }
}

}  // namespace kvtrie
