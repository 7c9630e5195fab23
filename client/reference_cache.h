#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// A stored frame that others were coded against, and the tokens that it takes to decode it.
struct ReferenceFrame {
  std::vector<std::byte> bytes;
  std::vector<TokenId> tokens;

  std::size_t memory_bytes() const {
    return sizeof(*this) + bytes.size() + tokens.size() * sizeof(TokenId);
  }
};

// Frames by model and block, the least recently used going first. A block's frame may have become
// another one at the server: members say by a digest what they need. Thread-safe.
class ReferenceCache {
 public:
  explicit ReferenceCache(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Null: it is not there.
  std::shared_ptr<const ReferenceFrame> Get(const ModelId& model, const TrieNodeId& node);
  // Takes the place of an earlier one. One that is larger than the limit is not kept.
  void Put(const ModelId& model, const TrieNodeId& node,
           std::shared_ptr<const ReferenceFrame> frame);
  void Drop(const ModelId& model, const TrieNodeId& node);

  std::size_t bytes() const;

 private:
  using Key = std::pair<ModelId, TrieNodeId>;
  struct Entry {
    Key key;
    std::shared_ptr<const ReferenceFrame> frame;
  };
  void DropEntry(std::list<Entry>::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::size_t limit_bytes_;
  mutable absl::Mutex mutex_;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // the latest used first
  absl::flat_hash_map<Key, std::list<Entry>::iterator> by_key_ ABSL_GUARDED_BY(mutex_);
  std::size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
