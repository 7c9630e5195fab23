#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/rans.h"

namespace kvtrie {

// Frequencies of [table][symbol], as in tests/golden/make_codec.py.
inline const std::vector<std::vector<std::uint16_t>> kGoldenFrequencies = {
    {4096}, {4000, 90, 5, 1}, {1000, 0, 1096, 1983, 17}};

inline RansTables GoldenRansTables() {
  RansTables tables(kGoldenFrequencies.size());
  for (std::size_t t = 0; t < kGoldenFrequencies.size(); ++t) {
    KV_CHECK(tables.Set(t, kGoldenFrequencies[t]).ok());
  }
  return tables;
}

}  // namespace kvtrie
