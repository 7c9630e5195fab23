#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/file_system.h"

namespace kvtrie {

// A file system in memory that fails as real ones do: it fills up, breaks, turns read-only, and in
// a power loss forgets or tears whatever was not synced, folder entries included. Thread-safe.
class FaultyFileSystem final : public FileSystem {
 public:
  static constexpr std::uint64_t kPageBytes = 4096;
  static constexpr std::uint64_t kSectorBytes = 512;

  static constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

  // ---- Faults

  // Allocating beyond so many bytes gives ResourceExhausted.
  void SetCapacity(std::uint64_t bytes) {
    absl::MutexLock lock(&mutex_);
    capacity_bytes_ = bytes;
  }
  // Every change gives Unavailable from now on; reads go on (EROFS, or EIO on a dying disk).
  void SetReadOnly(bool read_only) {
    absl::MutexLock lock(&mutex_);
    read_only_ = read_only;
  }
  // The next `count` writes fail after a part of their pages was written.
  void TearWrites(int count) {
    absl::MutexLock lock(&mutex_);
    torn_writes_ = count;
  }
  void FailSyncs(int count) {
    absl::MutexLock lock(&mutex_);
    failing_syncs_ = count;
  }
  void SetPunchesHoles(bool punches) {
    absl::MutexLock lock(&mutex_);
    punches_holes_ = punches;
  }
  void SetAllocates(bool allocates) {
    absl::MutexLock lock(&mutex_);
    allocates_ = allocates;
  }
  void SetDirect(bool direct) {
    absl::MutexLock lock(&mutex_);
    direct_ = direct;
  }

  // Files opened before answer Unavailable for ever; nothing is lost. As kill -9 does it.
  void KillProcess() {
    absl::MutexLock lock(&mutex_);
    ++life_;
  }

  // As KillProcess; moreover each change that was not synced is kept, lost, or (a write) torn, by
  // `random`. Of a torn write some sectors are old, and a page may be neither old nor new.
  void LosePower(std::mt19937_64& random) {
    absl::MutexLock lock(&mutex_);
    ++life_;
    for (auto& [path, folder] : folders_) {
      for (const auto& change : std::exchange(folder.unsynced, {})) {
        if (random() % 2 == 0) change(folder.durable);
      }
      folder.current = folder.durable;
    }
    std::set<Inode*> seen;
    for (auto& [path, folder] : folders_) {
      for (auto& [name, inode] : folder.current) {
        if (!seen.insert(inode.get()).second) continue;
        for (const Change& change : std::exchange(inode->unsynced, {})) {
          switch (random() % 3) {
            case 0:
              break;
            case 1:
              Apply(change, inode->durable);
              break;
            default:
              Apply(Torn(change, random), inode->durable);
          }
        }
        inode->current = inode->durable;
      }
    }
  }

  // ---- What a test looks at

  std::uint64_t AllocatedBytes() const {
    absl::MutexLock lock(&mutex_);
    return AllocatedLocked();
  }

  // What of a file's pages from `offset` on is allocated.
  std::uint64_t BytesOfPages(const std::string& path, std::uint64_t offset,
                             std::uint64_t page_count) const {
    absl::MutexLock lock(&mutex_);
    std::uint64_t bytes = 0;
    for (std::uint64_t page = offset / kPageBytes; page < offset / kPageBytes + page_count;
         ++page) {
      bytes += FindLocked(path)->current.allocated.contains(page) ? kPageBytes : 0;
    }
    return bytes;
  }

  // Flips one bit of a file's content, in memory and on disk. False when the file is empty.
  bool FlipBit(const std::string& path, std::mt19937_64& random) {
    absl::MutexLock lock(&mutex_);
    const auto inode = FindLocked(path);
    if (inode == nullptr || inode->current.pages.empty()) return false;
    auto page = inode->current.pages.begin();
    std::advance(page, static_cast<std::ptrdiff_t>(random() % inode->current.pages.size()));
    Page changed = *page->second;
    const std::size_t at = random() % kPageBytes;
    changed[at] ^= static_cast<std::byte>(1u << (random() % 8));
    page->second = std::make_shared<const Page>(changed);
    inode->durable = inode->current;
    inode->unsynced.clear();
    return true;
  }

  // Replaces the content of one file by that of another.
  void CopyFile(const std::string& from, const std::string& to) {
    absl::MutexLock lock(&mutex_);
    const auto source = FindLocked(from);
    auto copy = std::make_shared<Inode>();
    copy->current = copy->durable = source->current;
    auto& folder = folders_.at(FolderOf(to));
    folder.current[NameOf(to)] = folder.durable[NameOf(to)] = std::move(copy);
  }

  // ---- FileSystem

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, Mode mode,
                                             bool direct) override {
    absl::MutexLock lock(&mutex_);
    const auto folder = folders_.find(FolderOf(path));
    if (folder == folders_.end()) return absl::NotFoundError(path);
    auto inode = FindLocked(path);
    if (mode == Mode::kCreateNew) {
      if (inode != nullptr) return absl::UnavailableError(absl::StrCat(path, " exists"));
      if (absl::Status status = MayChange(); !status.ok()) return status;
      inode = std::make_shared<Inode>();
      ChangeFolder(folder->second,
                   [name = NameOf(path), inode](Entries& entries) { entries[name] = inode; });
    } else if (inode == nullptr) {
      return absl::NotFoundError(path);
    } else if (mode == Mode::kReadWrite && read_only_) {
      return absl::UnavailableError("read-only file system");
    }
    return std::make_unique<OpenFile>(*this, std::move(inode), life_, direct && direct_);
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    const auto folder = folders_.find(path);
    if (folder == folders_.end()) return absl::NotFoundError(path);
    std::vector<std::string> names;
    for (const auto& [name, inode] : folder->second.current) names.push_back(name);
    return names;
  }

  absl::Status CreateFolder(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    folders_[path];
    return absl::OkStatus();
  }

  absl::Status Remove(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    if (FindLocked(path) == nullptr) return absl::NotFoundError(path);
    if (absl::Status status = MayChange(); !status.ok()) return status;
    ChangeFolder(folders_.at(FolderOf(path)),
                 [name = NameOf(path)](Entries& entries) { entries.erase(name); });
    return absl::OkStatus();
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    absl::MutexLock lock(&mutex_);
    const auto inode = FindLocked(from);
    if (inode == nullptr) return absl::NotFoundError(from);
    if (absl::Status status = MayChange(); !status.ok()) return status;
    ChangeFolder(folders_.at(FolderOf(from)),
                 [inode, old_name = NameOf(from), new_name = NameOf(to)](Entries& entries) {
                   entries.erase(old_name);
                   entries[new_name] = inode;
                 });
    return absl::OkStatus();
  }

  absl::Status SyncFolder(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = MaySync(); !status.ok()) return status;
    auto& folder = folders_.at(path);
    folder.durable = folder.current;
    folder.unsynced.clear();
    return absl::OkStatus();
  }

  absl::Status SyncAll(const std::string& path) override {
    {
      absl::MutexLock lock(&mutex_);
      for (auto& [name, inode] : folders_.at(path).current) {
        inode->durable = inode->current;
        inode->unsynced.clear();
      }
    }
    return SyncFolder(path);
  }

 private:
  using Page = std::array<std::byte, kPageBytes>;

  struct Content {
    std::map<std::uint64_t, std::shared_ptr<const Page>> pages;  // those that were written
    std::set<std::uint64_t> allocated;                           // a superset
    std::uint64_t size = 0;
  };

  struct Change {
    enum class Kind { kWrite, kAllocate, kPunch, kTruncate } kind;
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    std::vector<std::byte> bytes;
    std::set<std::uint64_t> lost_sectors;            // of a torn write, counted from its start
    std::optional<std::uint64_t> garbled_page = {};  // of the file: was being written at the time
  };

  struct Inode {
    Content current;
    Content durable;
    std::vector<Change> unsynced;
  };

  using Entries = std::map<std::string, std::shared_ptr<Inode>>;

  struct Folder {
    Entries current;
    Entries durable;
    std::vector<std::function<void(Entries&)>> unsynced;
  };

  class OpenFile final : public File {
   public:
    OpenFile(FaultyFileSystem& system, std::shared_ptr<Inode> inode, int life, bool direct)
        : system_(system), inode_(std::move(inode)), life_(life), direct_(direct) {}

    absl::Status Write(std::uint64_t offset, std::span<const std::byte> bytes) override {
      if (absl::Status status = CheckDirect(offset, bytes, bytes.size()); !status.ok()) {
        return status;
      }
      return system_.Mutate(*inode_, life_,
                            {Change::Kind::kWrite,
                             offset,
                             bytes.size(),
                             std::vector<std::byte>(bytes.begin(), bytes.end()),
                             {}});
    }
    // One write as the power sees it.
    absl::Status WritePieces(std::uint64_t offset,
                             std::span<const std::span<const std::byte>> pieces) override {
      std::vector<std::byte> bytes;
      for (const auto& piece : pieces) bytes.insert(bytes.end(), piece.begin(), piece.end());
      for (const auto& piece : pieces) {
        if (absl::Status status = CheckDirect(offset, piece, bytes.size()); !status.ok()) {
          return status;
        }
      }
      const std::uint64_t length = bytes.size();
      return system_.Mutate(*inode_, life_,
                            {Change::Kind::kWrite, offset, length, std::move(bytes), {}});
    }
    absl::StatusOr<std::size_t> Read(std::uint64_t offset, std::span<std::byte> bytes) override {
      if (absl::Status status = CheckDirect(offset, bytes, bytes.size()); !status.ok()) {
        return status;
      }
      absl::MutexLock lock(&system_.mutex_);
      if (absl::Status status = system_.Alive(life_); !status.ok()) return status;
      const Content& content = inode_->current;
      if (offset >= content.size) return 0;
      const std::size_t count = std::min<std::uint64_t>(bytes.size(), content.size - offset);
      for (std::size_t done = 0; done < count;) {
        const std::uint64_t at = offset + done;
        const std::size_t step =
            std::min<std::uint64_t>(count - done, kPageBytes - at % kPageBytes);
        const auto page = content.pages.find(at / kPageBytes);
        if (page == content.pages.end()) {
          std::memset(bytes.data() + done, 0, step);
        } else {
          std::memcpy(bytes.data() + done, page->second->data() + at % kPageBytes, step);
        }
        done += step;
      }
      return count;
    }
    absl::Status Allocate(std::uint64_t offset, std::uint64_t length) override {
      return system_.Mutate(*inode_, life_, {Change::Kind::kAllocate, offset, length, {}, {}});
    }
    absl::Status PunchHole(std::uint64_t offset, std::uint64_t length) override {
      return system_.Mutate(*inode_, life_, {Change::Kind::kPunch, offset, length, {}, {}});
    }
    absl::Status Truncate(std::uint64_t size) override {
      return system_.Mutate(*inode_, life_, {Change::Kind::kTruncate, size, 0, {}, {}});
    }
    absl::Status SyncData() override {
      absl::MutexLock lock(&system_.mutex_);
      if (absl::Status status = system_.Alive(life_); !status.ok()) return status;
      if (absl::Status status = system_.MaySync(); !status.ok()) return status;
      inode_->durable = inode_->current;
      inode_->unsynced.clear();
      return absl::OkStatus();
    }
    absl::StatusOr<std::uint64_t> Size() const override {
      absl::MutexLock lock(&system_.mutex_);
      return inode_->current.size;
    }
    absl::StatusOr<std::uint64_t> AllocatedBytes() const override {
      absl::MutexLock lock(&system_.mutex_);
      return inode_->current.allocated.size() * kPageBytes;
    }
    absl::StatusOr<std::uint64_t> NextData(std::uint64_t offset) const override {
      absl::MutexLock lock(&system_.mutex_);
      const auto page = inode_->current.pages.lower_bound(offset / kPageBytes);
      if (page == inode_->current.pages.end()) return inode_->current.size;
      return std::max(offset, page->first * kPageBytes);
    }
    bool direct() const override { return direct_; }

   private:
    // What a device refuses of direct I/O.
    absl::Status CheckDirect(std::uint64_t offset, std::span<const std::byte> piece,
                             std::uint64_t length) const {
      const bool aligned = offset % kPageBytes == 0 && length % kPageBytes == 0 &&
                           piece.size() % kSectorBytes == 0 &&
                           reinterpret_cast<std::uintptr_t>(piece.data()) % kSectorBytes == 0;
      return aligned || !direct_ ? absl::OkStatus() : absl::UnavailableError("not aligned");
    }

    FaultyFileSystem& system_;
    const std::shared_ptr<Inode> inode_;
    const int life_;
    const bool direct_;
  };

  static std::string FolderOf(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    return slash == std::string::npos ? "" : path.substr(0, slash);
  }
  static std::string NameOf(const std::string& path) {
    const std::size_t slash = path.rfind('/');
    return slash == std::string::npos ? path : path.substr(slash + 1);
  }

  static void Apply(const Change& change, Content& content) {
    const std::uint64_t end = change.offset + change.length;
    switch (change.kind) {
      case Change::Kind::kWrite:
        for (std::uint64_t at = change.offset; at < end; at += kSectorBytes) {
          if (change.lost_sectors.contains((at - change.offset) / kSectorBytes)) continue;
          const std::uint64_t page_number = at / kPageBytes;
          auto& page = content.pages[page_number];
          auto changed = page ? std::make_shared<Page>(*page) : std::make_shared<Page>();
          std::memcpy(changed->data() + at % kPageBytes, change.bytes.data() + (at - change.offset),
                      std::min(kSectorBytes, end - at));
          page = std::move(changed);
          content.allocated.insert(page_number);
        }
        if (change.garbled_page) {
          auto garbled = std::make_shared<Page>();
          garbled->fill(std::byte{0xa5});
          content.pages[*change.garbled_page] = std::move(garbled);
        }
        content.size = std::max(content.size, end);
        break;
      case Change::Kind::kAllocate:
        for (std::uint64_t page = change.offset / kPageBytes; page * kPageBytes < end; ++page) {
          content.allocated.insert(page);
        }
        content.size = std::max(content.size, end);
        break;
      case Change::Kind::kPunch:
        for (std::uint64_t at = change.offset; at < end;) {
          const std::uint64_t page = at / kPageBytes;
          const std::uint64_t page_end = std::min(end, (page + 1) * kPageBytes);
          if (page_end - at == kPageBytes) {
            content.pages.erase(page);
            content.allocated.erase(page);
          } else if (auto found = content.pages.find(page); found != content.pages.end()) {
            auto changed = std::make_shared<Page>(*found->second);
            std::memset(changed->data() + at % kPageBytes, 0, page_end - at);
            found->second = std::move(changed);
          }
          at = page_end;
        }
        break;
      case Change::Kind::kTruncate: {
        const std::uint64_t first_gone = (change.offset + kPageBytes - 1) / kPageBytes;
        content.pages.erase(content.pages.lower_bound(first_gone), content.pages.end());
        content.allocated.erase(content.allocated.lower_bound(first_gone), content.allocated.end());
        content.size = change.offset;
        break;
      }
    }
  }

  static Change Torn(Change change, std::mt19937_64& random) {
    if (change.kind == Change::Kind::kWrite) {
      const std::uint64_t sectors = (change.length + kSectorBytes - 1) / kSectorBytes;
      const std::uint64_t first = random() % sectors;
      const std::uint64_t count = 1 + random() % (sectors - first);
      for (std::uint64_t i = 0; i < count; ++i) change.lost_sectors.insert(first + i);
      const std::uint64_t page_of_loss = (change.offset + first * kSectorBytes) / kPageBytes;
      if (random() % 2 == 0) change.garbled_page = page_of_loss;
    }
    return change;
  }

  void ChangeFolder(Folder& folder, std::function<void(Entries&)> change)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    change(folder.current);
    folder.unsynced.push_back(std::move(change));
  }

  absl::Status Mutate(Inode& inode, int life, Change change) {
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = Alive(life); !status.ok()) return status;
    if (absl::Status status = MayChange(); !status.ok()) return status;
    using Kind = Change::Kind;
    if (change.kind == Kind::kAllocate && !allocates_) return absl::UnimplementedError("allocate");
    if (change.kind == Kind::kPunch && !punches_holes_) return absl::UnimplementedError("punch");
    absl::Status status;
    if (change.kind == Kind::kWrite || change.kind == Kind::kAllocate) {
      // A full disk takes as much as there is room for.
      std::uint64_t fits = 0;
      std::uint64_t room = capacity_bytes_;
      if (room != kNoLimit) room -= std::min(room, AllocatedLocked());
      for (; fits < change.length; fits += kPageBytes) {
        if (inode.current.allocated.contains((change.offset + fits) / kPageBytes)) continue;
        if (room < kPageBytes) break;
        room -= kPageBytes;
      }
      if (fits < change.length) {
        change.length = fits;
        status = absl::ResourceExhaustedError("the disk is full");
      }
      if (change.kind == Kind::kWrite && torn_writes_ > 0) {
        --torn_writes_;
        change.length = std::min(change.length, change.length / 2 / kPageBytes * kPageBytes);
        status = absl::UnavailableError("the disk failed");
      }
      if (change.length == 0) return status;
    }
    Apply(change, inode.current);
    inode.unsynced.push_back(std::move(change));
    return status;
  }

  absl::Status Alive(int life) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return life == life_ ? absl::OkStatus() : absl::UnavailableError("the process is dead");
  }
  absl::Status MayChange() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return read_only_ ? absl::UnavailableError("read-only file system") : absl::OkStatus();
  }
  absl::Status MaySync() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (failing_syncs_ > 0) {
      --failing_syncs_;
      return absl::UnavailableError("sync failed");
    }
    return MayChange();
  }

  std::shared_ptr<Inode> FindLocked(const std::string& path) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto folder = folders_.find(FolderOf(path));
    if (folder == folders_.end()) return nullptr;
    const auto entry = folder->second.current.find(NameOf(path));
    return entry == folder->second.current.end() ? nullptr : entry->second;
  }

  std::uint64_t AllocatedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::uint64_t pages = 0;
    for (const auto& [path, folder] : folders_) {
      for (const auto& [name, inode] : folder.current) pages += inode->current.allocated.size();
    }
    return pages * kPageBytes;
  }

  mutable absl::Mutex mutex_;
  std::map<std::string, Folder> folders_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t capacity_bytes_ ABSL_GUARDED_BY(mutex_) = kNoLimit;
  bool read_only_ ABSL_GUARDED_BY(mutex_) = false;
  bool punches_holes_ ABSL_GUARDED_BY(mutex_) = true;
  bool allocates_ ABSL_GUARDED_BY(mutex_) = true;
  bool direct_ ABSL_GUARDED_BY(mutex_) = true;
  int torn_writes_ ABSL_GUARDED_BY(mutex_) = 0;
  int failing_syncs_ ABSL_GUARDED_BY(mutex_) = 0;
  int life_ ABSL_GUARDED_BY(mutex_) = 0;  // files of earlier lives are dead
};

}  // namespace kvtrie
