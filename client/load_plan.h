#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtrie/v1/cache.pb.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// What an engine takes to compute tokens: the work that each costs, and what each costs for every
// token that stands before it (attention).
struct PrefillCost {
  double seconds_per_token = 0;
  double seconds_per_token_pair = 0;

  bool is_known() const { return seconds_per_token > 0 || seconds_per_token_pair > 0; }
  // Of `tokens` tokens behind `context_tokens` others.
  double Seconds(std::uint64_t tokens, std::uint64_t context_tokens) const;
};

// What loading costs a client, beside what the server says of itself. Zero: not measured, and taken
// for nothing.
struct LoadCost {
  double seconds_per_byte = 0;  // that travels
  // Of a stored frame of each codec, where this process decodes; as wide as it decodes.
  std::array<double, std::size(kAllCodecs)> decode_seconds_per_token{};
  // The server decodes: raw KV travels.
  bool server_decodes = false;
  // Of blocks that were coded against others, raw KV travels whoever decodes the rest.
  bool server_decodes_members = false;

  double& DecodeSecondsPerToken(CodecId codec) {
    return decode_seconds_per_token[static_cast<std::size_t>(codec) - 1];
  }
};

// A prompt of which a Lookup has found the beginning.
struct PlannedPrompt {
  std::uint64_t tokens = 0;
  std::uint32_t block_tokens = 0;
  std::uint64_t raw_block_bytes = 0;  // over all model ids of the Lookup
};

struct LoadPlan {
  std::uint32_t load_blocks = 0;  // from the first one on; what follows is to be computed
  double load_seconds = 0;        // expected
  double prefill_seconds = 0;     // of all tokens behind them
};

// How many of the stored blocks to load for the prompt to be ready soonest: the number for which
// loading them, and computing the rest behind them, takes least; of equal ones the most. The
// server's work (reading, decoding) and the client's (receiving, decoding) overlap, so the longer
// of the two counts. Without a known prefill cost all are loaded. A pure function; time grows with
// the number of blocks. REQUIRES: the runs follow each other from block 0 on, and codecs are ours.
LoadPlan PlanLoad(std::span<const v1::BlockRun* const> runs, const PlannedPrompt& prompt,
                  const LoadCost& load, const PrefillCost& prefill);

}  // namespace kvtrie
