#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/verb.h"
#include "storage/codec/residual_codec.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// The raw KV of a run of tokens, as one block, cut into blocks of the spec, and back. Tokens behind
// the last whole block are left out. REQUIRES: whole tokens; blocks of the spec's size.
std::vector<std::vector<std::byte>> BlocksOfRun(const ModelSpec& spec,
                                                std::span<const std::byte> run);
std::vector<std::byte> RunOfBlocks(const ModelSpec& spec,
                                   std::span<const std::vector<std::byte>> blocks);

// A run of tokens as blocks, coded and restored.
struct CodedRun {
  std::vector<std::size_t> block_bytes;  // of each block's frame
  std::size_t exact_tokens = 0;          // kept as they were
  std::size_t raw_bytes = 0;
  std::size_t components = 0;
  std::vector<std::byte> restored;  // raw KV of the whole blocks, as one block
  double encode_seconds = 0;        // the fastest round
  double decode_seconds = 0;

  std::size_t frame_bytes() const;
  double bits_per_component() const;
};

// Codes the whole blocks of a session that begins at position 0, all of its tokens being known.
// `raw`: its KV as one block. `importance`: of each token (BlockToEncode), or empty. A block that
// the codec declines counts as a lossless frame.
// REQUIRES: sizes as the spec says; at least one whole block; rounds > 0.
// InvalidArgument: the profile has no such level. Internal: what comes back is not what went in.
absl::StatusOr<CodedRun> CodeRun(const ModelSpec& spec, const ResidualCodec& codec,
                                 std::span<const TokenId> tokens, std::span<const std::byte> raw,
                                 std::span<const float> importance, Quality quality, int rounds);

// `kvtrie profile code`.
ExitCode RunProfileCode(const VerbContext& context);

}  // namespace kvtrie
