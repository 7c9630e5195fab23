#pragma once

#include <atomic>
#include <cstdint>

namespace kvtrie {

// What a client has met since it was made. Counters only rise. Thread-safe.
struct ClientStats {
  std::atomic<std::uint64_t> calls{0};         // Fetch of many blocks is one
  std::atomic<std::uint64_t> failed_calls{0};  // ended without what was asked for, misses aside
  std::atomic<std::uint64_t> retries{0};
  std::atomic<std::uint64_t> damaged_blocks{0};  // a checksum did not match
  std::atomic<std::uint64_t> fetched_bytes{0};
  std::atomic<std::uint64_t> local_lane_blocks{
      0};  // of the fetched and stored ones: by shared memory
};

}  // namespace kvtrie
