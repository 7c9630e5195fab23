#pragma once

#include <cstdint>
#include <vector>

#include "storage/kv/model_spec.h"

namespace kvtrie {

// What it costs to compute the KV of a block again, in floating point operations. An estimate from
// what a ModelSpec says: it knows neither the weights nor the query heads of the model, so both are
// taken from the width that its kinds have in common. A layer of width D has 12 D^2 weights
// (attention 4, feed-forward 8), at two operations per token each; attention costs 4 D for each
// position that a token sees, which sliding windows bound. D is 4 times that of K (queries share KV
// heads), and at least 1,024. Costs of one model compare well with each other, those of different
// models within a factor of a few.
//
// Immutable, so thread-safe.
class RecomputeCost {
 public:
  explicit RecomputeCost(const ModelSpec& spec);

  // Of block number `depth` of a path, which counts from 1.
  double BlockFlops(std::uint32_t depth) const;

 private:
  struct Span {
    double attention_flops;  // per token and position that it sees
    double window_tokens;    // 0: all before it
  };
  double block_tokens_;
  double weight_flops_ = 0;  // per token
  std::vector<Span> spans_;  // of the spec's KV groups
};

}  // namespace kvtrie
