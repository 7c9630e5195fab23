#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/verb.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/reference_table.h"
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

// A session as a reader gets it, for others to be coded against.
struct RestoredSession {
  std::span<const TokenId> tokens;             // from position 0 on
  std::vector<std::vector<std::byte>> blocks;  // raw KV of its whole blocks
  // Of its frames. What is coded leaves a reference aside that is no finer than itself.
  Quality quality = Quality::kExact;
};

// What a block has in common with blocks of another session, as BlockToEncode takes it.
struct BlockReferences {
  std::vector<ReferenceBlock> references;  // point into the other session
  std::vector<ReferenceRun> runs;
};

// Text that both sessions have behind different prefixes, in runs of at least so many tokens: those
// that a store finds (storage/trie/run_index.h).
inline constexpr std::size_t kSharedTokensMin = 32;

// Of each whole block of a session with these tokens, from position 0 on. REQUIRES: blocks of the
// spec's size.
std::vector<BlockReferences> FindReferences(const ModelSpec& spec, const RestoredSession& other,
                                            std::span<const TokenId> tokens);

// A run of tokens as blocks, coded and restored.
struct CodedRun {
  std::vector<std::size_t> block_bytes;                // of each block's frame
  std::vector<std::uint32_t> block_referenced_tokens;  // of each block, coded against the other
  std::size_t exact_tokens = 0;                        // kept as they were
  std::size_t raw_bytes = 0;
  std::size_t components = 0;
  std::vector<std::vector<std::byte>> restored;  // raw KV of the whole blocks
  double encode_seconds = 0;                     // the fastest round
  double decode_seconds = 0;

  std::size_t frame_bytes() const;
  double bits_per_component() const;
};

struct CodeRunOptions {
  Quality quality = Quality::kExact;       // exact: as small as the profile makes it
  std::span<const float> importance = {};  // of each token (BlockToEncode), or empty
  const RestoredSession* against = nullptr;
  int rounds = 1;
};

// Codes the whole blocks of a session that begins at position 0, all of its tokens being known, as
// a store would. `raw`: its KV as one block. `codec`: of this spec.
// REQUIRES: sizes as the spec says; at least one whole block; rounds > 0.
// Internal: what comes back is not what went in.
absl::StatusOr<CodedRun> CodeRun(const ModelSpec& spec, const FrameCodec& codec,
                                 std::span<const TokenId> tokens, std::span<const std::byte> raw,
                                 const CodeRunOptions& options);

// `kvtrie profile code`.
ExitCode RunProfileCode(const VerbContext& context);

}  // namespace kvtrie
