#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "storage/kv/ids.h"

namespace kvtrie {

// Tokens of one text that are those of an earlier one too.
struct SharedRun {
  std::size_t text = 0;
  std::size_t first_token = 0;
  std::size_t token_count = 0;
  std::size_t earlier_text = 0;
  std::size_t offset = 0;  // of the first of them in the earlier text

  bool operator==(const SharedRun&) const = default;
};

// Runs of at least so many tokens that a text shares with an earlier one behind another prefix; a
// prefix that both have in common is none. By text, then by token; a token is in one run at most,
// the one that was found first. Time and memory in proportion to the tokens, but for texts that
// repeat themselves.
std::vector<SharedRun> FindSharedRuns(std::span<const std::span<const TokenId>> texts,
                                      std::size_t tokens_min);

}  // namespace kvtrie
