#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "tests/fuzz/residual_target.h"

namespace kvtrie {
namespace {

// Makes shares of 4096 of what the tables have, so that mutations come past them.
void MendTables(std::vector<std::uint16_t>& frequencies, std::size_t symbols) {
  for (std::size_t at = 0; at < frequencies.size(); at += symbols) {
    const std::span<std::uint16_t> table = std::span(frequencies).subspan(at, symbols);
    std::vector<std::uint32_t> counts(table.begin(), table.end());
    ++counts[symbols / 2];
    NormalizeCounts(counts, table);
  }
}

// With whatever consistent profile: what it encodes, it decodes.
void TryCoding(const ResidualProfile& profile) {
  static const ModelSpec spec = FuzzSpec();
  static const SyntheticText text = FuzzText();
  const auto codec = ResidualCodec::Create(spec, SyntheticProfileId(), profile);
  if (!codec.ok()) return;
  for (std::uint32_t block = 0; block < 2; ++block) {
    const std::span<const TokenId> tokens = std::span(text.tokens).subspan(20 * block, 20);
    const std::vector<std::byte> raw = CutBlock(spec, text, 20 * block);
    const BlockToEncode to_encode = {
        .first_position = 20 * block, .session_tokens = 60, .tokens = tokens, .raw = raw};
    for (const ResidualLevel& level : profile.levels) {
      const auto encoded = (*codec)->Encode({&to_encode, 1}, level.quality);
      if (!encoded.ok() || (*encoded)[0].body.empty()) continue;
      std::vector<std::byte> decoded(raw.size());
      const BlockToDecode to_decode = {.body = (*encoded)[0].body,
                                       .section_bytes = (*encoded)[0].section_bytes,
                                       .quality = level.quality,
                                       .tokens = tokens,
                                       .raw = decoded};
      KV_CHECK((*codec)->Decode({&to_decode, 1}).ok());
    }
  }
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  const auto profile = kvtrie::ResidualProfile::DecodeBody(body);
  if (!profile.ok()) return 0;
  KV_CHECK(profile->CheckConsistency().ok());
  KV_CHECK(profile->EncodeBody() == body);
  kvtrie::TryCoding(*profile);
  kvtrie::ResidualProfile mended = *profile;
  kvtrie::MendTables(mended.class_frequencies, kvtrie::kResidualSymbols);
  kvtrie::MendTables(mended.exponent_frequencies, kvtrie::kExponentSymbols);
  kvtrie::TryCoding(mended);
  return 0;
}
