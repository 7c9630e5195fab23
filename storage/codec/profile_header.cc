// FORMAT.md has the layout; the offsets here are its table.
#include "storage/codec/profile_header.h"

#include <cmath>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::string_view kMagic = "KVP1";
constexpr std::uint16_t kVersion = 1;

constexpr std::size_t kVersionOffset = 4;
constexpr std::size_t kHeaderBytesOffset = 6;
constexpr std::size_t kCodecKeyOffset = 8;
constexpr std::size_t kBodyBytesOffset = 24;
constexpr std::size_t kLevelCountOffset = 32;
constexpr std::size_t kLevelsOffset = 36;

constexpr std::size_t kLevelBytes = 16;
constexpr std::size_t kChecksumsBytes = 8;  // of the body, of the head in front of it

constexpr std::size_t HeaderBytes(std::size_t level_count) {
  return kLevelsOffset + level_count * kLevelBytes + kChecksumsBytes;
}
static_assert(HeaderBytes(kProfileLevelsMax) == kProfileHeaderBytesMax);

absl::Status Damaged(const std::string& what) {
  return absl::DataLossError(absl::StrCat("profile: ", what));
}

ProfileLevel LoadLevel(const std::byte* at) {
  return {.quality = LoadLittle<Quality>(at),
          .bits_per_component = LoadLittle<float>(at + 4),
          .mean_kl = LoadLittle<float>(at + 8),
          .kl_p99 = LoadLittle<float>(at + 12)};
}

absl::Status CheckLevel(const ProfileLevel& level, const std::string& name) {
  switch (level.quality) {
    case Quality::kNearExact:
    case Quality::kHigh:
    case Quality::kSmall:
      break;
    default:
      return Damaged(absl::StrCat(name, " has quality ", static_cast<int>(level.quality),
                                  ", which is none that a level may have"));
  }
  // Written so that what is not a number fails.
  if (!(level.bits_per_component > 0 && level.bits_per_component <= 32)) {
    return Damaged(absl::StrCat(name, " has ", level.bits_per_component, " bits_per_component"));
  }
  if (!(level.mean_kl >= 0 && level.mean_kl <= static_cast<float>(MeanKlMax(level.quality)))) {
    return Damaged(absl::StrCat(name, " has a mean_kl of ", level.mean_kl,
                                ", and its quality promises at most ", MeanKlMax(level.quality)));
  }
  if (!(level.kl_p99 >= 0 && std::isfinite(level.kl_p99))) {
    return Damaged(absl::StrCat(name, " has a kl_p99 of ", level.kl_p99));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const ProfileHeader& header) {
  if (header.codec_key.empty()) return Damaged("no codec key");
  if (header.profile_bytes() < kProfileBytesMin || header.profile_bytes() > kProfileBytesMax) {
    return Damaged(absl::StrCat(header.profile_bytes(), " bytes; a profile has ", kProfileBytesMin,
                                " to ", kProfileBytesMax));
  }
  for (std::size_t i = 0; i < header.levels.size(); ++i) {
    const ProfileLevel& level = header.levels[i];
    KV_RETURN_IF_ERROR(CheckLevel(level, absl::StrCat("level ", i)));
    // A frame names its quality, and that must name a level.
    if (header.FindLevel(level.quality) != &level) {
      return Damaged(absl::StrCat("level ", i, " has the quality of another"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::size_t ProfileHeader::header_bytes() const { return HeaderBytes(levels.size()); }

const ProfileLevel* ProfileHeader::FindLevel(Quality quality) const {
  for (const ProfileLevel& level : levels) {
    if (level.quality == quality) return &level;
  }
  return nullptr;
}

absl::StatusOr<ProfileHeader> ParseProfileHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < HeaderBytes(1)) return Damaged("too short");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return Damaged("no magic");
  const auto version = LoadLittle<std::uint16_t>(bytes.data() + kVersionOffset);
  const std::size_t header_bytes = LoadLittle<std::uint16_t>(bytes.data() + kHeaderBytesOffset);
  if (version > kVersion) {
    return absl::UnimplementedError(
        absl::StrCat("profile: version ", version, " was written by a newer release"));
  }
  if (version != kVersion) return Damaged("no version");
  const std::size_t level_count = LoadLittle<std::uint32_t>(bytes.data() + kLevelCountOffset);
  if (level_count < 1 || level_count > kProfileLevelsMax) {
    return Damaged(absl::StrCat(level_count, " levels; a profile has 1 to ", kProfileLevelsMax));
  }
  if (header_bytes != HeaderBytes(level_count)) return Damaged("header size");
  if (bytes.size() < header_bytes) return Damaged("header is cut off");
  const std::byte* const checksums = bytes.data() + header_bytes - kChecksumsBytes;
  if (Crc32c(bytes.first(header_bytes - 4)) != LoadLittle<std::uint32_t>(checksums + 4)) {
    return Damaged("wrong checksum of the header");
  }

  ProfileHeader header;
  header.codec_key = LoadLittle<CodecKey>(bytes.data() + kCodecKeyOffset);
  header.body_bytes = LoadLittle<std::uint64_t>(bytes.data() + kBodyBytesOffset);
  header.body_crc32c = LoadLittle<std::uint32_t>(checksums);
  // Before it is added to anything.
  if (header.body_bytes > kProfileBytesMax) {
    return Damaged(absl::StrCat("a body of ", header.body_bytes, " bytes"));
  }
  for (std::size_t i = 0; i < level_count; ++i) {
    const std::byte* const at = bytes.data() + kLevelsOffset + i * kLevelBytes;
    constexpr std::byte kZeros[3] = {};
    if (std::memcmp(at + 1, kZeros, sizeof kZeros) != 0) {
      return Damaged("reserved bytes are not zero");
    }
    header.levels.push_back(LoadLevel(at));
  }
  KV_RETURN_IF_ERROR(CheckFields(header));
  if (bytes.size() > header.profile_bytes()) return Damaged("bytes behind the body");
  return header;
}

void WriteProfileHeader(const ProfileHeader& header, std::span<std::byte> to) {
  KV_CHECK(!header.levels.empty());
  KV_CHECK(header.levels.size() <= kProfileLevelsMax);
  KV_CHECK(CheckFields(header).ok());
  KV_CHECK(to.size() == header.header_bytes());

  std::memset(to.data(), 0, to.size());
  std::byte* const at = to.data();
  std::memcpy(at, kMagic.data(), kMagic.size());
  StoreLittle(at + kVersionOffset, kVersion);
  StoreLittle(at + kHeaderBytesOffset, static_cast<std::uint16_t>(to.size()));
  StoreLittle(at + kCodecKeyOffset, header.codec_key);
  StoreLittle(at + kBodyBytesOffset, header.body_bytes);
  StoreLittle(at + kLevelCountOffset, static_cast<std::uint32_t>(header.levels.size()));
  for (std::size_t i = 0; i < header.levels.size(); ++i) {
    std::byte* const level_at = at + kLevelsOffset + i * kLevelBytes;
    const ProfileLevel& level = header.levels[i];
    StoreLittle(level_at, level.quality);
    StoreLittle(level_at + 4, level.bits_per_component);
    StoreLittle(level_at + 8, level.mean_kl);
    StoreLittle(level_at + 12, level.kl_p99);
  }
  std::byte* const checksums = at + to.size() - kChecksumsBytes;
  StoreLittle(checksums, header.body_crc32c);
  StoreLittle(checksums + 4, Crc32c(to.first(to.size() - 4)));
}

}  // namespace kvtrie
