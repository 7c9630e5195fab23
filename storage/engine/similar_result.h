#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "storage/kv/ids.h"
#include "storage/kv/path.h"

namespace kvtrie {

// Which sessions are nearest to a text; see cache.proto, Similar.
struct SimilarRequest {
  PathView path;
  std::uint32_t session_count = 8;  // at most so many in the answer
};

struct SharedRun {
  std::uint32_t first_token = 0;  // in the request
  std::uint32_t token_count = 0;
  TrieNodeId node;           // that holds its first token
  std::uint32_t offset = 0;  // of it in that node's block
  double bits = 0;
};

struct NearSession {
  TrieNodeId end;                        // its last block
  std::vector<std::string> session_ids;  // that end there; empty: none has a name
  std::uint32_t blocks = 0;
  std::uint32_t shared_prefix_blocks = 0;
  double shared_prefix_bits = 0;
  std::uint32_t shared_run_tokens = 0;
  double shared_run_bits = 0;
  std::vector<SharedRun> runs;  // longest first
};

struct SimilarResult {
  std::vector<NearSession> sessions;  // nearest first
  std::uint32_t matched_blocks = 0;   // of the request's own prefix
  std::uint32_t block_tokens = 0;
  bool is_complete = true;  // false: a bound on work was reached, nearer ones may be missing
};

}  // namespace kvtrie
