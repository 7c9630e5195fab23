#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/kv/ids.h"

namespace kvtrie {

// What a token of text costs where nobody said: bits. SmolLM2-135M takes 3.75 on English text;
// arXiv:2604.15356 works with 3.3 to 4.3.
inline constexpr double kPriorBitsPerToken = 3.75;

// Entries of a vocabulary whose size the client did not say.
inline constexpr std::uint32_t kVocabularyTokensAssumed = 1u << 17;

inline constexpr std::uint32_t kTopKMax = 64;

// Probabilities that a client sent with a path (cache.proto, TokenProbabilities): natural
// logarithms as IEEE half floats, ids as u32, all little-endian. Entry i of each is about token i
// of the path, given the tokens before it. A view; what it points to outlives it.
struct TokenProbabilities {
  std::string_view log_probs;           // one per token, or none
  std::uint32_t top_k = 0;              // at most kTopKMax; 0: no distributions
  std::string_view top_token_ids;       // top_k per token
  std::string_view top_log_probs;       // top_k per token
  std::uint32_t vocabulary_tokens = 0;  // 0: kVocabularyTokensAssumed

  bool empty() const { return log_probs.empty() && top_k == 0; }
};

// That they are as long as so many tokens need. InvalidArgument names the field.
absl::Status CheckSizes(const TokenProbabilities& probabilities, std::size_t token_count);

// Surprisal of each full block of a path, I(block | path above) = -sum of log2 P(token | before
// it), in bits (PLT, arXiv:2604.06228). P is the token's own log-probability if that was sent; else
// its place in the distribution; else what the distribution leaves, spread evenly over the rest of
// the vocabulary. Each is more than 0, so that 0 can mean that nothing is known; empty when nothing
// was sent. What single tokens cost is not kept: nothing reads it, and rows would grow by a tenth.
// InvalidArgument names field and token: sizes that do not fit `tokens`; a log-probability that is
// positive or not a number; an id that is twice in a distribution or outside of the vocabulary;
// probabilities whose sum is over 1 by more than half floats can round.
absl::StatusOr<std::vector<float>> BlockSurprisalBits(const TokenProbabilities& probabilities,
                                                      std::span<const TokenId> tokens,
                                                      std::uint32_t block_tokens);

// Of a block of which nothing is known but how many tokens it has.
//
// Traffic is not asked. What the fleet often sends is likely there, but no less surprising as text:
// a prompt that every session begins with would have no surprisal at all, so the largest groups
// would be the first to vanish from the sum, and every put would move the ends of all groups.
// What traffic says is P(next block), see trie_probability.h.
inline float EstimatedSurprisalBits(std::size_t token_count) {
  return static_cast<float>(static_cast<double>(token_count) * kPriorBitsPerToken);
}

// Value of an IEEE half float.
float HalfToFloat(std::uint16_t half);

}  // namespace kvtrie
