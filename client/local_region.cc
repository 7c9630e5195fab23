#include "client/local_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr std::size_t RoundUpToPage(std::size_t bytes) {
  return (bytes + LocalRegion::kPageBytes - 1) / LocalRegion::kPageBytes * LocalRegion::kPageBytes;
}

// Adds [offset, offset + bytes) to a map of runs that do not touch.
void InsertRun(std::map<std::size_t, std::size_t>& runs, std::size_t offset, std::size_t bytes) {
  auto next = runs.lower_bound(offset);
  if (next != runs.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second >= offset) {
      bytes = std::max(before->first + before->second, offset + bytes) - before->first;
      offset = before->first;
      runs.erase(before);
    }
  }
  while (next != runs.end() && next->first <= offset + bytes) {
    bytes = std::max(offset + bytes, next->first + next->second) - offset;
    next = runs.erase(next);
  }
  runs.emplace(offset, bytes);
}

}  // namespace

RegionBuffer& RegionBuffer::operator=(RegionBuffer&& other) noexcept {
  if (this != &other) {
    Reset();
    region_ = std::move(other.region_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

void RegionBuffer::Reset() {
  if (region_ != nullptr) region_->Free(bytes_);
  region_.reset();
  bytes_ = {};
}

absl::StatusOr<std::shared_ptr<LocalRegion>> LocalRegion::Create(std::size_t bytes) {
  const std::size_t size = std::max(kPageBytes, RoundUpToPage(bytes));
  const int fd = memfd_create("kvtrie-client", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return absl::ErrnoToStatus(errno, "memfd_create");
  if (ftruncate(fd, static_cast<off_t>(size)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    absl::Status status = absl::ErrnoToStatus(errno, "size and seals of a memfd");
    close(fd);
    return status;
  }
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    absl::Status status = absl::ErrnoToStatus(errno, "mmap of a memfd");
    close(fd);
    return status;
  }
  return std::shared_ptr<LocalRegion>(new LocalRegion(fd, static_cast<std::byte*>(base), size));
}

LocalRegion::LocalRegion(int fd, std::byte* base, std::size_t size)
    : fd_(fd), base_(base), size_(size) {
  free_.emplace(0, size);
}

LocalRegion::~LocalRegion() {
  munmap(base_, size_);
  close(fd_);
}

absl::StatusOr<RegionBuffer> LocalRegion::Allocate(std::size_t bytes) {
  const std::size_t room = RoundUpToPage(std::max<std::size_t>(bytes, 1));
  absl::MutexLock lock(&mutex_);
  for (auto run = free_.begin(); run != free_.end(); ++run) {
    const auto [offset, run_bytes] = *run;
    if (run_bytes < room) continue;
    free_.erase(run);
    if (run_bytes > room) free_.emplace(offset + room, run_bytes - room);
    return RegionBuffer(shared_from_this(), {base_ + offset, bytes});
  }
  return absl::ResourceExhaustedError("no room in the shared-memory region");
}

void LocalRegion::Free(std::span<std::byte> bytes) {
  const std::size_t begin = static_cast<std::size_t>(bytes.data() - base_);
  const std::size_t end = begin + RoundUpToPage(std::max<std::size_t>(bytes.size(), 1));
  absl::MutexLock lock(&mutex_);
  // Withdrawn pages do not come back: a server may still write to what lies behind them in the
  // memfd.
  std::size_t at = begin;
  for (const auto& [offset, withdrawn_bytes] : withdrawn_) {
    if (offset + withdrawn_bytes <= at) continue;
    if (offset >= end) break;
    if (offset > at) InsertRun(free_, at, offset - at);
    at = std::min(end, offset + withdrawn_bytes);
  }
  if (at < end) InsertRun(free_, at, end - at);
}

std::optional<std::uint64_t> LocalRegion::OffsetOf(std::span<const std::byte> bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  const auto base = reinterpret_cast<std::uintptr_t>(base_);
  if (address < base || address - base > size_ || bytes.size() > size_ - (address - base)) {
    return std::nullopt;
  }
  const std::size_t begin = address - base;
  absl::MutexLock lock(&mutex_);
  for (const auto& [offset, withdrawn_bytes] : withdrawn_) {
    if (begin < offset + withdrawn_bytes && offset < begin + bytes.size()) return std::nullopt;
  }
  return begin;
}

void LocalRegion::Withdraw(std::span<const std::byte> bytes) {
  const std::size_t offset = static_cast<std::size_t>(bytes.data() - base_);
  const std::size_t begin = offset / kPageBytes * kPageBytes;
  const std::size_t end = RoundUpToPage(offset + bytes.size());
  absl::MutexLock lock(&mutex_);
  // What else lies on the first and the last page stays readable.
  const std::vector<std::byte> content(base_ + begin, base_ + end);
  void* const mapped = mmap(base_ + begin, end - begin, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  KV_CHECK(mapped == base_ + begin);
  std::memcpy(base_ + begin, content.data(), content.size());
  InsertRun(withdrawn_, begin, end - begin);
}

std::size_t LocalRegion::free_bytes() const {
  absl::MutexLock lock(&mutex_);
  std::size_t bytes = 0;
  for (const auto& run : free_) bytes += run.second;
  return bytes;
}

}  // namespace kvtrie
