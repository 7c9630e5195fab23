#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvtrie::bench {

// Place of a block in RequestTrace::blocks.
using BlockIndex = std::uint32_t;
inline constexpr BlockIndex kNoBlock = 0xffffffffu;

// A block of tokens under its parent: two prompts share one where all their tokens up to its end
// are equal.
struct TraceBlock {
  BlockIndex parent = kNoBlock;  // kNoBlock: it begins a prompt
  std::uint32_t depth = 1;
};

struct TraceRequest {
  double seconds = 0;               // when it comes
  std::uint32_t prompt_blocks = 0;  // of `path`, that are looked up
  std::vector<BlockIndex> path;     // prompt and answer: all of it is put
};

// What clients ask of a store, in the order of time. Deterministic: equal arguments give equal
// traces on every machine.
struct RequestTrace {
  std::string name;
  std::uint32_t block_tokens = 0;
  std::vector<TraceBlock> blocks;
  std::vector<TraceRequest> requests;

  // Time to compute a block again, by the cost model of the tables: 50 us per token (a model of 8
  // billion parameters on one accelerator), and as much again at token 6,144 for its attention.
  double RecomputeSeconds(BlockIndex block) const {
    const double middle_token = (blocks[block].depth - 0.5) * block_tokens;
    return block_tokens * 50e-6 * (1 + middle_token / 6144);
  }
};

// Numbers that traces of one kind differ in. Policies are tuned on other shapes and seeds than
// those that are reported.
struct TraceShape {
  double think = 1;     // times between the requests of a session
  double blocks = 1;    // sizes of messages and documents
  double zipf = 0.9;    // exponent of the popularity of documents
  double arrivals = 1;  // rate at which sessions come
  double size = 1;      // of the trace: how many sessions
};

// chat       sessions of several turns under shared system prompts, with heavy-tailed think times
// agents     long shared system prompts, tool results every few seconds, retries that branch,
// parallel samples documents  documents asked about under several templates, Zipf popularity that
// drifts scans      a working set of documents, and sweeps of long prompts that never come again
// bursts     chat, and documents that many ask about for some minutes and nobody after
// mixed      all of them at once, and prompts that never come again all the time
//
// Times between the turns of a chat (median two minutes, 5 % over ten), and that three in four
// blocks of `mixed` come once, are as in the conversation trace that Mooncake publishes.
std::vector<std::string> SyntheticTraceNames();
// InvalidArgument: no trace of this name.
absl::StatusOr<RequestTrace> MakeSyntheticTrace(std::string_view name, std::uint64_t seed,
                                                const TraceShape& shape);

// Reads requests as JSON objects, one a line, with `timestamp` (ms), `input_length`, and `hash_ids`
// that each name 512 tokens together with all before them: the form of the traces that Mooncake
// publishes (FAST '25). Only prompts are in it, so only prompts are put. At most `requests_max`
// lines.
absl::StatusOr<RequestTrace> ReadHashIdTrace(const std::string& path, std::size_t requests_max);

}  // namespace kvtrie::bench
