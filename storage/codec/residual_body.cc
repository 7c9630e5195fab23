#include "storage/codec/residual_body.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/coded_body.h"
#include "storage/codec/frame.h"

namespace kvtrie {
namespace {

constexpr std::uint8_t kFirstTokenFromProfile = 1;  // of flags
constexpr std::size_t kExactBytesMax = kSectionBytesMax / 4;

// What stands behind the binding.
std::string Head(const KvGeometry& geometry, Quality quality, const BlockToEncode& block,
                 const CodedSymbols& coded, std::span<const std::uint16_t> layers_of_section) {
  ByteWriter writer;
  writer.Write(static_cast<std::uint8_t>(coded.first_from_profile ? kFirstTokenFromProfile : 0));
  writer.Write(std::uint8_t{0});
  writer.Write(static_cast<std::uint16_t>(coded.exact.size()));
  writer.Write(static_cast<std::uint16_t>(layers_of_section.size()));
  for (const std::uint16_t layers : layers_of_section) writer.Write(layers);
  if (quality == Quality::kExact) {
    for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
      writer.Write(Crc32c(RawOfLayer(geometry, layer, block.raw)));
    }
  }
  if (!coded.references.runs.empty()) coded.references.Write(writer);
  for (const std::uint16_t token : coded.exact) writer.Write(token);
  for (const std::uint16_t token : coded.exact) {
    ForEachPiece(geometry, token, [&](std::size_t offset, std::size_t bytes) {
      writer.WriteText(AsText(block.raw.subspan(offset, bytes)));
    });
  }
  return writer.Take();
}

}  // namespace

absl::Status DamagedBody(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("residual frame: ", what));
}

absl::StatusOr<ResidualBody> ReadResidualBody(const KvGeometry& geometry, const ProfileId& id,
                                              const ResidualProfile& profile,
                                              const BlockToDecode& block) {
  KV_CHECK(block.tokens.size() == geometry.block_tokens());
  KV_CHECK(block.raw.size() == geometry.raw_block_bytes());
  KV_CHECK(!block.section_bytes.empty());
  std::size_t section_bytes = 0;
  for (const std::uint32_t bytes : block.section_bytes) section_bytes += bytes;
  if (section_bytes != block.body.size()) return DamagedBody("sections do not cover the body");
  if (block.section_bytes[0] < kFrameBindingBytes) return DamagedBody("too short");

  const FrameBinding binding = ReadFrameBinding(block.body);
  if (binding.profile != id) {
    return absl::InvalidArgumentError(
        absl::StrCat("residual frame: made with profile ", binding.profile.ToHex()));
  }
  if (binding.tokens_crc32c != TokensCrc(block.tokens)) {
    return absl::InvalidArgumentError("residual frame: made for other tokens");
  }

  // All of this lies in the first section.
  ResidualBody body;
  body.first_position = binding.first_position;
  ByteReader reader(
      AsText(block.body.subspan(kFrameBindingBytes, block.section_bytes[0] - kFrameBindingBytes)));
  const auto flags = reader.Read<std::uint8_t>();
  const auto zero = reader.Read<std::uint8_t>();
  const std::size_t exact_count = reader.Read<std::uint16_t>();
  const std::size_t section_count = reader.Read<std::uint16_t>();
  if ((flags & ~kFirstTokenFromProfile) != 0 || zero != 0) return DamagedBody("reserved bits");
  if (section_count != block.section_bytes.size()) return DamagedBody("sections");
  std::uint16_t layers = 0;
  for (std::size_t i = 0; i < section_count; ++i) {
    body.layers_of_section.push_back(reader.Read<std::uint16_t>());
    if (body.layers_of_section.back() < layers) return DamagedBody("layers of a section");
    layers = body.layers_of_section.back();
  }
  if (layers != geometry.layer_count()) return DamagedBody("layers of the last section");
  for (std::uint32_t i = 0; i < geometry.layer_count() && block.quality == Quality::kExact; ++i) {
    body.raw_crcs.push_back(reader.Read<std::uint32_t>());
  }
  if (block.is_referenced) {
    KV_ASSIGN_OR_RETURN(body.references, ReferenceTable::Read(reader, geometry.block_tokens()));
  }
  if (exact_count > geometry.block_tokens()) return DamagedBody("exact tokens");
  for (std::size_t i = 0; i < exact_count; ++i) {
    const auto token = reader.Read<std::uint16_t>();
    if (token >= geometry.block_tokens() || (i > 0 && token <= body.exact.back())) {
      return DamagedBody("exact tokens");
    }
    body.exact.push_back(token);
  }
  body.exact_rows = reader.ReadBytes(exact_count * TokenBytes(geometry));
  if (!reader.ok()) return DamagedBody("the first section is too short");

  body.first_from_profile = (flags & kFirstTokenFromProfile) != 0;
  if (body.first_from_profile && (!profile.has_first_token || binding.first_position != 0 ||
                                  block.tokens[0] != profile.first_token ||
                                  (!body.exact.empty() && body.exact.front() == 0))) {
    return DamagedBody("no first token of the profile");
  }
  for (const ReferenceRun& run : body.references.runs) {
    const auto exact_token =
        std::lower_bound(body.exact.begin(), body.exact.end(), run.first_token);
    if ((body.first_from_profile && run.first_token == 0) ||
        (exact_token != body.exact.end() && *exact_token < run.first_token + run.token_count)) {
      return DamagedBody("a token of a run comes from elsewhere too");
    }
  }
  body.symbols = block.body.subspan(block.section_bytes[0] - reader.remaining_bytes());
  return body;
}

bool KeepsTooMuchExact(const KvGeometry& geometry, std::size_t exact_tokens) {
  return exact_tokens * (TokenBytes(geometry) + sizeof(std::uint16_t)) > kExactBytesMax ||
         exact_tokens > std::max<std::size_t>(geometry.block_tokens() / 4, 1);
}

EncodedBlock WriteResidualBody(const KvGeometry& geometry, const ProfileId& id, Quality quality,
                               const BlockToEncode& block, const CodedSymbols& coded) {
  EncodedBlock encoded;
  encoded.exact_tokens = static_cast<std::uint32_t>(coded.exact.size());
  for (const ReferenceRun& run : coded.references.runs) {
    encoded.referenced_tokens += run.token_count;
  }
  std::vector<std::size_t> layer_bytes = coded.layer_bytes;
  layer_bytes.back() = coded.symbols.size();
  encoded.section_bytes = CutSections(layer_bytes);
  std::vector<std::uint16_t> layers_of_section;
  std::size_t section_end = 0;
  for (const std::uint32_t bytes : encoded.section_bytes) {
    section_end += bytes;
    layers_of_section.push_back(static_cast<std::uint16_t>(
        std::upper_bound(layer_bytes.begin(), layer_bytes.end(), section_end) -
        layer_bytes.begin()));
  }
  // The head goes with the first section, or is one of its own where both are too long for that.
  std::string head = Head(geometry, quality, block, coded, layers_of_section);
  if (kFrameBindingBytes + head.size() + encoded.section_bytes[0] > kSectionBytesMax) {
    encoded.section_bytes.insert(encoded.section_bytes.begin(), 0);
    layers_of_section.insert(layers_of_section.begin(), 0);
    head = Head(geometry, quality, block, coded, layers_of_section);
  }
  encoded.section_bytes[0] += static_cast<std::uint32_t>(kFrameBindingBytes + head.size());

  encoded.body.resize(kFrameBindingBytes + head.size() + coded.symbols.size());
  WriteFrameBinding({.first_position = block.first_position,
                     .tokens_crc32c = TokensCrc(block.tokens),
                     .profile = id},
                    std::span(encoded.body).first(kFrameBindingBytes));
  std::memcpy(encoded.body.data() + kFrameBindingBytes, head.data(), head.size());
  std::memcpy(encoded.body.data() + kFrameBindingBytes + head.size(), coded.symbols.data(),
              coded.symbols.size());
  return encoded;
}

EncodedBlock UncodedBlock(std::size_t exact_tokens) {
  return {
      .body = {}, .section_bytes = {}, .exact_tokens = static_cast<std::uint32_t>(exact_tokens)};
}

bool AreFirstRows(const ResidualProfile& profile, std::span<const float* const> rows) {
  std::size_t at = 0;
  double error = 0, energy = 0;
  for (std::size_t plane = 0; plane < profile.planes.size(); ++plane) {
    for (std::size_t c = 0; c < profile.planes[plane].components(); ++c, ++at) {
      const float x = rows[plane][c];
      const double difference = double{x} - profile.first_rows[at];
      error += difference * difference;
      energy += double{x} * x;
    }
  }
  return error <= 1e-4 * energy;
}

std::uint32_t TokensCrc(std::span<const TokenId> tokens) { return Crc32c(std::as_bytes(tokens)); }

std::size_t TokenBytes(const KvGeometry& geometry) {
  return geometry.raw_block_bytes() / geometry.block_tokens();
}

}  // namespace kvtrie
