#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/frame.h"
#include "storage/codec/reference_table.h"
#include "storage/kv/ids.h"
#include "storage/kv/path.h"
#include "storage/kv/quality.h"
#include "storage/payload/payload_store.h"
#include "storage/trie/surprisal.h"

namespace kvtrie {

// A stored frame that those of a put may be coded against.
struct OfferedReference {
  TrieNodeId node;
  Rung rung = Rung::kCoded;
  // Where the frame lies whose KV it was. None: as it is when the put begins.
  PayloadLocation at = {};
};

// What of a block stands elsewhere too, in frames that it may be coded against.
struct BlockReferences {
  std::vector<TrieNodeId> nodes;
  std::vector<ReferenceRun> runs;  // into `nodes`; ascending, apart from each other
};

// How blocks of a path are best coded at a level.
struct CodingPlan {
  Quality level = Quality::kHigh;
  std::map<std::uint32_t, BlockReferences> references;  // by block
  // Blocks whose text stands in several places, and in none that they could be coded against: coded
  // finer, they are the references of what comes.
  std::set<std::uint32_t> finer_blocks;
  Quality finer_level = Quality::kNearExact;
  std::vector<TrieNodeId> elsewhere;  // blocks that hold text of finer_blocks, in order of paths
};

// What a client wants to store: a path, and how it came about (cache.proto, PutAnnounce).
struct PutAnnouncement {
  PathView path;
  std::uint32_t first_block = 0;
  std::string_view session_id;
  TokenProbabilities probabilities;  // of the path's tokens; may be empty
  std::uint32_t restored_blocks = 0;
  Quality restored_quality = Quality::kExact;
  // KV from this block on was reused from other text, or computed on such; nullopt: none was.
  std::optional<std::uint32_t> first_reused_block = {};
  // What will come is at least so good. What is stored at less is missing, what is stored at that
  // or better is a duplicate.
  Quality quality = Quality::kExact;
  // What has no coded frame so good is missing, whatever else is stored of it.
  bool beside_exact = false;
  // Adds frames to nodes that are there, each on its own; those that are gone by then stay gone
  // (NotFound).
  bool only_existing = false;
  // Frames that those that come may be coded against. They are not evicted while the put lasts; a
  // block that was coded against one that is another frame by then fails.
  std::vector<OfferedReference> references = {};
  // Replaces coded frames of this very quality where what comes is smaller. For the engine's own
  // use.
  bool replaces_larger = false;
  // Offers those that there are, beside these: PutSession::coding_plan says which.
  bool want_references = false;
  // Replaces a coded frame that was coded against others, by one that is served at no more than
  // this. For the engine's own use.
  std::optional<Quality> detaches_at = {};
  bool durable = false;
  std::chrono::seconds ttl{0};
  std::uint32_t priority = 0;
  // That the missing blocks took to compute, mean over them; 0 = not known.
  double compute_seconds_per_token = 0;
};

inline constexpr double kComputeSecondsPerTokenMin = 1e-9;
inline constexpr double kComputeSecondsPerTokenMax = 1000;
// Of a value that is not 0; false for NaN.
inline constexpr bool IsComputeSecondsPerToken(double seconds) {
  return seconds >= kComputeSecondsPerTokenMin && seconds <= kComputeSecondsPerTokenMax;
}

enum class PutOutcome { kStored, kDuplicate };

struct PutBlockResult {
  TrieNodeId node;
  PutOutcome outcome = PutOutcome::kStored;
};

// One block while its bytes arrive: they are copied once, into the memory that is written to disk
// and then served from. Not thread-safe. Dropping it forgets the block.
class BlockWriter {
 public:
  virtual ~BlockWriter() = default;

  std::uint32_t block_index() const { return block_index_; }
  // Bytes that the client will send: of the raw block, or of the frame.
  std::uint64_t total_bytes() const { return total_bytes_; }
  std::uint64_t received_bytes() const { return received_bytes_; }
  bool complete() const { return received_bytes_ == total_bytes_; }

  // Appends a chunk, given as the pieces in which it lies in memory, and checks it against
  // `crc32c`. InvalidArgument: the checksum differs, or more bytes than announced; the block is
  // lost then.
  virtual absl::Status AppendChunk(std::span<const std::span<const std::byte>> pieces,
                                   std::uint32_t crc32c) = 0;

 protected:
  BlockWriter(std::uint32_t block_index, std::uint64_t total_bytes)
      : block_index_(block_index), total_bytes_(total_bytes) {}

  const std::uint32_t block_index_;
  const std::uint64_t total_bytes_;
  std::uint64_t received_bytes_ = 0;
};

// One announced put. What it has not published vanishes with it; what hangs on it in callbacks
// still comes. Thread-safe but for the writers that it hands out.
class PutSession {
 public:
  virtual ~PutSession() = default;

  // Blocks from `first_block` on that are wanted, ascending.
  virtual const std::vector<std::uint32_t>& missing_blocks() const = 0;
  virtual std::uint32_t block_count() const = 0;
  virtual std::uint32_t ignored_tail_tokens() const = 0;
  virtual std::uint64_t raw_block_bytes() const = 0;

  // How the missing blocks are best coded, with PutAnnouncement::want_references.
  virtual const CodingPlan& coding_plan() const = 0;

  // True: already stored, nothing to send.
  virtual bool IsStored(std::uint32_t block_index, TrieNodeId* node) const = 0;

  // Begin a block of raw KV, or a frame of which `head` is the beginning. So many bytes of the
  // engine's put budget have been taken by the caller and stay taken until the writer has been
  // finished or dropped (the caller gives them back). InvalidArgument: the block is outside of the
  // put, begun twice, has the wrong size, or the frame is not one of this put's.
  virtual absl::StatusOr<std::unique_ptr<BlockWriter>> StartBlock(std::uint32_t block_index,
                                                                  std::uint64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<BlockWriter>> StartFrame(std::uint32_t block_index,
                                                                  const FrameView& head) = 0;

  // Writes and publishes complete blocks and calls back once for each. A block is published after
  // all before it; if one of those fails, so does this (FailedPrecondition). A frame that is not
  // what it should be fails with InvalidArgument; FailedPrecondition: its profile is not stored
  // here. Blocks of one call are
  // written one after the other and published together where they can be: cheaper for each, later
  // for the first.
  using DoneCallback = std::function<void(absl::StatusOr<PutBlockResult>)>;
  struct FinishedBlock {
    std::unique_ptr<BlockWriter> writer;
    DoneCallback on_done;
  };
  virtual void FinishBlocks(std::vector<FinishedBlock> blocks) = 0;
  void FinishBlock(std::unique_ptr<BlockWriter> writer, DoneCallback on_done) {
    std::vector<FinishedBlock> blocks;
    blocks.push_back({std::move(writer), std::move(on_done)});
    FinishBlocks(std::move(blocks));
  }

  // The client will not send this block: those that wait for it fail.
  virtual void AbandonBlock(std::uint32_t block_index) = 0;
};

}  // namespace kvtrie
