#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/kv/ids.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// Bounds on a whole profile, head and body.
inline constexpr std::size_t kProfileBytesMin = std::size_t{1} << 10;
inline constexpr std::size_t kProfileBytesMax = std::size_t{256} << 20;
inline constexpr std::size_t kProfileLevelsMax = 8;

// A way of coding that a profile offers, with what it cost at calibration.
struct ProfileLevel {
  Quality quality = Quality::kHigh;  // near-exact, high or small
  float bits_per_component = 0;      // side information included; above 0, at most 32
  float mean_kl = 0;                 // nats; within the bound of `quality`
  float kl_p99 = 0;                  // nats, 99th percentile

  bool operator==(const ProfileLevel&) const = default;
};

// The fixed head of a codec profile: what residual frames need to be decoded. A profile is
// immutable and named by its content (ProfileId). What the body holds is the codec's. Layout:
// FORMAT.md.
struct ProfileHeader {
  CodecKey codec_key;  // of the models that it fits
  std::uint64_t body_bytes = 0;
  std::uint32_t body_crc32c = 0;
  std::vector<ProfileLevel> levels;  // 1 to kProfileLevelsMax, each of another quality

  bool operator==(const ProfileHeader&) const = default;

  std::size_t header_bytes() const;
  std::uint64_t profile_bytes() const { return header_bytes() + body_bytes; }
  // The level of this quality; null: there is none.
  const ProfileLevel* FindLevel(Quality quality) const;
};

// The largest head that a well-formed profile may have; bounds what a parser must see.
inline constexpr std::size_t kProfileHeaderBytesMax = 172;

// Checks the head of a profile, all but the body's checksum. `bytes` is a whole profile, or its
// beginning with at least the head; a longer one than the head says is refused.
// Errors: DataLoss says what is wrong; Unimplemented: intact, and of a newer version.
absl::StatusOr<ProfileHeader> ParseProfileHeader(std::span<const std::byte> bytes);

// REQUIRES: fields as ParseProfileHeader takes them; `to` has header.header_bytes().
void WriteProfileHeader(const ProfileHeader& header, std::span<std::byte> to);

}  // namespace kvtrie
