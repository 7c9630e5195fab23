#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/lanes.h"

namespace kvtrie {

struct MixedStep {
  std::uint32_t table[kLanes];  // with which the lanes of `symbols` are coded
  std::uint32_t symbol[kLanes];
  std::uint32_t bit_count[kLanes];
  std::uint32_t bits[kLanes];
  LaneMask symbols;
  LaneMask raw;
};

// Records each step, first its symbols and then its bits: 32 records a step.
using RecordMixed = void(const std::uint32_t* tables, const MixedStep* steps, std::size_t count,
                         std::uint32_t* records);
RecordMixed RecordMixedBaseline, RecordMixedAvx2, RecordMixedAvx512;

// The first check that fails; nullptr when none does. `bytes` is what the records became.
using CheckLanes = const char*(const std::uint32_t* tables, const MixedStep* steps,
                               std::size_t count, const void* bytes, std::size_t byte_count);
CheckLanes CheckLanesBaseline, CheckLanesAvx2, CheckLanesAvx512;

}  // namespace kvtrie
