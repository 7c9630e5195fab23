#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "storage/engine/text_reuse.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// What the engine does and how fast; read once, never changed. The server's flags map to it one to
// one.
struct EngineOptions {
  // Folder of this store; created if it does not exist. One process at a time.
  std::string data_dir;

  // Bound on what `du` shows of data_dir. Eviction keeps below it.
  std::uint64_t disk_limit_bytes = std::uint64_t{16} << 30;
  // False: a full store refuses puts (RESOURCE_EXHAUSTED) instead of dropping what is least worth.
  bool eviction = true;
  std::uint64_t segment_bytes = std::uint64_t{64} << 20;

  // Frames kept in memory. Larger raises the share of gets without disk reads. Keep the sum of the
  // six memory bounds below 80 % of the container's limit.
  std::uint64_t memory_tier_bytes = std::uint64_t{1} << 30;
  // Of it, for frames that are read before they are asked for, those on their way included: of
  // blocks that a lookup leases, and of those likely to follow. At most half of memory_tier_bytes
  // is used; 0: nothing is read ahead. The default is what a disk of 1 GB/s reads in 64 ms: more
  // helps where more than that is looked up, or time passes, before it is fetched.
  std::uint64_t prefetch_bytes = std::uint64_t{64} << 20;
  // Blocks behind those of a lookup are read ahead while all up to there follow with so much
  // probability, in percent, as the store's traffic has it. 100: none are.
  unsigned prefetch_percent_min = 50;
  // Has the system provide that memory at start (in the background) instead of at first use: puts
  // into a fresh server cost half the CPU. Turn it off where other processes should use what this
  // one does not yet.
  bool prefault_memory = true;
  // Tokens of nodes kept in memory (4 bytes per token). A lookup that needs others reads rows from
  // the disk.
  std::uint64_t token_cache_bytes = std::uint64_t{512} << 20;
  // Blocks that puts have begun and not finished.
  std::uint64_t put_memory_bytes = std::uint64_t{256} << 20;
  // Index of nodes; about 100 bytes each. When it is full, least valuable leaves go.
  std::uint64_t index_bytes_max = std::uint64_t{2} << 30;
  // Index of text runs, which finds the same text under another prefix: at most 0.9 byte per token,
  // so the default holds the text of as many blocks of 16 tokens as index_bytes_max does. When it
  // is full, text is found less often. 0: there is none.
  std::uint64_t run_index_bytes = std::uint64_t{320} << 20;

  // Codecs, made of profiles, that are kept to decode blocks for clients that want raw KV. One
  // takes about twice its profile; one more is kept than fits, if it is alone.
  std::uint64_t codec_memory_bytes = std::uint64_t{512} << 20;
  // Threads that decode for those clients. Clients that decode themselves cost the server nothing.
  unsigned decode_threads = 2;

  // Exact blocks of models with a profile get a coded frame of this level beside the exact one, in
  // the background; when space is needed the exact ones go first. nullopt: none do.
  std::optional<Quality> recode_quality;
  // Of one core, at most, for that; while clients wait for the disk or for decoding, none.
  unsigned recode_cpu_percent = 25;
  // False: only Engine::RunRecoding does it; for tests.
  bool recode_in_background = true;

  TextReusePolicy text_reuse;

  // Threads that read and write the disk.
  unsigned io_threads = 4;
  // Requests that may wait for those threads before new ones are refused with UNAVAILABLE.
  std::size_t io_queue_max = 4096;
  // How often acknowledged writes are synced. After a loss of power at most this much is gone.
  std::chrono::milliseconds sync_interval{1000};

  std::chrono::milliseconds lease_max{60'000};
  std::chrono::seconds pin_max{std::chrono::hours{24 * 30}};
  // Cap on bytes that pins may hold, in percent of disk_limit_bytes.
  unsigned pinned_percent_max = 50;
  // Events kept for watchers that fall behind.
  std::size_t event_log_max = 65'536;

  // Surprisal that sessions must share to be a group, in bits; 0 = no groups. 128 is what some 34
  // tokens of text carry: more than a chat template, less than a system prompt.
  std::uint32_t group_threshold_bits = 128;

  // InvalidArgument names the first field that is out of range.
  absl::Status Validate() const;
};

}  // namespace kvtrie
