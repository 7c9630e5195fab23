#include "storage/engine/profile_block_codec.h"

#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

absl::StatusOr<CodecCache::ProfileBytes> Load(ProfileStore& profiles, const ProfileId& id) {
  KV_ASSIGN_OR_RETURN(const SharedBytes bytes, profiles.Read(id));
  return CodecCache::ProfileBytes{bytes.owner, bytes.view};
}

// A frame that is alone at fault.
absl::Status OfOneFrame(const absl::Status& status) {
  // Its profile and its tokens were compared before: then it is no fault of the frame's bytes.
  return absl::IsInvalidArgument(status) ? absl::InternalError(status.message()) : status;
}

}  // namespace

std::vector<absl::Status> ProfileBlockCodec::Decode(const ModelSpec& spec,
                                                    std::span<const FrameToDecode> frames,
                                                    ProfileStore& profiles) const {
  std::vector<absl::Status> statuses(frames.size());
  const KvGeometry geometry(spec);
  std::map<ProfileId, std::vector<std::size_t>> by_profile;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    statuses[i] = frames[i].frame.CheckGeometry(geometry);
    if (statuses[i].ok()) by_profile[frames[i].frame.profile()].push_back(i);
  }
  const ModelId model = spec.Digest();
  for (const auto& [profile, indexes] : by_profile) {
    const auto codec =
        codecs_.Get(spec, model, profile, [&, id = profile] { return Load(profiles, id); });
    if (!codec.ok()) {
      // What was damaged is not there any more.
      const bool missing = absl::IsNotFound(codec.status()) || !profiles.Find(profile);
      (missing ? missing_profiles_ : unusable_profiles_)
          .fetch_add(indexes.size(), std::memory_order_relaxed);
      const absl::Status status = absl::FailedPreconditionError(
          missing ? absl::StrCat("its profile ", profile.ToHex(),
                                 " is not stored here: put it again (PutProfile), or fetch the "
                                 "block as ENCODING_FRAME")
                  : absl::StrCat(codec.status().message(), "; fetch the block as ENCODING_FRAME"));
      for (const std::size_t i : indexes) statuses[i] = status;
      continue;
    }
    std::vector<FrameToDecode> together;
    for (const std::size_t i : indexes) together.push_back(frames[i]);
    if (const absl::Status all = (*codec)->Decode(together); all.ok()) continue;
    // One of them at least is bad: which?
    for (const std::size_t i : indexes) {
      statuses[i] = OfOneFrame((*codec)->Decode(frames.subspan(i, 1)));
    }
  }
  return statuses;
}

absl::StatusOr<std::vector<EncodedFrame>> ProfileBlockCodec::Encode(
    const ModelSpec& spec, std::span<const BlockToEncode> blocks, const ProfileId& profile,
    Quality quality, ProfileStore& profiles) const {
  const auto codec =
      codecs_.Get(spec, spec.Digest(), profile, [&] { return Load(profiles, profile); });
  if (!codec.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("profile ", profile.ToHex(), ": ", codec.status().message()));
  }
  const ResidualCodec* const residual = (*codec)->residual();
  if (residual == nullptr || !residual->HasLevel(quality)) {
    return absl::FailedPreconditionError(
        absl::StrCat("profile ", profile.ToHex(), ": has no level of this quality"));
  }
  return (*codec)->Encode(blocks, quality);
}

bool ProfileBlockCodec::CodesDifferences(const ModelSpec& spec, const ProfileId& profile,
                                         ProfileStore& profiles) const {
  const auto codec =
      codecs_.Get(spec, spec.Digest(), profile, [&] { return Load(profiles, profile); });
  return codec.ok() && (*codec)->residual() != nullptr && (*codec)->residual()->HasDifferences();
}

BlockCodecStats ProfileBlockCodec::Stats() const {
  return {.missing_profiles_total = missing_profiles_,
          .unusable_profiles_total = unusable_profiles_,
          .codecs = codecs_.Stats()};
}

}  // namespace kvtrie
