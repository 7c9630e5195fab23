#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace kvtrie {

class LocalRegion;

// A part of a LocalRegion, given back on destruction.
class RegionBuffer {
 public:
  RegionBuffer() = default;
  RegionBuffer(RegionBuffer&& other) noexcept { *this = std::move(other); }
  RegionBuffer& operator=(RegionBuffer&& other) noexcept;
  ~RegionBuffer() { Reset(); }

  std::span<std::byte> bytes() const { return bytes_; }
  explicit operator bool() const { return region_ != nullptr; }
  void Reset();

 private:
  friend class LocalRegion;
  RegionBuffer(std::shared_ptr<LocalRegion> region, std::span<std::byte> bytes)
      : region_(std::move(region)), bytes_(bytes) {}

  std::shared_ptr<LocalRegion> region_;
  std::span<std::byte> bytes_;
};

// Memory that a server on the same host can write to: a sealed memfd, and an allocator of whole
// pages over it. Buffers that are allocated in order and fill their pages lie one behind the other,
// so that a server can fill many of them in one go. Thread-safe.
class LocalRegion : public std::enable_shared_from_this<LocalRegion> {
 public:
  static constexpr std::size_t kPageBytes = 4096;

  // Takes address space; pages are taken as they are used.
  static absl::StatusOr<std::shared_ptr<LocalRegion>> Create(std::size_t bytes);
  ~LocalRegion();

  LocalRegion(const LocalRegion&) = delete;
  LocalRegion& operator=(const LocalRegion&) = delete;

  // ResourceExhausted: there is no free run of pages so long.
  absl::StatusOr<RegionBuffer> Allocate(std::size_t bytes);

  // Where `bytes` lie in the memfd; nullopt if they are not wholly shared with it.
  std::optional<std::uint64_t> OffsetOf(std::span<const std::byte> bytes) const;

  // Cuts the pages of `bytes` from the memfd: what a server still writes to them is not seen here.
  // From now on they are private memory. For a server that did not answer in time.
  void Withdraw(std::span<const std::byte> bytes);

  // REQUIRES: the range is within the region.
  std::span<std::byte> At(std::uint64_t offset, std::size_t bytes) const {
    return {base_ + offset, bytes};
  }
  int fd() const { return fd_; }
  std::size_t size() const { return size_; }
  std::size_t free_bytes() const;

 private:
  friend class RegionBuffer;
  LocalRegion(int fd, std::byte* base, std::size_t size);
  void Free(std::span<std::byte> bytes);

  const int fd_;
  std::byte* const base_;
  const std::size_t size_;

  mutable absl::Mutex mutex_;
  std::map<std::size_t, std::size_t> free_ ABSL_GUARDED_BY(mutex_);       // offset -> bytes
  std::map<std::size_t, std::size_t> withdrawn_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes
};

}  // namespace kvtrie
