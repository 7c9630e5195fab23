#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvtrie {

// Surprisal of each full block of a path, I(block | path above) = -sum of log2 P(token | before
// it), in bits (PLT, arXiv:2604.06228), from natural log-probabilities given as IEEE half floats,
// one per token. Tokens whose log-probability is NaN, positive or infinite count nothing. Result:
// one float per full block; empty when `log_probs_f16` is.
std::vector<float> BlockSurprisalBits(std::span<const std::uint16_t> log_probs_f16,
                                      std::uint32_t block_tokens);

// Value of an IEEE half float.
float HalfToFloat(std::uint16_t half);

}  // namespace kvtrie
