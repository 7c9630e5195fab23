#include "server/worker/profile_shelf.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {

absl::StatusOr<ProfileShelf::Held> ProfileShelf::Add(std::vector<std::byte> profile) {
  KV_ASSIGN_OR_RETURN(ProfileHeader header, ParseProfileHeader(profile));
  if (header.profile_bytes() != profile.size()) {
    return absl::DataLossError(absl::StrCat("profile: ", profile.size(),
                                            " bytes, and its head says ", header.profile_bytes()));
  }
  if (Crc32c(std::span(profile).subspan(header.header_bytes())) != header.body_crc32c) {
    return absl::DataLossError("profile: wrong checksum of its body");
  }
  if (profile.size() > bytes_max_) {
    return absl::ResourceExhaustedError(absl::StrCat("profile: ", profile.size(),
                                                     " bytes; all of them together may have ",
                                                     bytes_max_, " here (--profile_memory_bytes)"));
  }
  ProfileDigest digest;
  digest.Add(profile);
  const ProfileId id = digest.Finish();

  absl::MutexLock lock(&mutex_);
  auto [found, is_new] = profiles_.try_emplace(id);
  found->second.last_use = ++uses_;
  if (!is_new) return Held{id, found->second.header};
  bytes_ += profile.size();
  found->second.header = header;
  found->second.bytes = std::make_shared<const std::vector<std::byte>>(std::move(profile));
  while (bytes_ > bytes_max_) {
    const auto oldest = std::min_element(
        profiles_.begin(), profiles_.end(),
        [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
    bytes_ -= oldest->second.bytes->size();
    profiles_.erase(oldest);
  }
  return Held{id, header};
}

ProfileShelf::Bytes ProfileShelf::Find(const ProfileId& id) {
  absl::MutexLock lock(&mutex_);
  const auto found = profiles_.find(id);
  if (found == profiles_.end()) return nullptr;
  found->second.last_use = ++uses_;
  return found->second.bytes;
}

ProfileLevel ProfileShelf::LevelOf(const ProfileId& id, Quality quality) const {
  absl::MutexLock lock(&mutex_);
  const auto found = profiles_.find(id);
  if (found == profiles_.end()) return {};
  const ProfileLevel* const level = found->second.header.FindLevel(quality);
  return level == nullptr ? ProfileLevel{} : *level;
}

std::vector<ProfileShelf::Held> ProfileShelf::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<Held> held;
  for (const auto& [id, entry] : profiles_) held.push_back({id, entry.header});
  std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.id < b.id; });
  return held;
}

}  // namespace kvtrie
