#pragma once

#include <vector>

#include "tests/storage/codec/residual_fixture.h"

// The model, profile and blocks that residual_body_fuzz, profile_body_fuzz and their corpus share.
namespace kvtrie {

inline ModelSpec FuzzSpec() {
  return WithBlocks(SyntheticSpec({{2, 2, 2, 2}}, DType::kBfloat16), 20);
}

// Three blocks; in the second one a token is not finite.
inline SyntheticText FuzzText() {
  SyntheticText text = MakeText(FuzzSpec(), 60, 1);
  text.raw[2 * (30 * 4 + 1)] = std::byte{0xFF};
  text.raw[2 * (30 * 4 + 1) + 1] = std::byte{0x7F};
  return text;
}

// With a first token and an exponent for each step.
inline ResidualProfile FuzzProfile() {
  const ModelSpec spec = FuzzSpec();
  ResidualProfile profile = PlainProfile(spec);
  profile.group_count = 1;
  std::vector<std::uint32_t> counts(kExponentSymbols, 1);
  counts[kExponentDeltaMax] = 100;
  profile.exponent_frequencies.resize(kExponentSymbols);
  NormalizeCounts(counts, profile.exponent_frequencies);
  profile.has_first_token = true;
  profile.first_token = kFirstTokenOfTexts;
  const std::vector<std::byte> block = CutBlock(spec, FuzzText(), 0);
  for (const std::vector<float>& rows : ValuesOf(spec, block)) {
    profile.first_rows.insert(profile.first_rows.end(), rows.begin(), rows.begin() + 4);
  }
  return profile;
}

}  // namespace kvtrie
