#include "server/stream_registry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvtrie {

absl::Status StreamRegistry::Add(const std::shared_ptr<TrackedStream>& stream) {
  absl::MutexLock lock(&mutex_);
  if (draining_) return absl::UnavailableError("the server drains; use another one");
  if (streams_.size() >= streams_max_) {
    refused_total_.fetch_add(1, std::memory_order_relaxed);
    return absl::UnavailableError(absl::StrCat(
        "all ", streams_max_, " streams of the server are in use; retry with backoff"));
  }
  streams_.emplace(stream.get(), stream);
  return absl::OkStatus();
}

void StreamRegistry::Remove(const TrackedStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

std::vector<std::shared_ptr<TrackedStream>> StreamRegistry::Streams() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<TrackedStream>> streams;
  streams.reserve(streams_.size());
  for (const auto& [_, weak] : streams_) {
    if (auto stream = weak.lock()) streams.push_back(std::move(stream));
  }
  return streams;
}

std::size_t StreamRegistry::Tick() {
  const Clock::Duration now = clock_.Monotonic();
  std::size_t ended = 0;
  for (const auto& stream : Streams()) {
    stream->OnTick();
    const Clock::Duration since(stream->waiting_since_.load(TrackedStream::kOrder));
    if (since.count() == 0 || now - since < stall_limit_) continue;
    stream->DisarmStall();
    stalled_total_.fetch_add(1, std::memory_order_relaxed);
    ++ended;
    stream->Abort(absl::DeadlineExceededError(
        absl::StrCat("the stream made no progress for ", stall_limit_.count(), " ms")));
  }
  return ended;
}

// A stall is seen an eighth of its limit too late at most.
std::chrono::milliseconds StreamRegistry::tick_period() const {
  return std::clamp(stall_limit_ / 8, std::chrono::milliseconds(5),
                    std::chrono::milliseconds(1000));
}

void StreamRegistry::Drain() {
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
  }
  for (const auto& stream : Streams()) stream->OnDrain();
}

void StreamRegistry::AbortAll(const absl::Status& status) {
  for (const auto& stream : Streams()) stream->Abort(status);
}

bool StreamRegistry::AwaitNone(std::chrono::milliseconds timeout) const {
  absl::MutexLock lock(&mutex_);
  const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return streams_.empty(); };
  return mutex_.AwaitWithTimeout(absl::Condition(&none), absl::FromChrono(timeout));
}

std::size_t StreamRegistry::stream_count() const {
  absl::MutexLock lock(&mutex_);
  return streams_.size();
}

}  // namespace kvtrie
