#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// How the time that clients take to compute KV differs between models from what RecomputeCost makes
// of their specs. Each model has a running mean of what was reported, of its logarithm; a report
// moves it little, however wrong it is. What counts is a model's mean against that of all models
// that were measured, within a bound: so a client that is wrong about a model, or lies, skews what
// its blocks are worth by kRatioMax at most.
//
// const calls are safe beside each other.
class ComputeSpeeds {
 public:
  // What models may differ by beyond their specs: several generations of hardware.
  static constexpr double kRatioMax = 16;

  // REQUIRES: finite, above 0.
  void Report(ModelSlot model, double seconds_per_flop);

  // Seconds per operation, 1 being the mean of the measured models; 1 for those that were not.
  double Relative(ModelSlot model) const;

 private:
  struct Mean {
    double log_seconds = 0;
    std::uint32_t reports = 0;
  };
  absl::flat_hash_map<ModelSlot, Mean> means_;
  double sum_ = 0;  // of log_seconds
};

}  // namespace kvtrie
