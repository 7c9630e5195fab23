#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "storage/base/file_system.h"
#include "storage/base/free_space.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"

namespace kvtrie {
namespace {

// Kept so that removals can be written when the disk is full: as much as RocksDB wants to go on.
constexpr std::uint64_t kBallastBytesMax = std::uint64_t{16} << 20;

}  // namespace

std::uint64_t Engine::Core::DiskBytes() const {
  return payload_->Usage().disk_bytes + profiles_->disk_bytes() +
         meta_disk_bytes_.load(std::memory_order_relaxed);
}

std::vector<std::string> Engine::Core::DegradedReasons() const {
  static constexpr std::string_view kReasons[] = {"disk full",
                                                  "disk cannot be written",
                                                  "no space for metadata",
                                                  "metadata cannot be written",
                                                  "the last sync failed",
                                                  "other files fill the disk; the store shrinks"};
  std::vector<std::string> reasons;
  const unsigned bits = degraded_;
  for (std::size_t i = 0; i < std::size(kReasons); ++i) {
    if ((bits >> i & 1u) != 0) reasons.emplace_back(kReasons[i]);
  }
  return reasons;
}

void Engine::Core::SetDegraded(Degradation what, bool is_so) {
  const unsigned bit = 1u << static_cast<unsigned>(what);
  if (((degraded_.load(std::memory_order_relaxed) & bit) != 0) == is_so) return;
  if (is_so) {
    degraded_ |= bit;
  } else {
    degraded_ &= ~bit;
  }
}

absl::Status Engine::Core::WriteMeta(const MetaBatch& batch) {
  if (batch.empty()) return absl::OkStatus();
  const absl::Status status = meta_->Write(batch);
  SetDegraded(Degradation::kMetaDiskFull, absl::IsResourceExhausted(status));
  SetDegraded(Degradation::kMetaUnwritable, !status.ok() && !absl::IsResourceExhausted(status));
  dirty_.store(true, std::memory_order_relaxed);
  return status;
}

std::uint64_t Engine::Core::BallastBytes() const {
  return std::min(kBallastBytesMax, options_.disk_limit_bytes / 32);
}

void Engine::Core::KeepBallast() {
  if (ballast_there_) return;
  auto file = PosixFileSystem().Open(ballast_path(), FileSystem::Mode::kReadWrite, false);
  if (!file.ok()) {
    file = PosixFileSystem().Open(ballast_path(), FileSystem::Mode::kCreateNew, false);
  }
  if (!file.ok()) return;
  // One that was kept under a larger limit shrinks.
  if ((*file)->Allocate(0, BallastBytes()).ok() && (*file)->Truncate(BallastBytes()).ok()) {
    ballast_there_ = true;
  } else {
    PosixFileSystem().Remove(ballast_path()).IgnoreError();
  }
}

void Engine::Core::CountMetaBytes() {
  meta_disk_bytes_ = meta_->DiskBytes() + (ballast_there_ ? BallastBytes() : 0);
}

// Once a log has met a full disk, metadata takes nothing more until its buffers are written out,
// which needs as much again as the ballast.
bool Engine::Core::FitsTheDisk(std::uint64_t bytes) const {
  return FreeDiskBytes(options_.data_dir) >= bytes + BallastBytes();
}

bool Engine::Core::DropBallast() {
  if (!ballast_there_) return false;
  ballast_there_ = false;
  return PosixFileSystem().Remove(ballast_path()).ok();
}

// How many nodes have to go so that the index has room for so many more; a few more than that, so
// that not every put has to wait. 0: it has room.
std::uint64_t Engine::Core::SurplusNodes(std::uint64_t coming) const {
  absl::ReaderMutexLock lock(&index_mutex_);
  const std::uint64_t bytes =
      index_.used_bytes() + session_ends_.memory_bytes() + coming * TrieIndex::kNodeBytesMax;
  if (bytes <= options_.index_bytes_max) return 0;
  // Extra keys make nodes larger.
  const std::uint64_t node_bytes = std::max<std::uint64_t>(
      1, index_.used_bytes() / std::max<std::size_t>(1, index_.node_count()));
  return (bytes - options_.index_bytes_max) / node_bytes + 1 + index_.node_count() / 1024;
}

absl::Status Engine::Core::MakeRoom(std::uint64_t bytes, std::uint64_t nodes) {
  const std::uint64_t limit = options_.disk_limit_bytes;
  bool shrunk = false;
  // Evicting in strides keeps puts from waiting one by one.
  const std::uint64_t stride = std::max(bytes, std::min<std::uint64_t>(limit / 16, 64u << 20));
  absl::MutexLock room(&room_mutex_);
  while (true) {
    const std::uint64_t used = DiskBytes() + reserved_bytes_;
    const std::uint64_t surplus_nodes = SurplusNodes(nodes);
    const bool index_fits = surplus_nodes == 0;
    const bool limit_fits = used + bytes + allocate_ahead_bytes_ <= limit && index_fits;
    const bool disk_fits = !limit_fits || FitsTheDisk(reserved_bytes_ + bytes);
    if (limit_fits) SetDegraded(Degradation::kDiskShared, !disk_fits);
    // What others fill cannot be evicted: one stride at a time, not all that there is.
    if (limit_fits && (shrunk || disk_fits)) {
      reserved_bytes_ += bytes;
      return absl::OkStatus();
    }
    std::uint64_t pending_bytes;
    {
      absl::MutexLock lock(&sync_mutex_);
      pending_bytes = pending_free_bytes_;
    }
    if (pending_bytes > 0 && index_fits) {
      KV_RETURN_IF_ERROR(SyncAndFree());
      continue;
    }
    if (!options_.eviction) {
      SetDegraded(Degradation::kDiskFull, limit_fits);
      return absl::ResourceExhaustedError(limit_fits
                                              ? absl::StrCat("the disk is full; eviction is off")
                                              : absl::StrCat("the store is full: ", used, " of ",
                                                             limit, " bytes; eviction is off"));
    }
    KV_ASSIGN_OR_RETURN(const std::uint64_t evicted, index_fits
                                                         ? Evict(limit_fits ? 4 * bytes : stride, 0)
                                                         : Evict(0, surplus_nodes));
    shrunk = limit_fits;
    if (evicted == 0 && limit_fits) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the disk is full below the store's limit (", used, " of ", limit,
                       " bytes are used), and nothing can be evicted; free space on it"));
    }
    if (evicted == 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the store is full: ", used, " of ", limit,
                       " bytes, and pins, leases or puts under way hold all of it"));
    }
  }
}

}  // namespace kvtrie
