#include "storage/engine/memory_tier.h"

#include <utility>

namespace kvtrie {

SharedBytes MemoryTier::Get(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(at);
  if (found == entries_.end()) return {};
  Entry& entry = *found->second;
  if (std::exchange(entry.is_unasked, false)) {
    prefetch_stats_.unasked_bytes -= entry.frame.owner->memory_bytes();
    ++prefetch_stats_.useful_frames;
    prefetch_stats_.useful_bytes += entry.frame.view.size();
    recency_.splice(recency_.begin(), unasked_, found->second);
  } else {
    recency_.splice(recency_.begin(), recency_, found->second);
  }
  entry.was_read = true;
  return entry.frame;
}

bool MemoryTier::Contains(const PayloadLocation& at) const {
  absl::MutexLock lock(&mutex_);
  return entries_.contains(at);
}

std::vector<bool> MemoryTier::Contains(std::span<const PayloadLocation> places) const {
  std::vector<bool> contained(places.size());
  absl::MutexLock lock(&mutex_);
  for (std::size_t i = 0; i < places.size(); ++i) contained[i] = entries_.contains(places[i]);
  return contained;
}

void MemoryTier::Insert(const PayloadLocation& at, SharedBytes frame) {
  const std::size_t bytes = frame.owner->memory_bytes();
  if (bytes > limit_bytes_) return;
  std::vector<SharedBytes> dropped;  // freed after the lock: giving back large buffers takes time
  absl::MutexLock lock(&mutex_);
  if (const auto found = entries_.find(at); found != entries_.end()) {
    // Read by both at once: to read it ahead was of no use.
    if (std::exchange(found->second->is_unasked, false)) {
      CountUnaskedLeft(*found->second);
      recency_.splice(recency_.begin(), unasked_, found->second);
    }
    return;
  }
  while (used_bytes_ + bytes > limit_bytes_) {
    Drop(unasked_.empty() ? recency_ : unasked_, &dropped);
  }
  recency_.push_front({.at = at, .frame = std::move(frame)});
  entries_.emplace(at, recency_.begin());
  used_bytes_ += bytes;
}

bool MemoryTier::InsertPrefetched(const PayloadLocation& at, SharedBytes frame,
                                  MayReplace may_replace, Clock::Duration now) {
  const std::size_t bytes = frame.owner->memory_bytes();
  if (bytes > limit_bytes_) return false;
  std::vector<SharedBytes> dropped;
  absl::MutexLock lock(&mutex_);
  if (entries_.contains(at)) return false;
  if (prefetch_stats_.unasked_bytes + bytes > prefetch_limit_bytes_) return false;
  while (used_bytes_ + bytes > limit_bytes_) {
    if (recency_.empty()) return false;
    if (may_replace == MayReplace::kNeverRead && recency_.back().was_read) return false;
    Drop(recency_, &dropped);
  }
  unasked_.push_front({.at = at, .frame = std::move(frame), .is_unasked = true, .came = now});
  entries_.emplace(at, unasked_.begin());
  used_bytes_ += bytes;
  prefetch_stats_.unasked_bytes += bytes;
  return true;
}

void MemoryTier::DropPrefetched(Clock::Duration came_before) {
  std::vector<SharedBytes> dropped;
  absl::MutexLock lock(&mutex_);
  while (!unasked_.empty() && unasked_.back().came < came_before) Drop(unasked_, &dropped);
}

void MemoryTier::Drop(Entries& list, std::vector<SharedBytes>* dropped) {
  CountLeaving(list.back());
  dropped->push_back(std::move(list.back().frame));
  entries_.erase(list.back().at);
  list.pop_back();
}

void MemoryTier::CountLeaving(const Entry& entry) {
  used_bytes_ -= entry.frame.owner->memory_bytes();
  if (entry.is_unasked) CountUnaskedLeft(entry);
}

void MemoryTier::CountUnaskedLeft(const Entry& entry) {
  prefetch_stats_.unasked_bytes -= entry.frame.owner->memory_bytes();
  ++prefetch_stats_.wasted_frames;
  prefetch_stats_.wasted_bytes += entry.frame.view.size();
}

void MemoryTier::Erase(const PayloadLocation& at) {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(at);
  if (found == entries_.end()) return;
  CountLeaving(*found->second);
  (found->second->is_unasked ? unasked_ : recency_).erase(found->second);
  entries_.erase(found);
}

std::size_t MemoryTier::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return used_bytes_;
}

MemoryTier::PrefetchStats MemoryTier::prefetch_stats() const {
  absl::MutexLock lock(&mutex_);
  return prefetch_stats_;
}

}  // namespace kvtrie
