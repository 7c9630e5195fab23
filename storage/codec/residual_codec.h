#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/reference_table.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// A stored block that others of the same model may be coded against: its KV as it is restored, bit
// for bit. Finer than what is coded against it, which inherits its error; and not of a frame that
// is itself kReferenced, so that a frame never needs more than one step of others.
struct ReferenceBlock {
  TrieNodeId node;                   // how frames name it; opaque here, not zero
  std::uint32_t first_position = 0;  // of its first token in its own session
  std::span<const TokenId> tokens;   // of the whole block
  std::span<const std::byte> raw;    // raw KV of the whole block
  // For encoders: of the frame that the KV is of. What is coded inherits much of its error, so it
  // has to be finer than that.
  Quality quality = Quality::kExact;
};

struct BlockToEncode {
  std::uint32_t first_position = 0;  // of its first token in the session
  // Tokens of the session as far as it is known; steps are finer near its end.
  std::uint32_t session_tokens = 0;
  std::span<const TokenId> tokens;
  std::span<const std::byte> raw;  // raw KV of the block
  // What an error in each token costs, 1 for an average one: sums of the attention that it got,
  // say. Empty: as the profile estimates it. Numbers that are none, or not above 0, count as 1.
  std::span<const float> importance = {};
  // The tokens of these runs are those of the references too, behind another prefix: about the same
  // K (before RoPE) and V. Both as ReferenceTable::Check wants them, or both empty.
  std::span<const ReferenceBlock> references = {};
  std::span<const ReferenceRun> runs = {};
};

struct EncodedBlock {
  // Of a frame with codec kResidual (RESIDUAL.md), or kReferenced (REFERENCED.md) where
  // referenced_tokens is not 0. Empty: too many tokens would be kept exact; store the block
  // losslessly.
  std::vector<std::byte> body;
  std::vector<std::uint32_t> section_bytes;
  std::uint32_t exact_tokens = 0;       // kept as they were: not finite, out of range, or first
  std::uint32_t referenced_tokens = 0;  // coded as the difference to a reference
};

struct BlockToDecode {
  // The body of a frame, in memory that is large enough for all of it.
  std::span<const std::byte> body;
  std::span<const std::uint32_t> section_bytes;
  Quality quality = Quality::kHigh;
  std::span<const TokenId> tokens;
  std::span<std::byte> raw;  // where the raw KV goes
  // Of a frame with codec kReferenced: the blocks that ReferencesOf names, in any order, and any
  // others.
  bool is_referenced = false;
  std::span<const ReferenceBlock> references = {};
};

// Predictive coding of KV blocks with a profile: K before RoPE and V are predicted from what is
// decoded already, and the transformed, quantized residual is entropy-coded. Lossy; what it costs
// the model is what the profile's levels say.
//
// Tokens with a reference are coded as the difference to it, where the profile says how
// (REFERENCED.md). A reference is used only if it is, bit for bit, what the encoder was given.
//
// Blocks that are coded together share matrix products, which are fast from 64 tokens on; the bytes
// do not depend on that, and every block decodes alone. Decoded KV is the same on every machine:
// products are of integers, sums have a fixed order, and RoPE's angles are computed portably.
//
// Immutable and thread-safe. Memory: about twice the profile, and per call some 100 bytes per
// component of the blocks of one layer.
class ResidualCodec {
 public:
  // InvalidArgument when the profile is not one of this model.
  static absl::StatusOr<std::unique_ptr<const ResidualCodec>> Create(
      const ModelSpec& spec, const ProfileId& id, const ResidualProfile& profile);
  ~ResidualCodec();

  const ProfileId& id() const;
  const ResidualProfile& profile() const;
  // Whether there is a level of this quality.
  bool HasLevel(Quality quality) const;
  // Whether the profile says how differences to references are coded. Without, references are left
  // aside, as they are at quality exact.
  bool HasDifferences() const;

  // In order. A token whose reference is no use (not finer than `quality`, not finite, out of range)
  // is coded without.
  // REQUIRES: sizes as the model's geometry says.
  // InvalidArgument: no level of this quality; references or runs that are not as they must be, or
  // whose tokens are not those of the block.
  absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                   Quality quality) const;

  // All layers of all blocks. Errors: those of Decoder.
  absl::Status Decode(std::span<const BlockToDecode> blocks) const;

  class Decoder;

 private:
  struct State;
  class Encoder;
  explicit ResidualCodec(std::unique_ptr<const State> state);
  std::unique_ptr<const State> state_;
};

// Decodes blocks layer by layer, while their bytes arrive. Not thread-safe. The codec and all that
// the blocks point to outlive it.
class ResidualCodec::Decoder {
 public:
  // The first section of each block is there, and all of its references. DataLoss: a body is not
  // what Encode writes; InvalidArgument: of another profile (the message names it) or other tokens;
  // a reference is missing, or is not what the block was coded against (the message names it).
  static absl::StatusOr<Decoder> Start(const ResidualCodec& codec,
                                       std::span<const BlockToDecode> blocks);
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;
  ~Decoder();

  // Layers that can be decoded when the first `section_count` sections of this block are there.
  std::uint32_t LayersIn(std::size_t block, std::size_t section_count) const;

  // Writes the next layer of all blocks. REQUIRES: the sections that it needs are there, and are
  // intact as far as their checksums say. DataLoss: the bytes are not what Encode writes; the last
  // layer finds out at the latest.
  absl::Status DecodeLayer();
  std::uint32_t decoded_layers() const;

 private:
  struct Run;
  explicit Decoder(std::unique_ptr<Run> run);
  std::unique_ptr<Run> run_;
};

}  // namespace kvtrie
