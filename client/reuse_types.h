#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/kv/ids.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// A prompt whose text is stored under other prefixes (LookupOptions::allow_text_reuse), and the
// memory that KV of it goes to.
struct RunsTarget {
  std::span<const TokenId> tokens;  // that were looked up
  // Raw KV of blocks of the prompt from `first_block` on, each of the model's raw block size, or
  // empty where it is not wanted. Only what is reused is written; the rest of a block stays as it
  // is. The last one may be of a block that the prompt does not fill.
  std::span<const std::span<std::byte>> blocks;
  std::uint32_t first_block = 0;
};

struct FetchRunsOptions {
  Quality min_quality = Quality::kExact;  // of the sources; no better than the lookup's
  // The first tokens of each run are left out, for the caller to compute: what they are depends
  // most on the text before. 0 to kSkipTokensMax; QUALITY.md has what that changes.
  std::uint32_t skip_tokens = 16;
  LeaseId release_lease{};               // dropped by the server when the last block was read
  std::chrono::milliseconds timeout{0};  // zero: the client's default
};

inline constexpr std::uint32_t kSkipTokensMax = 32;

// What became of one run.
struct FetchedRun {
  absl::Status status;  // of its first block that did not come, as FetchedBlock has it
  Quality source_quality = Quality::kExact;  // the lowest that was served
  std::uint32_t reused_tokens = 0;
};

// KV that is in place now. It is approximate: not what the model would compute behind this prefix,
// of no rated quality, whatever its sources were.
struct RunsReport {
  std::vector<bool> reused;  // by token of the prompt; the others are the caller's to compute
  std::size_t reused_tokens = 0;
  // The first block that holds a reused token: for PutPath::first_reused_block.
  std::optional<std::uint32_t> first_reused_block;
  std::vector<FetchedRun> runs;  // in the order of the lookup
};

}  // namespace kvtrie
