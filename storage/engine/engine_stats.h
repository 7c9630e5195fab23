#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "storage/kv/quality.h"

namespace kvtrie {

// Stored frames of one codec.
struct CodecUsage {
  CodecId codec = CodecId::kRaw;
  std::uint64_t frames = 0;
  std::uint64_t bytes = 0;
};

// Counts and sizes of the engine at one moment. Counters (…_total) never fall while the process
// lives.
struct EngineStats {
  // Lookups, in requests, blocks asked for and blocks found.
  std::uint64_t lookups_total = 0;
  std::uint64_t lookup_blocks_total = 0;
  std::uint64_t lookup_hit_blocks_total = 0;
  // Frames read.
  std::uint64_t memory_reads_total = 0;
  std::uint64_t disk_reads_total = 0;
  std::uint64_t disk_read_bytes_total = 0;
  // Frames that were read before they were asked for. Of them, those that were read from memory
  // then; and those that were not, and have left it.
  std::uint64_t prefetched_frames_total = 0;
  std::uint64_t prefetched_bytes_total = 0;
  std::uint64_t prefetch_useful_frames_total = 0;
  std::uint64_t prefetch_useful_bytes_total = 0;
  std::uint64_t prefetch_wasted_frames_total = 0;
  std::uint64_t prefetch_wasted_bytes_total = 0;
  std::uint64_t missed_reads_total = 0;    // named by a client, not stored (any more)
  std::uint64_t corrupt_frames_total = 0;  // failed their check; dropped, never served
  std::uint64_t read_errors_total = 0;
  std::uint64_t decoded_blocks_total = 0;
  std::uint64_t undecoded_blocks_total = 0;  // asked for raw, and there is no decoder here
  std::uint64_t decode_errors_total = 0;     // of them:
  std::uint64_t undecodable_frames_total =
      0;                                     // damaged in a way that only a decoder finds; dropped
  std::uint64_t missing_profiles_total = 0;  // blocks whose profile is not stored
  std::uint64_t unusable_profiles_total =
      0;                               // blocks whose profile cannot be read, or does not fit
  std::uint64_t codec_hits_total = 0;  // codecs, made of profiles: found in memory
  std::uint64_t codec_builds_total = 0;
  std::uint64_t damaged_profiles_total = 0;  // failed their check; dropped, never served
  // Blocks put: attempted = stored + duplicate + failed.
  std::uint64_t put_blocks_total = 0;
  std::uint64_t stored_blocks_total = 0;
  std::uint64_t duplicate_blocks_total = 0;
  std::uint64_t failed_blocks_total = 0;
  std::uint64_t stored_bytes_total = 0;  // frame bytes accepted
  std::uint64_t raw_bytes_total = 0;     // what they are raw
  // What went.
  std::uint64_t evicted_blocks_total = 0;
  std::uint64_t evicted_frames_total = 0;  // of blocks that kept another one
  std::uint64_t evicted_bytes_total = 0;
  std::uint64_t expired_blocks_total = 0;
  std::uint64_t deleted_blocks_total = 0;
  std::uint64_t refused_full_total = 0;
  std::uint64_t similar_queries_total = 0;
  std::uint64_t similar_cut_short_total = 0;  // of them: reached a bound on work
  // Lookups that allowed text reuse; of them, those that may not have it; tokens that were offered.
  std::uint64_t text_reuse_lookups_total = 0;
  std::uint64_t text_reuse_forbidden_total = 0;
  std::uint64_t text_reuse_offered_tokens_total = 0;
  std::uint64_t forgotten_runs_total = 0;  // pieces of text that a full run index forgot
  std::uint64_t token_cache_misses_total = 0;
  std::uint64_t syncs_total = 0;
  std::uint64_t sync_errors_total = 0;
  // Blocks that were coded against others, which were to go: coded anew, or lost with them.
  std::uint64_t detached_blocks_total = 0;
  std::uint64_t lost_members_total = 0;
  // Exact blocks that got a coded frame in the background.
  std::uint64_t recoded_blocks_total = 0;
  std::uint64_t recoded_raw_bytes_total = 0;
  std::uint64_t recoded_bytes_total = 0;         // of the coded frames
  std::uint64_t recode_failed_blocks_total = 0;  // could not be, and are not tried again
  std::uint64_t refined_blocks_total = 0;  // of recoded ones: finer, to be references of others
  std::uint64_t recoded_again_blocks_total = 0;  // had been coded alone before their reference came

  // Now.
  std::uint64_t model_count = 0;
  std::uint64_t node_count = 0;
  std::uint64_t live_bytes = 0;      // frames of published nodes
  std::uint64_t raw_live_bytes = 0;  // what they are raw
  std::uint64_t profile_count = 0;
  std::uint64_t profile_bytes = 0;
  std::uint64_t codec_count = 0;  // made of profiles, in memory
  std::uint64_t codec_bytes = 0;
  std::uint64_t disk_bytes = 0;  // what du shows
  std::uint64_t disk_limit_bytes = 0;
  std::uint64_t segment_count = 0;
  std::uint64_t memory_tier_bytes = 0;
  std::uint64_t memory_tier_limit_bytes = 0;
  std::uint64_t prefetch_unasked_bytes = 0;  // of it, read ahead and not asked for yet
  std::uint64_t prefetch_pending_bytes = 0;  // about to be read ahead
  std::uint64_t prefaulted_bytes = 0;        // of it, taken from the system before its first use
  std::uint64_t index_bytes = 0;
  std::uint64_t token_cache_bytes = 0;
  std::uint64_t run_index_bytes = 0;
  std::uint64_t run_index_entries = 0;
  std::uint64_t named_sessions = 0;
  std::uint64_t group_count = 0;       // of sessions
  std::uint64_t group_bytes = 0;       // what they take of memory, at most
  std::uint64_t put_memory_bytes = 0;  // begun, not finished
  std::uint64_t open_puts = 0;
  std::uint64_t lease_count = 0;
  std::uint64_t reference_count = 0;  // pairs of a block and one that it was coded against
  std::uint64_t pin_count = 0;
  std::uint64_t pinned_bytes = 0;
  // Exact ones without a coded frame, and those with one that may get a smaller; 0 while it is off.
  std::uint64_t recode_waiting_blocks = 0;
  std::uint64_t pending_free_bytes = 0;  // unlinked, not given back yet
  std::uint64_t io_queue_length = 0;
  std::uint64_t decode_queue_length = 0;

  // Why the store does not serve in full; empty when all is well ("disk full", "disk read-only",
  // ...).
  std::vector<std::string> degraded;

  std::vector<CodecUsage> codecs;   // of kAllCodecs
  double decode_seconds_total = 0;  // over all threads
  double recode_seconds_total = 0;
};

}  // namespace kvtrie
