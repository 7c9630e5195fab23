#pragma once

#include <cstdint>
#include <vector>

namespace kvtrie {

// The quantizer of 2^bits levels that is best, in mean squared error, for one component of a unit
// vector of `dim` dimensions with a random direction (Lloyd 1982, Max 1960; the density is that of
// arXiv:2504.19874, lemma 1). It is symmetric: the codewords are those of the magnitude, ascending;
// bounds[i] is where codeword i + 1 begins. With one dimension, where each component is 1 or
// -1, all codewords are 1.
struct LloydMaxCodebook {
  std::vector<float> codewords;  // 2^(bits - 1)
  std::vector<float> bounds;     // one less
};

// Takes some milliseconds. REQUIRES: dim >= 1, bits 1 to 6.
LloydMaxCodebook MakeLloydMaxCodebook(std::uint32_t dim, std::uint32_t bits);

}  // namespace kvtrie
