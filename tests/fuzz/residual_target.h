#pragma once

#include <cstddef>
#include <vector>

#include "storage/base/check.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

// The model, profile and blocks that residual_body_fuzz, referenced_body_fuzz, profile_body_fuzz
// and their corpora share.
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

inline ResidualProfile FuzzProfileOfDifferences() {
  return WithDifferences(FuzzProfile(), FuzzSpec());
}

// Another text, and one that holds tokens of it: some of the first block and the last, all of the
// second one.
inline SyntheticText FuzzOther() { return MakeText(FuzzSpec(), 60, 2); }
inline SyntheticText FuzzShared() {
  return ShareTokens(FuzzSpec(), FuzzOther(), 3, 40, 11, 60, 3, 0.05f);
}

// Decodes so many bytes of raw KV from a body; every kernel set finds the same.
inline void DecodeWithEachKernelSet(const ResidualCodec& codec, BlockToDecode to_decode,
                                    std::size_t raw_bytes) {
  std::vector<std::byte> first;
  absl::StatusCode first_code{};
  WithEachKernelSet([&] {
    std::vector<std::byte> raw(raw_bytes);
    to_decode.raw = raw;
    const absl::Status status = codec.Decode({&to_decode, 1});
    if (first.empty()) {
      first = raw;
      first_code = status.code();
    }
    KV_CHECK(status.code() == first_code);
    KV_CHECK(raw == first);
  });
}

}  // namespace kvtrie
