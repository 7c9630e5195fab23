#include "storage/engine/profile_store.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/random_id.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::string_view kUploadPrefix = "upload-";
constexpr std::string_view kSuffix = ".profile";
constexpr std::size_t kHexBytes = 2 * ProfileId::kBytes;
// What is written and read at a time.
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

using UploadId = Id128<struct UploadIdTag>;

std::string NameOf(const ProfileId& id, std::int64_t created) {
  return absl::StrCat(id.ToHex(), ".", created, std::string(kSuffix));
}

// nullopt unless it is exactly the name of a profile: a name has one spelling.
std::optional<std::pair<ProfileId, std::int64_t>> ParseName(const std::string& name) {
  if (name.size() < kHexBytes) return std::nullopt;
  const std::string bytes = absl::HexStringToBytes(name.substr(0, kHexBytes));
  const auto id = ProfileId::FromBytes(bytes);
  std::int64_t created = 0;
  if (name.size() > kHexBytes + 1) {
    std::from_chars(name.data() + kHexBytes + 1, name.data() + name.size(), created);
  }
  if (!id || id->empty() || created < 0 || NameOf(*id, created) != name) return std::nullopt;
  return std::pair(*id, created);
}

bool IsNewer(const ProfileInfo& a, const ProfileInfo& b) {
  return std::pair(a.created_unix_seconds, a.id) > std::pair(b.created_unix_seconds, b.id);
}

// What the bytes of a client are blamed for.
absl::Status AsRequestError(const absl::Status& status) {
  return absl::IsDataLoss(status) ? absl::InvalidArgumentError(status.message()) : status;
}

}  // namespace

// ---- Opening

absl::StatusOr<std::unique_ptr<ProfileStore>> ProfileStore::Open(FileSystem& file_system,
                                                                 std::string folder) {
  auto store = absl::WrapUnique(new ProfileStore(file_system, std::move(folder)));
  KV_RETURN_IF_ERROR(store->Load());
  return store;
}

std::string ProfileStore::PathOf(const ProfileInfo& info) const {
  return PathOf(NameOf(info.id, info.created_unix_seconds));
}

absl::Status ProfileStore::Load() {
  KV_RETURN_IF_ERROR(file_system_.CreateFolder(folder_));
  KV_ASSIGN_OR_RETURN(std::vector<std::string> names, file_system_.List(folder_));
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (const auto parsed = ParseName(name)) {
      KV_RETURN_IF_ERROR(LoadFile(name, parsed->first, parsed->second));
    } else if (name.starts_with(kUploadPrefix)) {
      KV_RETURN_IF_ERROR(file_system_.Remove(PathOf(name)));
    } else {
      foreign_files_.push_back(name);
    }
  }
  return absl::OkStatus();
}

absl::Status ProfileStore::LoadFile(const std::string& name, const ProfileId& id,
                                    std::int64_t created) {
  KV_ASSIGN_OR_RETURN(const auto file, file_system_.Open(PathOf(name), FileSystem::Mode::kReadOnly,
                                                         /*direct=*/false));
  std::byte head[kProfileHeaderBytesMax];
  KV_ASSIGN_OR_RETURN(const std::size_t head_bytes, file->Read(0, head));
  KV_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  KV_ASSIGN_OR_RETURN(const std::uint64_t disk_bytes, file->AllocatedBytes());
  auto header = ParseProfileHeader(std::span(head).first(head_bytes));
  if (absl::IsUnimplemented(header.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("data_dir: profile ", id.ToHex(), " was written by a newer version"));
  }
  absl::MutexLock lock(&mutex_);
  if (!header.ok() || header->profile_bytes() != size) {
    notes_.push_back(absl::StrCat(
        "profile ", id.ToHex(), " is damaged and was removed; put it again (",
        header.ok() ? "its size is another one" : std::string(header.status().message()), ")"));
    ++damaged_total_;
    return file_system_.Remove(PathOf(name));
  }
  // A second file of one profile cannot come from here; the older one stays.
  if (entries_.contains(id)) {
    foreign_files_.push_back(name);
    return absl::OkStatus();
  }
  entries_.emplace(id, Entry{{id, *std::move(header), created}, disk_bytes});
  disk_bytes_ += disk_bytes;
  return absl::OkStatus();
}

// ---- Putting

absl::StatusOr<std::unique_ptr<ProfileStore::Upload>> ProfileStore::Begin(
    std::uint64_t total_bytes, std::function<absl::Status()> make_room) {
  if (total_bytes < kProfileBytesMin || total_bytes > kProfileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("total_bytes: ", total_bytes, "; a profile has ",
                                                   kProfileBytesMin, " to ", kProfileBytesMax));
  }
  if (count() >= kProfilesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("profiles: ", kProfilesMax, " are stored; delete some"));
  }
  const std::string path =
      PathOf(absl::StrCat(std::string(kUploadPrefix), RandomId<UploadId>().ToHex()));
  KV_ASSIGN_OR_RETURN(auto file, file_system_.Open(path, FileSystem::Mode::kCreateNew,
                                                   /*direct=*/false));
  return absl::WrapUnique(
      new Upload(*this, total_bytes, std::move(make_room), path, std::move(file)));
}

ProfileStore::Upload::Upload(ProfileStore& store, std::uint64_t total_bytes,
                             std::function<absl::Status()> make_room, std::string path,
                             std::unique_ptr<File> file)
    : store_(store),
      total_bytes_(total_bytes),
      make_room_(std::move(make_room)),
      path_(std::move(path)),
      file_(std::move(file)) {
  buffer_.reserve(kPieceBytes);
}

ProfileStore::Upload::~Upload() {
  if (file_ == nullptr) return;
  file_.reset();
  store_.file_system_.Remove(path_).IgnoreError();
}

absl::Status ProfileStore::Upload::Append(std::span<const std::byte> bytes) {
  if (bytes.size() > total_bytes_ - received_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("data: more bytes than the ", total_bytes_, " of total_bytes"));
  }
  digest_.Add(bytes);
  received_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kPieceBytes - buffer_.size()));
    buffer_.insert(buffer_.end(), piece.begin(), piece.end());
    bytes = bytes.subspan(piece.size());
    if (buffer_.size() == kPieceBytes) KV_RETURN_IF_ERROR(Flush());
  }
  // What is no profile is refused before all of it has come.
  return header_ || received_bytes_ < std::min<std::uint64_t>(kProfileHeaderBytesMax, total_bytes_)
             ? absl::OkStatus()
             : CheckHead();
}

absl::Status ProfileStore::Upload::CheckHead() {
  if (header_ || written_bytes_ > 0) return absl::OkStatus();
  auto header = ParseProfileHeader(
      std::span(buffer_).first(std::min(buffer_.size(), kProfileHeaderBytesMax)));
  if (!header.ok()) return AsRequestError(header.status());
  if (header->profile_bytes() != total_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "total_bytes: ", total_bytes_, "; the profile's header says ", header->profile_bytes()));
  }
  if (make_room_) KV_RETURN_IF_ERROR(make_room_());
  header_ = *std::move(header);
  return absl::OkStatus();
}

absl::Status ProfileStore::Upload::Flush() {
  KV_RETURN_IF_ERROR(CheckHead());
  KV_RETURN_IF_ERROR(file_->Write(written_bytes_, buffer_));
  const std::size_t head_here =
      written_bytes_ == 0 ? header_->header_bytes() : 0;  // a piece is larger than any head
  body_crc32c_ = Crc32c(std::span(buffer_).subspan(head_here), body_crc32c_);
  written_bytes_ += buffer_.size();
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status UnexpectedProfile(const ProfileId& id) {
  return absl::FailedPreconditionError(
      absl::StrCat("expected_profile_id: the id of these bytes is ", id.ToHex()));
}

absl::StatusOr<ProfileInfo> ProfileStore::Upload::Commit(const ProfileId& expected,
                                                         std::int64_t now_unix_seconds) {
  if (received_bytes_ != total_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat("data: ", received_bytes_, " of the ",
                                                   total_bytes_, " bytes of total_bytes came"));
  }
  if (!buffer_.empty()) KV_RETURN_IF_ERROR(Flush());
  if (body_crc32c_ != header_->body_crc32c) {
    return absl::InvalidArgumentError("profile: wrong checksum of the body");
  }
  const ProfileId id = digest_.Finish();
  if (!expected.empty() && id != expected) return UnexpectedProfile(id);
  KV_RETURN_IF_ERROR(file_->SyncData());
  return store_.Publish(*this, {id, *header_, now_unix_seconds});
}

absl::StatusOr<ProfileInfo> ProfileStore::Publish(const Upload& upload, ProfileInfo info) {
  absl::MutexLock naming(&naming_mutex_);
  if (auto known = Find(info.id)) return *std::move(known);
  KV_ASSIGN_OR_RETURN(const std::uint64_t disk_bytes, upload.file_->AllocatedBytes());
  const std::string path = PathOf(info);
  KV_RETURN_IF_ERROR(file_system_.Rename(upload.path_, path));
  if (absl::Status status = file_system_.SyncFolder(folder_); !status.ok()) {
    file_system_.Remove(path).IgnoreError();
    return status;
  }
  absl::MutexLock lock(&mutex_);
  entries_.emplace(info.id, Entry{info, disk_bytes});
  disk_bytes_ += disk_bytes;
  return info;
}

// ---- Reading

std::optional<ProfileInfo> ProfileStore::Find(const ProfileId& id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return std::nullopt;
  return found->second.info;
}

std::vector<ProfileInfo> ProfileStore::List() const {
  std::vector<ProfileInfo> infos;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [id, entry] : entries_) infos.push_back(entry.info);
  }
  std::sort(infos.begin(), infos.end(), IsNewer);
  return infos;
}

ProfileId ProfileStore::NewestFor(const CodecKey& codec_key) const {
  absl::MutexLock lock(&mutex_);
  const ProfileInfo* newest = nullptr;
  for (const auto& [id, entry] : entries_) {
    if (entry.info.header.codec_key != codec_key) continue;
    if (newest == nullptr || IsNewer(entry.info, *newest)) newest = &entry.info;
  }
  return newest == nullptr ? ProfileId{} : newest->id;
}

absl::Status ProfileStore::CheckContent(const ProfileInfo& info, File& file,
                                        std::span<std::byte> to) {
  std::vector<std::byte> own;
  if (to.empty()) own.resize(kPieceBytes);
  ProfileDigest digest;
  const std::uint64_t total = info.header.profile_bytes();
  for (std::uint64_t at = 0; at < total;) {
    const std::size_t bytes = std::min<std::uint64_t>(kPieceBytes, total - at);
    const std::span<std::byte> piece =
        to.empty() ? std::span(own).first(bytes) : to.subspan(at, bytes);
    KV_ASSIGN_OR_RETURN(const std::size_t count, file.Read(at, piece));
    digest.Add(piece.first(count));
    if (count != bytes) break;
    at += bytes;
  }
  if (digest.Finish() == info.id) return absl::OkStatus();
  DropDamaged(info);
  return absl::DataLossError(absl::StrCat("profile ", info.id.ToHex(),
                                          ": damaged on the disk, and removed; put it again"));
}

void ProfileStore::DropDamaged(const ProfileInfo& info) {
  {
    absl::MutexLock lock(&mutex_);
    ++damaged_total_;
  }
  spdlog::warn("profile {} is damaged on the disk and was removed; put it again", info.id.ToHex());
  Remove(info.id).IgnoreError();
}

absl::StatusOr<std::unique_ptr<ProfileStore::Reader>> ProfileStore::OpenToRead(
    const ProfileId& id) {
  auto info = Find(id);
  if (!info) return absl::NotFoundError(absl::StrCat("profile_id ", id.ToHex(), ": not stored"));
  KV_ASSIGN_OR_RETURN(auto file, file_system_.Open(PathOf(*info), FileSystem::Mode::kReadOnly,
                                                   /*direct=*/false));
  KV_RETURN_IF_ERROR(CheckContent(*info, *file, {}));
  return absl::WrapUnique(new Reader(*std::move(info), std::move(file)));
}

absl::Status ProfileStore::Reader::Read(std::uint64_t offset, std::span<std::byte> bytes) {
  KV_ASSIGN_OR_RETURN(const std::size_t count, file_->Read(offset, bytes));
  return count == bytes.size() ? absl::OkStatus()
                               : absl::DataLossError("profile: cut short while it was read");
}

absl::StatusOr<SharedBytes> ProfileStore::Read(const ProfileId& id) {
  const auto info = Find(id);
  if (!info) return absl::NotFoundError(absl::StrCat("profile_id ", id.ToHex(), ": not stored"));
  KV_ASSIGN_OR_RETURN(auto file, file_system_.Open(PathOf(*info), FileSystem::Mode::kReadOnly,
                                                   /*direct=*/false));
  const std::size_t bytes = info->header.profile_bytes();
  auto buffer = std::make_shared<AlignedBuffer>(bytes);
  KV_RETURN_IF_ERROR(CheckContent(*info, *file, {buffer->data(), bytes}));
  const std::span<const std::byte> view(buffer->data(), bytes);
  return SharedBytes{std::move(buffer), view};
}

absl::Status ProfileStore::Remove(const ProfileId& id) {
  absl::MutexLock naming(&naming_mutex_);
  const auto info = Find(id);
  if (!info) return absl::NotFoundError(absl::StrCat("profile_id ", id.ToHex(), ": not stored"));
  KV_RETURN_IF_ERROR(file_system_.Remove(PathOf(*info)));
  {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(id);
    disk_bytes_ -= found->second.disk_bytes;
    entries_.erase(found);
  }
  // Comes back after a loss of power at worst.
  file_system_.SyncFolder(folder_).IgnoreError();
  return absl::OkStatus();
}

std::size_t ProfileStore::count() const {
  absl::MutexLock lock(&mutex_);
  return entries_.size();
}
std::uint64_t ProfileStore::disk_bytes() const {
  absl::MutexLock lock(&mutex_);
  return disk_bytes_;
}
std::uint64_t ProfileStore::damaged_total() const {
  absl::MutexLock lock(&mutex_);
  return damaged_total_;
}

}  // namespace kvtrie
