#include "storage/engine/prefetcher.h"

#include <utility>

#include "storage/base/frame_memory.h"
#include "storage/engine/engine.h"

namespace kvtrie {

struct Prefetcher::Item {
  StoredFrame frame;
  MemoryTier::MayReplace may_replace;
};

namespace {

// What a frame takes of memory once it is read: with all pages that it lies in.
std::uint64_t MemoryBytes(const PayloadLocation& at) {
  const std::uint64_t lead_bytes =
      at.offset_units % PayloadLocation::kUnitsPerPage * PayloadLocation::kUnitBytes;
  const std::uint64_t pages = (lead_bytes + at.record_bytes + PayloadLocation::kPageBytes - 1) /
                              PayloadLocation::kPageBytes;
  return FrameMemoryBytes(pages * PayloadLocation::kPageBytes, PayloadLocation::kPageBytes);
}

}  // namespace

Prefetcher::Prefetcher(std::uint64_t bytes_max, const Clock& clock, MemoryTier& tier,
                       WorkPool& pool, Read read)
    : bytes_max_(bytes_max),
      clock_(clock),
      tier_(tier),
      pool_(pool),
      read_(std::move(read)),
      spared_threads_(static_cast<std::ptrdiff_t>(pool.thread_count()) / 2) {}

Prefetcher::~Prefetcher() = default;

void Prefetcher::Want(std::span<const StoredFrame> frames, MemoryTier::MayReplace may_replace) {
  absl::MutexLock lock(&mutex_);
  // Threads that work for others leave none to spare.
  if (stopped_ || pool_.spare_threads() + readers_ <= spared_threads_) return;
  std::uint64_t taken_bytes = stats_.pending_bytes + tier_.prefetch_stats().unasked_bytes;
  bool dropped_old = false;
  for (const StoredFrame& frame : frames) {
    const std::uint64_t bytes = MemoryBytes(frame.at);
    if (taken_bytes + bytes > bytes_max_ && !std::exchange(dropped_old, true)) {
      tier_.DropPrefetched(clock_.Monotonic() - kKeepUnasked);
      taken_bytes = stats_.pending_bytes + tier_.prefetch_stats().unasked_bytes;
    }
    if (taken_bytes + bytes > bytes_max_) break;
    if (!pending_.insert(frame.at).second) continue;
    waiting_.push_back({frame, may_replace});
    stats_.pending_bytes += bytes;
    taken_bytes += bytes;
  }
  StartReaders();
}

// As many as there are frames for them, but for threads that are to be spared.
void Prefetcher::StartReaders() {
  while (posted_ < waiting_.size() && pool_.spare_threads() > spared_threads_) {
    if (!pool_.TryPost([this] { ReadWaiting(); })) return;
    ++posted_;
    ++readers_;
  }
}

void Prefetcher::ForgetWaiting() {
  for (const Item& item : waiting_) {
    pending_.erase(item.frame.at);
    stats_.pending_bytes -= MemoryBytes(item.frame.at);
  }
  waiting_.clear();
}

void Prefetcher::ReadWaiting() {
  absl::MutexLock lock(&mutex_);
  --posted_;
  while (!waiting_.empty()) {
    if (stopped_ || pool_.spare_threads() < 0) {
      ForgetWaiting();
      break;
    }
    const Item item = std::move(waiting_.front());
    waiting_.pop_front();
    reading_.insert(item.frame.at);
    mutex_.Unlock();
    std::optional<SharedBytes> bytes;
    if (!tier_.Contains(item.frame.at)) bytes = read_(item.frame);
    const bool is_kept = bytes && tier_.InsertPrefetched(item.frame.at, *bytes, item.may_replace,
                                                         clock_.Monotonic());
    mutex_.Lock();
    reading_.erase(item.frame.at);
    pending_.erase(item.frame.at);
    stats_.pending_bytes -= MemoryBytes(item.frame.at);
    if (!bytes) continue;
    ++stats_.frames;
    stats_.bytes += bytes->view.size();
    if (is_kept) continue;
    ++stats_.late_frames;
    stats_.late_bytes += bytes->view.size();
  }
  --readers_;
}

void Prefetcher::AwaitReading(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  if (!reading_.contains(at)) return;
  const auto has_come = [this, &at]()
                            ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !reading_.contains(at); };
  mutex_.Await(absl::Condition(&has_come));
}

void Prefetcher::Stop() {
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
  ForgetWaiting();
}

Prefetcher::Stats Prefetcher::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

}  // namespace kvtrie
