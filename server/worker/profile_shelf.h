#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "storage/codec/profile_header.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// Profiles that callers have sent, in memory, within a bound; the one that was not used for longest
// goes first. Thread-safe.
class ProfileShelf {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  struct Held {
    ProfileId id;
    ProfileHeader header;
  };

  explicit ProfileShelf(std::size_t bytes_max) : bytes_max_(bytes_max) {}

  // Keeps a profile; one that is there stays. Errors: DataLoss or Unimplemented: it is none
  // (profile_header.h); ResourceExhausted: it is larger than all that may be kept.
  absl::StatusOr<Held> Add(std::vector<std::byte> profile);

  // Null: it is not here.
  Bytes Find(const ProfileId& id);
  // The level of a profile that is here; null figures where it is not.
  ProfileLevel LevelOf(const ProfileId& id, Quality quality) const;

  std::vector<Held> List() const;
  std::size_t bytes_max() const { return bytes_max_; }

 private:
  struct Entry {
    ProfileHeader header;
    Bytes bytes;
    std::uint64_t last_use = 0;
  };

  const std::size_t bytes_max_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<ProfileId, Entry> profiles_ ABSL_GUARDED_BY(mutex_);
  std::size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
