#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/file_system.h"

namespace kvtrie {

// The first `bytes` bytes of a file that only grows, known by their checksum.
struct SyncedFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;

  bool operator==(const SyncedFile&) const = default;
};

// What the last Sync made durable, kept in a file of its own. A database that comes up with less
// has lost something, whatever it says itself.
struct SyncRecord {
  std::uint64_t sync_count = 0;  // grows by one with each record
  std::uint64_t sequence = 0;    // number of the last change that was synced
  std::vector<SyncedFile> files;

  bool operator==(const SyncRecord&) const = default;

  std::string Encode() const;
  // DataLoss, or Unimplemented when a newer release wrote it.
  static absl::StatusOr<SyncRecord> Decode(std::string_view bytes);
};

// nullopt: there is none. DataLoss: there is one, and it is damaged.
absl::StatusOr<std::optional<SyncRecord>> ReadSyncRecord(FileSystem& file_system,
                                                         const std::string& path);

// Replaces the file at once: after a crash the old record is there, or the new one. Durable on OK.
absl::Status WriteSyncRecord(FileSystem& file_system, const std::string& path,
                             const SyncRecord& record);

// DataLoss when the file is shorter or other bytes are there; NotFound when there is no such file.
absl::Status CheckSyncedFile(FileSystem& file_system, const std::string& folder,
                             const SyncedFile& file);

// The files of a folder that only grow. Reads and syncs only what is new. Not thread-safe.
class GrowingFiles {
 public:
  // `file_system` outlives this object.
  using NameFilter = bool (*)(std::string_view name);
  GrowingFiles(FileSystem& file_system, std::string folder, NameFilter is_growing);

  // Makes the files durable as they are now and returns what that was. Files that vanish meanwhile
  // are left out.
  absl::StatusOr<std::vector<SyncedFile>> Sync();

 private:
  FileSystem& file_system_;
  const std::string folder_;
  const NameFilter is_growing_;
  std::map<std::string, SyncedFile> synced_;
};

}  // namespace kvtrie
