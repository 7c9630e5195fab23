#include "storage/codec/profile_codec.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/profile_header.h"
#include "storage/codec/residual_profile.h"

namespace kvtrie {
namespace {

absl::StatusOr<ResidualProfile> ReadProfile(const ModelSpec& spec,
                                            std::span<const std::byte> bytes) {
  KV_ASSIGN_OR_RETURN(const ProfileHeader header, ParseProfileHeader(bytes));
  if (header.profile_bytes() != bytes.size()) return absl::DataLossError("its body is cut off");
  if (!spec.layout_tag.empty()) {
    return absl::InvalidArgumentError("the model has a layout of its own, which no profile fits");
  }
  if (header.codec_key != spec.CodecKey()) {
    return absl::InvalidArgumentError("it is for another model");
  }
  const auto body = bytes.subspan(header.header_bytes());
  if (Crc32c(body) != header.body_crc32c) {
    return absl::DataLossError("wrong checksum of its body");
  }
  KV_ASSIGN_OR_RETURN(ResidualProfile profile, ResidualProfile::DecodeBody(AsText(body)));
  profile.codec_key = header.codec_key;  // the body does not repeat it
  bool same_levels = profile.levels.size() == header.levels.size();
  for (std::size_t i = 0; same_levels && i < header.levels.size(); ++i) {
    same_levels = profile.levels[i].quality == header.levels[i].quality;
  }
  if (!same_levels) return absl::InvalidArgumentError("its head and body have different levels");
  return profile;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const ResidualCodec>> CodecOfProfile(
    const ModelSpec& spec, const ProfileId& id, std::span<const std::byte> profile) {
  const auto name_it = [&id](const absl::Status& status) {
    return absl::Status(status.code(),
                        absl::StrCat("profile ", id.ToHex(), ": ", status.message()));
  };
  auto read = ReadProfile(spec, profile);
  if (!read.ok()) return name_it(read.status());
  auto codec = ResidualCodec::Create(spec, id, *read);
  if (!codec.ok()) return name_it(codec.status());
  return codec;
}

}  // namespace kvtrie
