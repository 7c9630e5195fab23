#include "storage/engine/memory_tier.h"

#include <utility>
#include <vector>

namespace kvtrie {

SharedBytes MemoryTier::Get(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(at);
  if (found == entries_.end()) return {};
  recency_.splice(recency_.begin(), recency_, found->second);
  return found->second->frame;
}

bool MemoryTier::Contains(const PayloadLocation& at) const {
  absl::MutexLock lock(&mutex_);
  return entries_.contains(at);
}

void MemoryTier::Insert(const PayloadLocation& at, SharedBytes frame) {
  const std::size_t bytes = frame.owner->memory_bytes();
  if (bytes > limit_bytes_) return;
  std::vector<SharedBytes> dropped;  // freed after the lock: giving back large buffers takes time
  absl::MutexLock lock(&mutex_);
  if (entries_.contains(at)) return;
  while (used_bytes_ + bytes > limit_bytes_) {
    dropped.push_back(std::move(recency_.back().frame));
    used_bytes_ -= dropped.back().owner->memory_bytes();
    entries_.erase(recency_.back().at);
    recency_.pop_back();
  }
  recency_.push_front({at, std::move(frame)});
  entries_.emplace(at, recency_.begin());
  used_bytes_ += bytes;
}

void MemoryTier::Erase(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(at);
  if (found == entries_.end()) return;
  used_bytes_ -= found->second->frame.owner->memory_bytes();
  recency_.erase(found->second);
  entries_.erase(found);
}

std::size_t MemoryTier::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return used_bytes_;
}

}  // namespace kvtrie
