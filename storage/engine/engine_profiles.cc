#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {

// Holds the room that was made for the profile until it is stored or given up.
class ProfileUploadHandle final : public Engine::ProfileUpload {
 public:
  ProfileUploadHandle(Engine::Core& core, TenantId tenant, std::uint64_t reserved_bytes,
                      const ProfileId& expected, std::unique_ptr<ProfileStore::Upload> upload)
      : core_(core),
        tenant_(tenant),
        reserved_bytes_(reserved_bytes),
        expected_(expected),
        upload_(std::move(upload)) {}
  ~ProfileUploadHandle() override {
    upload_.reset();
    core_.reserved_bytes_ -= reserved_bytes_;
  }

  absl::Status Append(std::span<const std::byte> bytes) override { return upload_->Append(bytes); }

  absl::StatusOr<StoredProfile> Commit() override {
    KV_ASSIGN_OR_RETURN(ProfileInfo info, upload_->Commit(expected_, core_.clock_.UnixSeconds()));
    StoredProfile profile{.info = std::move(info), .models = {}, .frames = 0};
    core_.DescribeProfile(tenant_, &profile);
    return profile;
  }

 private:
  Engine::Core& core_;
  const TenantId tenant_;
  const std::uint64_t reserved_bytes_;
  const ProfileId expected_;
  std::unique_ptr<ProfileStore::Upload> upload_;
};

// Of a profile that is stored already: its bytes are checked, and nothing is written.
class KnownProfileUpload final : public Engine::ProfileUpload {
 public:
  KnownProfileUpload(Engine::Core& core, TenantId tenant, const ProfileId& expected)
      : core_(core), tenant_(tenant), expected_(expected) {}

  absl::Status Append(std::span<const std::byte> bytes) override {
    digest_.Add(bytes);
    return absl::OkStatus();
  }

  absl::StatusOr<StoredProfile> Commit() override {
    const ProfileId id = digest_.Finish();
    if (id != expected_) return UnexpectedProfile(id);
    std::optional<ProfileInfo> info = core_.profiles_->Find(id);
    if (!info) {
      return absl::UnavailableError(
          absl::StrCat("profile ", id.ToHex(), " was removed meanwhile; put it again"));
    }
    StoredProfile profile{.info = *std::move(info), .models = {}, .frames = 0};
    core_.DescribeProfile(tenant_, &profile);
    return profile;
  }

 private:
  Engine::Core& core_;
  const TenantId tenant_;
  const ProfileId expected_;
  ProfileDigest digest_;
};

absl::StatusOr<std::unique_ptr<Engine::ProfileUpload>> Engine::Core::BeginProfile(
    TenantId tenant, std::uint64_t total_bytes, const ProfileId& expected) {
  if (draining_) return absl::UnavailableError("the server is draining");
  if (total_bytes < kProfileBytesMin || total_bytes > kProfileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("total_bytes: ", total_bytes, "; a profile has ",
                                                   kProfileBytesMin, " to ", kProfileBytesMax));
  }
  if (profiles_->Find(expected)) {
    return std::make_unique<KnownProfileUpload>(*this, tenant, expected);
  }
  // Profiles are never evicted: blocks would go for one that cannot fit.
  const std::uint64_t stored = profiles_->disk_bytes();
  if (stored + total_bytes > options_.disk_limit_bytes / 2) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "total_bytes: ", total_bytes, " beside the ", stored,
        " bytes of the profiles that are here; they may take half of disk_limit_bytes (",
        options_.disk_limit_bytes, "): delete a profile, or give the store more"));
  }
  KV_RETURN_IF_ERROR(MakeRoom(total_bytes));
  auto upload = profiles_->Begin(total_bytes);
  if (!upload.ok()) {
    reserved_bytes_ -= total_bytes;
    return upload.status();
  }
  return std::make_unique<ProfileUploadHandle>(*this, tenant, total_bytes, expected,
                                               *std::move(upload));
}

std::vector<StoredProfile> Engine::Core::ListProfiles(TenantId tenant) {
  std::vector<StoredProfile> profiles;
  for (ProfileInfo& info : profiles_->List()) {
    profiles.push_back({.info = std::move(info), .models = {}, .frames = 0});
  }
  for (StoredProfile& profile : profiles) DescribeProfile(tenant, &profile);
  return profiles;
}

void Engine::Core::DescribeProfile(TenantId tenant, StoredProfile* profile) {
  absl::ReaderMutexLock lock(&index_mutex_);
  profile->frames = census_.FramesOf(profile->info.id);
  for (const auto& [slot, model] : models_) {
    if (index_.model(slot).tenant == tenant && model->Fits(profile->info.header)) {
      profile->models.push_back(index_.model(slot).model);
    }
  }
}

absl::Status Engine::Core::DeleteProfile(const ProfileId& id) {
  // No frame is published meanwhile.
  absl::MutexLock change(&change_mutex_);
  std::uint64_t frames;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    frames = census_.FramesOf(id);
  }
  if (frames > 0 && profiles_->Find(id)) {
    return absl::FailedPreconditionError(
        absl::StrCat("profile_id ", id.ToHex(), ": ", frames,
                     " stored frames name it; delete their blocks first"));
  }
  KV_RETURN_IF_ERROR(profiles_->Remove(id));
  if (decoder_ != nullptr) decoder_->Forget(id);
  return absl::OkStatus();
}

}  // namespace kvtrie
