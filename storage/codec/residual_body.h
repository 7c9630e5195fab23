#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/codec/reference_table.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

// The body of a frame that a profile codes (RESIDUAL.md), but for its symbols: what coders on all
// devices share.
namespace kvtrie {

// What a body says in front of its symbols.
struct ResidualBody {
  std::uint32_t first_position = 0;
  bool first_from_profile = false;               // token 0 is the profile's first token
  std::vector<std::uint16_t> layers_of_section;  // complete with each section
  std::vector<std::uint32_t> raw_crcs;           // of each layer, in exact frames only
  ReferenceTable references;                     // of a referenced one
  std::vector<std::uint16_t> exact;              // tokens that are kept as they are, ascending
  std::span<const std::byte> exact_rows;         // their bytes: of each, what ForEachPiece names
  std::span<const std::byte> symbols;            // as far as sections say
};

// Checks all of it but what it says of references: that they are those that were given, and that
// their tokens are. Points into the body. REQUIRES: the first section is there; sizes as the
// geometry says. DataLoss: not what an encoder writes. InvalidArgument: of another profile (the
// message names it), or other tokens.
absl::StatusOr<ResidualBody> ReadResidualBody(const KvGeometry& geometry, const ProfileId& id,
                                              const ResidualProfile& profile,
                                              const BlockToDecode& block);

// Whether a block with so many exact tokens is better stored losslessly: the first section holds
// them.
bool KeepsTooMuchExact(const KvGeometry& geometry, std::size_t exact_tokens);

// What an encoder has made of a block.
struct CodedSymbols {
  bool first_from_profile = false;
  ReferenceTable references = {};         // none: a frame without
  std::vector<std::uint16_t> exact = {};  // ascending; not too many
  std::vector<std::byte> symbols = {};
  std::vector<std::size_t> layer_bytes = {};  // how many of them each layer needs, ascending
};
EncodedBlock WriteResidualBody(const KvGeometry& geometry, const ProfileId& id, Quality quality,
                               const BlockToEncode& block, const CodedSymbols& coded);

// A block that is not coded, for it keeps too much exact.
EncodedBlock UncodedBlock(std::size_t exact_tokens);

// Whether a token's rows are those of the profile's first token, but for roundings of the dtype in
// two engines. rows: of each plane, its components. REQUIRES: the profile has a first token.
bool AreFirstRows(const ResidualProfile& profile, std::span<const float* const> rows);

std::uint32_t TokensCrc(std::span<const TokenId> tokens);

// The bytes of one layer of a raw block.
template <typename Byte>
std::span<Byte> RawOfLayer(const KvGeometry& geometry, std::uint32_t layer, std::span<Byte> raw) {
  return raw.subspan(geometry.layer_begin(layer),
                     geometry.layer_end(layer) - geometry.layer_begin(layer));
}

// The bytes of one token, layer by layer, K then V.
std::size_t TokenBytes(const KvGeometry& geometry);
template <typename Copy>  // copy(offset in the block, bytes)
void ForEachPiece(const KvGeometry& geometry, std::size_t token, Copy copy) {
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t bytes = geometry.kind_bytes(layer, kind) / geometry.block_tokens();
      copy(geometry.kind_begin(layer, kind) + token * bytes, bytes);
    }
  }
}

// DataLoss: a frame that no encoder writes.
absl::Status DamagedBody(absl::string_view what);

}  // namespace kvtrie
