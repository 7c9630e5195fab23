#pragma once

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "storage/codec/reference_table.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

// Digests of the raw KV of frames that others are coded against, by where they lie: each is decoded
// once to be compared with what its members say. Bounded; thread-safe.
class ReferenceDigests {
 public:
  std::optional<KvDigest> Find(const PayloadLocation& at) const;
  // REQUIRES: the frame is still named by a row.
  void Add(const PayloadLocation& at, const KvDigest& digest);
  // What lies there is about to be another frame.
  void Forget(const PayloadLocation& at);

 private:
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<PayloadLocation, KvDigest> digests_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
