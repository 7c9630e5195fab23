#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/file_system.h"
#include "storage/base/shared_bytes.h"
#include "storage/codec/profile_header.h"
#include "storage/kv/ids.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {

struct ProfileInfo {
  ProfileId id;
  ProfileHeader header;
  std::int64_t created_unix_seconds = 0;
};

// Codec profiles, one file each: immutable, named by their content, which is checked on every read.
//
//   folder/<id in hex>.<unix seconds of its creation>.profile   the profile, byte for byte
//   folder/upload-<random hex>                                  on its way in; removed at start
//
// A profile has its name only once all of it is durable, so that a crash at any point leaves all of
// it or nothing.
//
// Errors: NotFound for a profile that is not there; DataLoss when its bytes are not those of its
// name: then it is gone, and may be put again; ResourceExhausted when the disk is full; Unavailable
// when it fails. Thread-safe. Everything but Find, List and the figures waits for the disk.
class ProfileStore {
 public:
  // What one store may hold.
  static constexpr std::size_t kProfilesMax = 4096;

  // Creates the folder if it is not there.
  static absl::StatusOr<std::unique_ptr<ProfileStore>> Open(FileSystem& file_system,
                                                            std::string folder);

  // A profile on its way in. Dropping it leaves nothing. Used by one thread at a time; it must not
  // outlive the store.
  class Upload {
   public:
    ~Upload();
    // InvalidArgument: more bytes than announced, or not a profile. Unimplemented: of a newer
    // version.
    absl::Status Append(std::span<const std::byte> bytes);
    // Makes it durable. A profile that is there already stays as it is (`created` too).
    // `expected`: its id, or zero. InvalidArgument: fewer bytes than announced, or a body that
    // fails its checksum. FailedPrecondition: another id than expected.
    absl::StatusOr<ProfileInfo> Commit(const ProfileId& expected, std::int64_t now_unix_seconds);

   private:
    friend class ProfileStore;
    Upload(ProfileStore& store, std::uint64_t total_bytes, std::function<absl::Status()> make_room,
           std::string path, std::unique_ptr<File> file);
    absl::Status CheckHead();
    absl::Status Flush();

    ProfileStore& store_;
    const std::uint64_t total_bytes_;
    const std::function<absl::Status()> make_room_;
    const std::string path_;
    std::unique_ptr<File> file_;
    ProfileDigest digest_;
    std::optional<ProfileHeader> header_;  // once enough bytes are there
    std::uint32_t body_crc32c_ = 0;
    std::uint64_t received_bytes_ = 0;
    std::uint64_t written_bytes_ = 0;
    std::vector<std::byte> buffer_;  // received, not written
  };
  // InvalidArgument: no profile is of this size. ResourceExhausted: too many are there.
  // `make_room`: called once, when the head is right and before anything is written; its error is
  // that of Append or Commit.
  absl::StatusOr<std::unique_ptr<Upload>> Begin(std::uint64_t total_bytes,
                                                std::function<absl::Status()> make_room = nullptr);

  std::optional<ProfileInfo> Find(const ProfileId& id) const;
  std::vector<ProfileInfo> List() const;  // newest first
  // The newest for models of this codec key; zero: there is none.
  ProfileId NewestFor(const CodecKey& codec_key) const;

  // All of a profile.
  absl::StatusOr<SharedBytes> Read(const ProfileId& id);

  // A profile that was found intact, to be read in pieces; stays readable when it is removed.
  class Reader {
   public:
    const ProfileInfo& info() const { return info_; }
    // REQUIRES: the range lies in the profile.
    absl::Status Read(std::uint64_t offset, std::span<std::byte> bytes);

   private:
    friend class ProfileStore;
    Reader(ProfileInfo info, std::unique_ptr<File> file)
        : info_(std::move(info)), file_(std::move(file)) {}
    ProfileInfo info_;
    std::unique_ptr<File> file_;
  };
  absl::StatusOr<std::unique_ptr<Reader>> OpenToRead(const ProfileId& id);

  // Removes it for good. The caller knows that nobody needs it.
  absl::Status Remove(const ProfileId& id);

  std::size_t count() const;
  std::uint64_t disk_bytes() const;     // what `du` shows of the profiles
  std::uint64_t damaged_total() const;  // found with other bytes than their name says
  // Constant after Open.
  const std::vector<std::string>& foreign_files() const { return foreign_files_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  struct Entry {
    ProfileInfo info;
    std::uint64_t disk_bytes = 0;
  };

  ProfileStore(FileSystem& file_system, std::string folder)
      : file_system_(file_system), folder_(std::move(folder)) {}

  std::string PathOf(const std::string& name) const { return folder_ + "/" + name; }
  std::string PathOf(const ProfileInfo& info) const;
  absl::Status Load();
  absl::Status LoadFile(const std::string& name, const ProfileId& id, std::int64_t created);
  absl::StatusOr<ProfileInfo> Publish(const Upload& upload, ProfileInfo info);
  // Reads the file from front to back into `to` (or a buffer of its own, if empty).
  absl::Status CheckContent(const ProfileInfo& info, File& file, std::span<std::byte> to);
  void DropDamaged(const ProfileInfo& info);

  FileSystem& file_system_;
  const std::string folder_;
  std::vector<std::string> foreign_files_;
  std::vector<std::string> notes_;

  // Held while names in the folder change, over the I/O of that.
  absl::Mutex naming_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);

  mutable absl::Mutex mutex_;
  std::map<ProfileId, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t disk_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t damaged_total_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The error of bytes that have this id, where another one was expected.
absl::Status UnexpectedProfile(const ProfileId& id);

}  // namespace kvtrie
