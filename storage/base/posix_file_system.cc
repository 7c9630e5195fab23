#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/file_system.h"
#include "storage/base/shared_bytes.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

// What one read or write call may move; Linux stops a little below 2 GiB.
constexpr std::size_t kCallBytesMax = std::size_t{1} << 30;
constexpr mode_t kFilePermissions = 0600;
constexpr mode_t kFolderPermissions = 0700;

// The only place where an errno becomes one of our errors.
absl::Status FromErrno(int error, const char* operation, const std::string& path) {
  const std::string message = absl::StrCat(operation, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(message);
    case ENOENT:
      return absl::NotFoundError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// A call without an answer that a signal may interrupt.
template <typename Call>
absl::Status Retry(const char* operation, const std::string& path, Call call) {
  while (call() != 0) {
    if (errno != EINTR) return FromErrno(errno, operation, path);
  }
  return absl::OkStatus();
}

bool IsAligned(std::uint64_t value) { return value % AlignedBuffer::kAlignment == 0; }

class PosixFile final : public File {
 public:
  PosixFile(int descriptor, std::string path, bool direct)
      : descriptor_(descriptor), path_(std::move(path)), direct_(direct) {}
  ~PosixFile() override { ::close(descriptor_); }

  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  absl::Status Write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const auto piece = bytes.subspan(done, std::min(bytes.size() - done, kCallBytesMax));
      const ssize_t count =
          ::pwrite(descriptor_, piece.data(), piece.size(), static_cast<off_t>(offset + done));
      if (count < 0) {
        if (errno == EINTR || (errno == EINVAL && LeaveDirect(offset + done, piece))) continue;
        return FromErrno(errno, "write", path_);
      }
      std::size_t next = done + static_cast<std::size_t>(count);
      // A short direct write may end off a page: its last page is written again.
      if (next < bytes.size() && direct()) next -= next % AlignedBuffer::kAlignment;
      if (next == done) return FromErrno(EIO, "write", path_);
      done = next;
    }
    return absl::OkStatus();
  }

  absl::Status WritePieces(std::uint64_t offset,
                           std::span<const std::span<const std::byte>> pieces) override {
    if (pieces.size() == 1) return Write(offset, pieces.front());
    if (direct() && !gathers_.load(std::memory_order_relaxed)) return WriteJoined(offset, pieces);
    std::vector<iovec> vectors;
    vectors.reserve(pieces.size());
    for (const auto& piece : pieces) {
      vectors.push_back({const_cast<std::byte*>(piece.data()), piece.size()});
    }
    std::uint64_t done = 0;
    for (std::span<iovec> rest = vectors; !rest.empty();) {
      const auto now = rest.first(std::min<std::size_t>(rest.size(), IOV_MAX));
      const ssize_t written = ::pwritev(descriptor_, now.data(), static_cast<int>(now.size()),
                                        static_cast<off_t>(offset + done));
      if (written < 0) {
        if (errno == EINTR) continue;
        if (errno != EINVAL || !direct()) return FromErrno(errno, "write", path_);
        // A disk with sectors larger than the pieces' steps.
        gathers_.store(false, std::memory_order_relaxed);
        return WriteJoined(offset, pieces);
      }
      std::size_t count = static_cast<std::size_t>(written);
      std::size_t rest_bytes = 0;
      for (const iovec& vector : rest) rest_bytes += vector.iov_len;
      // A short direct write may end off a page: its last page is written again.
      if (count < rest_bytes && direct()) count -= count % AlignedBuffer::kAlignment;
      if (count == 0) return FromErrno(EIO, "write", path_);
      done += count;
      while (!rest.empty() && count >= rest.front().iov_len) {
        count -= rest.front().iov_len;
        rest = rest.subspan(1);
      }
      if (count > 0) {
        rest.front().iov_base = static_cast<std::byte*>(rest.front().iov_base) + count;
        rest.front().iov_len -= count;
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::size_t> Read(std::uint64_t offset, std::span<std::byte> bytes) override {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const auto piece = bytes.subspan(done, std::min(bytes.size() - done, kCallBytesMax));
      const ssize_t count =
          ::pread(descriptor_, piece.data(), piece.size(), static_cast<off_t>(offset + done));
      if (count < 0) {
        if (errno == EINTR || (errno == EINVAL && LeaveDirect(offset + done, piece))) continue;
        return FromErrno(errno, "read", path_);
      }
      done += static_cast<std::size_t>(count);
      // Direct reads stop off a page boundary only at the end of the file.
      if (count == 0 || (direct() && !IsAligned(done))) break;
    }
    return done;
  }

  absl::Status Allocate(std::uint64_t offset, std::uint64_t length) override {
    return Fallocate("allocate", 0, offset, length);
  }

  absl::Status PunchHole(std::uint64_t offset, std::uint64_t length) override {
    return Fallocate("punch hole in", FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
  }

  absl::Status Truncate(std::uint64_t size) override {
    return Retry("truncate", path_,
                 [&] { return ::ftruncate(descriptor_, static_cast<off_t>(size)); });
  }

  absl::Status SyncData() override {
    return Retry("sync", path_, [&] { return ::fdatasync(descriptor_); });
  }

  absl::StatusOr<std::uint64_t> Size() const override {
    KV_ASSIGN_OR_RETURN(const struct stat status, Stat());
    return static_cast<std::uint64_t>(status.st_size);
  }

  absl::StatusOr<std::uint64_t> AllocatedBytes() const override {
    constexpr std::uint64_t kStatUnitBytes = 512;
    KV_ASSIGN_OR_RETURN(const struct stat status, Stat());
    return static_cast<std::uint64_t>(status.st_blocks) * kStatUnitBytes;
  }

  absl::StatusOr<std::uint64_t> NextData(std::uint64_t offset) const override {
    const off_t data = ::lseek(descriptor_, static_cast<off_t>(offset), SEEK_DATA);
    if (data >= 0) return static_cast<std::uint64_t>(data);
    if (errno == ENXIO) return Size();
    return offset;
  }

  bool direct() const override { return direct_.load(std::memory_order_relaxed); }

 private:
  // For devices that take no pieces: one copy.
  absl::Status WriteJoined(std::uint64_t offset,
                           std::span<const std::span<const std::byte>> pieces) {
    std::size_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.size();
    AlignedBuffer joined(bytes);
    std::byte* end = joined.data();
    for (const auto& piece : pieces) end = std::copy(piece.begin(), piece.end(), end);
    return Write(offset, {joined.data(), bytes});
  }

  // Some file systems accept O_DIRECT at open and refuse it at the first read or write. False when
  // the caller's own alignment is to blame, or direct I/O is off already.
  bool LeaveDirect(std::uint64_t offset, std::span<const std::byte> bytes) {
    const bool aligned = IsAligned(offset) && IsAligned(bytes.size()) &&
                         IsAligned(reinterpret_cast<std::uintptr_t>(bytes.data()));
    if (!aligned || !direct()) return false;
    const int flags = ::fcntl(descriptor_, F_GETFL);
    if (flags < 0 || ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) < 0) return false;
    direct_.store(false, std::memory_order_relaxed);
    return true;
  }

  absl::Status Fallocate(const char* operation, int mode, std::uint64_t offset,
                         std::uint64_t length) {
    while (::fallocate(descriptor_, mode, static_cast<off_t>(offset), static_cast<off_t>(length)) !=
           0) {
      if (errno == EOPNOTSUPP || errno == ENOSYS) {
        return absl::UnimplementedError(absl::StrCat("cannot ", operation, " ", path_));
      }
      if (errno != EINTR) return FromErrno(errno, operation, path_);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<struct stat> Stat() const {
    struct stat status;
    KV_RETURN_IF_ERROR(Retry("stat", path_, [&] { return ::fstat(descriptor_, &status); }));
    return status;
  }

  const int descriptor_;
  const std::string path_;
  std::atomic<bool> direct_;
  std::atomic<bool> gathers_{true};  // takes pieces with direct I/O
};

int OpenRetrying(const std::string& path, int flags) {
  int descriptor;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC, kFilePermissions);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

class RealFileSystem final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, Mode mode,
                                             bool direct) override {
    int flags = 0;
    switch (mode) {
      case Mode::kCreateNew:
        flags = O_RDWR | O_CREAT | O_EXCL;
        break;
      case Mode::kReadWrite:
        flags = O_RDWR;
        break;
      case Mode::kReadOnly:
        flags = O_RDONLY;
        break;
    }
    int descriptor = OpenRetrying(path, direct ? flags | O_DIRECT : flags);
    if (descriptor < 0 && errno == EINVAL && direct) {
      direct = false;
      // The failed open may have created the file.
      descriptor = OpenRetrying(path, flags & ~O_EXCL);
    }
    if (descriptor < 0) return FromErrno(errno, "open", path);
    return std::make_unique<PosixFile>(descriptor, path, direct);
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& folder) override {
    DIR* const entries = ::opendir(folder.c_str());
    if (entries == nullptr) return FromErrno(errno, "list", folder);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(entries)) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    const int error = errno;
    ::closedir(entries);
    if (error != 0) return FromErrno(error, "list", folder);
    return names;
  }

  absl::Status CreateFolder(const std::string& folder) override {
    struct stat status;
    if (::stat(folder.c_str(), &status) == 0) {
      return S_ISDIR(status.st_mode) ? absl::OkStatus()
                                     : FromErrno(ENOTDIR, "create folder", folder);
    }
    const std::string parent = ParentOf(folder);
    if (parent != folder) KV_RETURN_IF_ERROR(CreateFolder(parent));
    if (::mkdir(folder.c_str(), kFolderPermissions) != 0 && errno != EEXIST) {
      return FromErrno(errno, "create folder", folder);
    }
    return SyncFolder(parent);
  }

  absl::Status Remove(const std::string& path) override {
    return Retry("remove", path, [&] { return ::unlink(path.c_str()); });
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Retry("rename", from, [&] { return ::rename(from.c_str(), to.c_str()); });
  }

  absl::Status SyncFolder(const std::string& folder) override { return SyncWith(::fsync, folder); }

  absl::Status SyncAll(const std::string& folder) override { return SyncWith(::syncfs, folder); }

 private:
  static absl::Status SyncWith(int (*sync)(int), const std::string& folder) {
    const int descriptor = OpenRetrying(folder, O_RDONLY | O_DIRECTORY);
    if (descriptor < 0) return FromErrno(errno, "open", folder);
    const absl::Status status = Retry("sync", folder, [&] { return sync(descriptor); });
    ::close(descriptor);
    return status;
  }

  static std::string ParentOf(std::string_view folder) {
    while (folder.size() > 1 && folder.ends_with('/')) folder.remove_suffix(1);
    const std::size_t slash = folder.rfind('/');
    if (slash == std::string_view::npos) return ".";
    return std::string(folder.substr(0, std::max<std::size_t>(slash, 1)));
  }
};

}  // namespace

FileSystem& PosixFileSystem() {
  static RealFileSystem file_system;
  return file_system;
}

}  // namespace kvtrie
