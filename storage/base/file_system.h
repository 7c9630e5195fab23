#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtrie {

// An open file. Thread-safe for calls on disjoint ranges. Destruction closes.
//
// Errors, unless a call says more: ResourceExhausted when there is no space (or the user's disk
// quota is full), Unavailable for anything else that the operating system refuses.
class File {
 public:
  virtual ~File() = default;

  // All or nothing as far as the caller can tell: on error the range is undefined.
  // With direct I/O, `bytes`, its size and `offset` are multiples of 4096.
  virtual absl::Status Write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;

  // The pieces behind each other, in one call to the system where it can. With direct I/O, `offset`
  // and the sum of the sizes are multiples of 4096, each size one of 512, and each piece is aligned
  // to 4096.
  virtual absl::Status WritePieces(std::uint64_t offset,
                                   std::span<const std::span<const std::byte>> pieces) = 0;

  // Reads exactly `bytes.size()`, or up to the end of the file; returns how many.
  virtual absl::StatusOr<std::size_t> Read(std::uint64_t offset, std::span<std::byte> bytes) = 0;

  // Allocates disk space without changing what is read; extends the file's size. On error some of
  // the range may be allocated. Unimplemented: the file system cannot; nothing has changed.
  virtual absl::Status Allocate(std::uint64_t offset, std::uint64_t length) = 0;

  // The range reads as zeros and its whole pages are given back; the size stays.
  // Unimplemented: the file system cannot; nothing has changed.
  virtual absl::Status PunchHole(std::uint64_t offset, std::uint64_t length) = 0;

  virtual absl::Status Truncate(std::uint64_t size) = 0;
  virtual absl::Status SyncData() = 0;

  virtual absl::StatusOr<std::uint64_t> Size() const = 0;
  // Allocated on disk, as `du` counts.
  virtual absl::StatusOr<std::uint64_t> AllocatedBytes() const = 0;
  // The first offset at or after `offset` that may hold something else than zeros; the file's size
  // when there is none. A file system that knows no holes answers `offset`.
  virtual absl::StatusOr<std::uint64_t> NextData(std::uint64_t offset) const = 0;
  virtual bool direct() const = 0;
};

// The part of the operating system that storage stands on; tests put one in between that fails,
// tears writes and forgets what was not synced. Thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  enum class Mode { kCreateNew, kReadWrite, kReadOnly };
  // Direct I/O when `direct` and the file system can; else through the page cache.
  // NotFound: there is no such file.
  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, Mode mode,
                                                     bool direct) = 0;
  // Names of what is in the folder, in no order.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& folder) = 0;
  // With parents, durable on return; OK if it exists.
  virtual absl::Status CreateFolder(const std::string& folder) = 0;
  // NotFound: there is no such file.
  virtual absl::Status Remove(const std::string& path) = 0;
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  // Makes creations, renames and removals in the folder durable.
  virtual absl::Status SyncFolder(const std::string& folder) = 0;
  // Makes all durable that was done so far to the file system that holds the folder, by anybody.
  virtual absl::Status SyncAll(const std::string& folder) = 0;
};

// The machine's; lives for ever.
FileSystem& PosixFileSystem();

}  // namespace kvtrie
