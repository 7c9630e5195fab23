#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {

// Counts the profile among those that are on their way, and holds the room that was made for it,
// until it is stored or given up. Room is made once its head has come: blocks do not go for what is
// no profile.
class ProfileUploadHandle final : public Engine::ProfileUpload {
 public:
  ProfileUploadHandle(Engine::Core& core, TenantId tenant, std::uint64_t total_bytes,
                      const ProfileId& expected)
      : core_(core), tenant_(tenant), total_bytes_(total_bytes), expected_(expected) {}
  ~ProfileUploadHandle() override {
    upload_.reset();
    GiveBack();
  }

  // ResourceExhausted: there is no room for so large a profile beside the others.
  absl::Status Begin() {
    const std::uint64_t coming = core_.profile_bytes_coming_.fetch_add(total_bytes_);
    announced_bytes_ = total_bytes_;
    // Profiles are never evicted: blocks would go for one that cannot fit.
    const std::uint64_t others = core_.profiles_->disk_bytes() + coming;
    if (others + total_bytes_ > core_.options_.disk_limit_bytes / 2) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "total_bytes: ", total_bytes_, " beside the ", others,
          " bytes of profiles that are here or on their way; they may take half of "
          "disk_limit_bytes (",
          core_.options_.disk_limit_bytes, "): delete a profile, or give the store more"));
    }
    KV_ASSIGN_OR_RETURN(upload_, core_.profiles_->Begin(total_bytes_, [this]() -> absl::Status {
      KV_RETURN_IF_ERROR(core_.MakeRoom(total_bytes_, /*nodes=*/0));
      reserved_bytes_ = total_bytes_;
      return absl::OkStatus();
    }));
    return absl::OkStatus();
  }

  absl::Status Append(std::span<const std::byte> bytes) override { return upload_->Append(bytes); }

  absl::StatusOr<StoredProfile> Commit() override {
    KV_ASSIGN_OR_RETURN(ProfileInfo info, upload_->Commit(expected_, core_.clock_.UnixSeconds()));
    GiveBack();
    StoredProfile profile{.info = std::move(info), .models = {}, .frames = 0};
    core_.DescribeProfile(tenant_, &profile);
    return profile;
  }

 private:
  void GiveBack() {
    core_.profile_bytes_coming_ -= std::exchange(announced_bytes_, 0);
    core_.reserved_bytes_ -= std::exchange(reserved_bytes_, 0);
  }

  Engine::Core& core_;
  const TenantId tenant_;
  const std::uint64_t total_bytes_;
  std::uint64_t announced_bytes_ = 0;  // of profile_bytes_coming_
  std::uint64_t reserved_bytes_ = 0;
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
  auto upload = std::make_unique<ProfileUploadHandle>(*this, tenant, total_bytes, expected);
  KV_RETURN_IF_ERROR(upload->Begin());
  return upload;
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
  if (codec_ != nullptr) codec_->Forget(id);
  return absl::OkStatus();
}

}  // namespace kvtrie
