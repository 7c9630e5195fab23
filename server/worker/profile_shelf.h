#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/profile_upload.h"
#include "storage/base/byte_budget.h"
#include "storage/base/clock.h"
#include "storage/codec/profile_header.h"
#include "storage/kv/ids.h"

namespace kvtrie {

struct ProfileShelfStats {
  std::uint64_t profiles = 0;      // now
  std::uint64_t bytes = 0;         // of these
  std::uint64_t upload_bytes = 0;  // announced by uploads that are under way
  std::uint64_t evicted_total = 0;
};

// Profiles that callers have sent, in memory, within a bound; the one that was not used for longest
// goes first. As much again may be on its way: it is counted from its announcement on, before any
// of its bytes are taken. Thread-safe.
//
// A profile in use is not evicted for a new one, which is refused instead: where more profiles are
// in use than there is room for, each would else evict another before it is used, and callers would
// send all of them again and again. A caller that is refused codes in its own process. To be sent
// counts as a use, since the items that a profile was sent for are still to come. A caller that
// sends many takes no more than the room of those that nobody uses.
class ProfileShelf {
 public:
  // A profile is in use for so long after each use: longer than items wait for their turn, and than
  // callers at work pause.
  static constexpr std::chrono::seconds kInUse{30};

  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  struct Held {
    ProfileId id;
    ProfileHeader header;
  };

  // The clock outlives this.
  explicit ProfileShelf(std::size_t bytes_max, Clock& clock = SystemClock())
      : bytes_max_(bytes_max), clock_(clock), uploads_(bytes_max) {}

  // Counts a profile of so many bytes among those on their way, until the sink is dropped; its
  // Commit is Add. The sink must not outlive this. InvalidArgument: no profile has this size.
  // ResourceExhausted: there is no room for it beside those in use, or beside the others on their
  // way.
  absl::StatusOr<std::unique_ptr<ProfileSink>> Begin(std::uint64_t total_bytes,
                                                     const ProfileId& expected);

  // Keeps a profile; one that is there stays. `expected`: its id, or zero. Errors leave all as it
  // was: DataLoss or Unimplemented: it is none (profile_header.h); FailedPrecondition: it has
  // another id; ResourceExhausted: there is no room for it beside those in use.
  absl::StatusOr<Held> Add(std::vector<std::byte> profile, const ProfileId& expected = {});

  // A use. Null: it is not here.
  Bytes Find(const ProfileId& id);
  // A use. The level of a profile that is here; null figures where it is not.
  ProfileLevel LevelOf(const ProfileId& id, Quality quality);

  std::vector<Held> List() const;
  ProfileShelfStats Stats() const;
  std::size_t bytes_max() const { return bytes_max_; }

 private:
  struct Entry {
    ProfileHeader header;
    Bytes bytes;
    Clock::Duration last_use{0};
  };

  // Null: it is not here. Counts as a use.
  Entry* Use(const ProfileId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // ResourceExhausted: not even without those that are not in use.
  absl::Status CheckRoom(std::size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EvictOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::size_t bytes_max_;
  Clock& clock_;
  ByteBudget uploads_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<ProfileId, Entry> profiles_ ABSL_GUARDED_BY(mutex_);
  std::size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t evicted_total_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
