#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"

namespace kvtrie {

// Holds the room that was made for the profile until it is stored or given up.
class ProfileUploadHandle final : public Engine::ProfileUpload {
 public:
  ProfileUploadHandle(Engine::Core& core, TenantId tenant, std::uint64_t reserved_bytes,
                      std::unique_ptr<ProfileStore::Upload> upload)
      : core_(core), tenant_(tenant), reserved_bytes_(reserved_bytes), upload_(std::move(upload)) {}
  ~ProfileUploadHandle() override {
    upload_.reset();
    core_.reserved_bytes_ -= reserved_bytes_;
  }

  absl::Status Append(std::span<const std::byte> bytes) override { return upload_->Append(bytes); }

  absl::StatusOr<StoredProfile> Commit(const ProfileId& expected) override {
    KV_ASSIGN_OR_RETURN(ProfileInfo info, upload_->Commit(expected, core_.clock_.UnixSeconds()));
    StoredProfile profile{.info = std::move(info), .models = {}, .frames = 0};
    core_.DescribeProfile(tenant_, &profile);
    return profile;
  }

 private:
  Engine::Core& core_;
  const TenantId tenant_;
  const std::uint64_t reserved_bytes_;
  std::unique_ptr<ProfileStore::Upload> upload_;
};

absl::StatusOr<std::unique_ptr<Engine::ProfileUpload>> Engine::Core::BeginProfile(
    TenantId tenant, std::uint64_t total_bytes) {
  if (draining_) return absl::UnavailableError("the server is draining");
  if (total_bytes < kProfileBytesMin || total_bytes > kProfileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("total_bytes: ", total_bytes, "; a profile has ",
                                                   kProfileBytesMin, " to ", kProfileBytesMax));
  }
  KV_RETURN_IF_ERROR(MakeRoom(total_bytes));
  auto upload = profiles_->Begin(total_bytes);
  if (!upload.ok()) {
    reserved_bytes_ -= total_bytes;
    return upload.status();
  }
  return std::make_unique<ProfileUploadHandle>(*this, tenant, total_bytes, *std::move(upload));
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
