#include "client/reference_cache.h"

#include <iterator>

namespace kvtrie {

std::shared_ptr<const ReferenceFrame> ReferenceCache::Get(const ModelId& model,
                                                          const TrieNodeId& node) {
  absl::MutexLock lock(&mutex_);
  const auto found = by_key_.find({model, node});
  if (found == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->frame;
}

void ReferenceCache::Put(const ModelId& model, const TrieNodeId& node,
                         std::shared_ptr<const ReferenceFrame> frame) {
  absl::MutexLock lock(&mutex_);
  if (const auto found = by_key_.find({model, node}); found != by_key_.end()) {
    DropEntry(found->second);
  }
  if (frame->memory_bytes() > limit_bytes_) return;
  bytes_ += frame->memory_bytes();
  entries_.push_front({{model, node}, std::move(frame)});
  by_key_[{model, node}] = entries_.begin();
  while (bytes_ > limit_bytes_) DropEntry(std::prev(entries_.end()));
}

void ReferenceCache::Drop(const ModelId& model, const TrieNodeId& node) {
  absl::MutexLock lock(&mutex_);
  if (const auto found = by_key_.find({model, node}); found != by_key_.end()) {
    DropEntry(found->second);
  }
}

std::size_t ReferenceCache::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

void ReferenceCache::DropEntry(std::list<Entry>::iterator entry) {
  bytes_ -= entry->frame->memory_bytes();
  by_key_.erase(entry->key);
  entries_.erase(entry);
}

}  // namespace kvtrie
