#include "server/worker/profile_shelf.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {
namespace {

// A profile on its way to a shelf.
class ShelfUpload final : public ProfileSink {
 public:
  ShelfUpload(ProfileShelf& shelf, std::size_t total_bytes, const ProfileId& expected,
              ByteReservation reservation)
      : shelf_(shelf),
        total_bytes_(total_bytes),
        expected_(expected),
        reservation_(std::move(reservation)) {}

  absl::Status Append(std::span<const std::byte> bytes) override {
    // Memory comes with the bytes, and is never more than was announced.
    if (const std::size_t needed = profile_.size() + bytes.size(); needed > profile_.capacity()) {
      profile_.reserve(std::min(std::max(needed, 2 * profile_.capacity()), total_bytes_));
    }
    profile_.insert(profile_.end(), bytes.begin(), bytes.end());
    return absl::OkStatus();
  }

  absl::StatusOr<StoredProfile> Commit() override {
    auto held = shelf_.Add(std::move(profile_), expected_);
    if (absl::IsDataLoss(held.status())) return absl::InvalidArgumentError(held.status().message());
    if (!held.ok()) return held.status();
    StoredProfile profile;
    profile.info.id = held->id;
    profile.info.header = held->header;
    return profile;
  }

 private:
  ProfileShelf& shelf_;
  const std::size_t total_bytes_;
  const ProfileId expected_;
  const ByteReservation reservation_;
  std::vector<std::byte> profile_;
};

absl::Status TooLarge(std::size_t bytes, std::size_t bytes_max) {
  return absl::ResourceExhaustedError(
      absl::StrCat("total_bytes: ", bytes, "; all profiles together may have ", bytes_max,
                   " here: give the worker more (--profile_memory_bytes)"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProfileSink>> ProfileShelf::Begin(std::uint64_t total_bytes,
                                                                 const ProfileId& expected) {
  if (total_bytes < kProfileBytesMin || total_bytes > kProfileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("total_bytes: ", total_bytes, "; a profile has ",
                                                   kProfileBytesMin, " to ", kProfileBytesMax));
  }
  if (total_bytes > bytes_max_) return TooLarge(total_bytes, bytes_max_);
  {
    absl::MutexLock lock(&mutex_);
    if (!profiles_.contains(expected)) KV_RETURN_IF_ERROR(CheckRoom(total_bytes));
  }
  if (!uploads_.TryAcquire(total_bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("total_bytes: ", total_bytes, " beside the ", uploads_.used_bytes(),
                     " bytes of profiles that are on their way here; together they may have ",
                     bytes_max_, " (--profile_memory_bytes): send it again later"));
  }
  return std::make_unique<ShelfUpload>(*this, total_bytes, expected,
                                       ByteReservation(&uploads_, total_bytes));
}

absl::StatusOr<ProfileShelf::Held> ProfileShelf::Add(std::vector<std::byte> profile,
                                                     const ProfileId& expected) {
  KV_ASSIGN_OR_RETURN(ProfileHeader header, ParseProfileHeader(profile));
  if (header.profile_bytes() != profile.size()) {
    return absl::DataLossError(absl::StrCat("profile: ", profile.size(),
                                            " bytes, and its head says ", header.profile_bytes()));
  }
  if (Crc32c(std::span(profile).subspan(header.header_bytes())) != header.body_crc32c) {
    return absl::DataLossError("profile: wrong checksum of its body");
  }
  if (profile.size() > bytes_max_) return TooLarge(profile.size(), bytes_max_);
  ProfileDigest digest;
  digest.Add(profile);
  const ProfileId id = digest.Finish();
  if (!expected.empty() && id != expected) {
    return absl::FailedPreconditionError(
        absl::StrCat("expected_profile_id: ", expected.ToHex(), "; these bytes are ", id.ToHex()));
  }

  absl::MutexLock lock(&mutex_);
  if (const Entry* const entry = Use(id); entry != nullptr) return Held{id, entry->header};
  KV_RETURN_IF_ERROR(CheckRoom(profile.size()));
  while (bytes_ + profile.size() > bytes_max_) EvictOldest();
  bytes_ += profile.size();
  profiles_[id] = {.header = header,
                   .bytes = std::make_shared<const std::vector<std::byte>>(std::move(profile)),
                   .last_use = clock_.Monotonic()};
  return Held{id, std::move(header)};
}

ProfileShelf::Entry* ProfileShelf::Use(const ProfileId& id) {
  const auto found = profiles_.find(id);
  if (found == profiles_.end()) return nullptr;
  found->second.last_use = clock_.Monotonic();
  return &found->second;
}

absl::Status ProfileShelf::CheckRoom(std::size_t bytes) const {
  const Clock::Duration now = clock_.Monotonic();
  std::size_t bytes_in_use = 0;
  for (const auto& [id, entry] : profiles_) {
    if (now - entry.last_use < kInUse) bytes_in_use += entry.bytes->size();
  }
  if (bytes_in_use + bytes <= bytes_max_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "total_bytes: ", bytes, " beside the ", bytes_in_use, " bytes of profiles used within ",
      kInUse.count(), " s; together they may have ", bytes_max_,
      " here: send it again later, use another worker, or give this one more "
      "(--profile_memory_bytes)"));
}

void ProfileShelf::EvictOldest() {
  const auto oldest = std::min_element(
      profiles_.begin(), profiles_.end(),
      [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
  bytes_ -= oldest->second.bytes->size();
  ++evicted_total_;
  profiles_.erase(oldest);
}

ProfileShelf::Bytes ProfileShelf::Find(const ProfileId& id) {
  absl::MutexLock lock(&mutex_);
  const Entry* const entry = Use(id);
  return entry == nullptr ? nullptr : entry->bytes;
}

ProfileLevel ProfileShelf::LevelOf(const ProfileId& id, Quality quality) {
  absl::MutexLock lock(&mutex_);
  const Entry* const entry = Use(id);
  if (entry == nullptr) return {};
  const ProfileLevel* const level = entry->header.FindLevel(quality);
  return level == nullptr ? ProfileLevel{} : *level;
}

std::vector<ProfileShelf::Held> ProfileShelf::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Held> held;
  for (const auto& [id, entry] : profiles_) held.push_back({id, entry.header});
  std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.id < b.id; });
  return held;
}

ProfileShelfStats ProfileShelf::Stats() const {
  absl::MutexLock lock(&mutex_);
  return {.profiles = profiles_.size(),
          .bytes = bytes_,
          .upload_bytes = uploads_.used_bytes(),
          .evicted_total = evicted_total_};
}

}  // namespace kvtrie
