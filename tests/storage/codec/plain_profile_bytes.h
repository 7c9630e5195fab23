#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "storage/base/crc32c.h"
#include "storage/codec/profile_header.h"
#include "storage/kv/profile_digest.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {

// A profile as it is stored: its levels say what they promise at least.
inline std::vector<std::byte> ProfileBytes(const ResidualProfile& profile) {
  const std::string body = profile.EncodeBody();
  ProfileHeader header;
  header.codec_key = profile.codec_key;
  header.body_bytes = body.size();
  header.body_crc32c = Crc32c(std::as_bytes(std::span(body)));
  for (const ResidualLevel& level : profile.levels) {
    const auto kl = static_cast<float>(MeanKlMax(level.quality) / 2);
    header.levels.push_back({level.quality, 4, kl, kl});
  }
  std::vector<std::byte> bytes(header.profile_bytes());
  WriteProfileHeader(header, std::span(bytes).first(header.header_bytes()));
  std::memcpy(bytes.data() + header.header_bytes(), body.data(), body.size());
  return bytes;
}

inline ProfileId ProfileIdOf(std::span<const std::byte> profile) {
  ProfileDigest digest;
  digest.Add(profile);
  return digest.Finish();
}

// A model whose blocks, coded with PlainProfile, have several sections.
inline ModelSpec SectionedSpec() { return SyntheticSpec({{12, 4, 32, 32}}, DType::kBfloat16); }

}  // namespace kvtrie
