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
  std::atomic<std::uint64_t> encoded_blocks{0};
  // Of them: at better quality than was wished, for lack of a profile or a level, or of sense in
  // it.
  std::atomic<std::uint64_t> encoded_exact_blocks{0};
  std::atomic<std::uint64_t> decoded_blocks{0};
  std::atomic<std::uint64_t> undecodable_blocks{0};  // came as frames, and were missed for that
  // Frames that fetched blocks were coded against: found in memory, and fetched for them.
  std::atomic<std::uint64_t> reference_hits{0};
  std::atomic<std::uint64_t> reference_misses{0};
  // Blocks that could not be decoded with them, and were fetched again, decoded by the server.
  std::atomic<std::uint64_t> members_fetched_again{0};
  std::atomic<std::uint64_t> local_lane_blocks{
      0};  // of the fetched and stored ones: by shared memory
};

}  // namespace kvtrie
