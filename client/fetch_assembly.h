#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/fetch_types.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// Puts the answers of one Fetch, over one or more attempts, into the caller's memory: checks each
// chunk while it copies it, knows what is still to be asked for, and reports layers. No I/O. Not
// thread-safe.
//
// A block is loaded only when all of its bytes have passed their check. Bytes that were checked in
// one attempt are not written again in the next.
class FetchAssembly {
 public:
  // Where the bytes that arrive go.
  enum class Into {
    kTargets,  // the targets' memory
    kFrames,   // memory of this object, as frames of at most the targets' raw size and a header
  };
  // `targets` outlive this. With `options.on_layer`, into targets, `geometry` is the model's.
  FetchAssembly(std::span<const FetchTarget> targets, const FetchOptions& options,
                const KvGeometry* geometry, Into into = Into::kTargets);

  // Targets that are neither loaded nor missed; at most `limit`. Block indexes of the answers count
  // in this list, until the next attempt.
  std::span<const std::uint32_t> StartAttempt(std::size_t limit);

  // Takes one message; `pieces` are its bulk bytes.
  // Errors: Internal when the message contradicts the protocol; the attempt is to be ended.
  absl::Status Accept(const v1::FetchResponse& message,
                      std::span<const std::span<const std::byte>> pieces);

  // For blocks that were written into the target's memory by someone else: checks them in place.
  absl::Status AcceptInPlace(const v1::BlockResult& result,
                             std::span<const v1::Chunk* const> chunks);

  // Every block of this attempt has been answered in full.
  bool attempt_complete() const { return open_in_attempt_ == 0; }
  bool done() const { return pending_ == 0; }

  // What is not loaded is missed for this reason.
  void FailRest(const absl::Status& why);
  void FailBlock(std::uint32_t target_index, absl::Status why);
  // The same for a block that may be loaded.
  void RejectBlock(std::uint32_t target_index, absl::Status why);

  // What becomes of a target, so far.
  const FetchedBlock& block(std::uint32_t target_index) const { return blocks_[target_index]; }
  bool into_frames() const { return into_ == Into::kFrames; }
  // Into frames: the memory of one, and how much of it, from the front, is there and has passed its
  // check.
  std::span<const std::byte> frame(std::uint32_t target_index) const;
  std::uint64_t verified_bytes(std::uint32_t target_index) const {
    return progress_[target_index].verified_bytes;
  }
  // From now on no other frame takes the place of this one: should another come, the block is
  // missed.
  void KeepFrame(std::uint32_t target_index) { progress_[target_index].keep_frame = true; }
  void DropFrame(std::uint32_t target_index) { progress_[target_index].frame.reset(); }
  // Into frames: the memory of one, for the caller to keep.
  std::unique_ptr<std::byte[]> TakeFrame(std::uint32_t target_index) {
    return std::move(progress_[target_index].frame);
  }

  // With the raw size of what was decoded of frames.
  FetchReport TakeReport();

  std::uint64_t damaged_blocks() const { return damaged_blocks_; }
  std::uint64_t accepted_bytes() const { return accepted_bytes_; }
  std::size_t pending_blocks() const { return pending_; }
  const FetchTarget& target(std::uint32_t target_index) const { return targets_[target_index]; }

 private:
  struct Progress {
    std::uint64_t total_bytes = 0;
    std::uint64_t verified_bytes = 0;  // a prefix of the block, in the target's memory
    std::uint64_t attempt_bytes = 0;   // a prefix, received in this attempt
    std::uint32_t layers = 0;          // whole layers in verified_bytes
    std::uint32_t damaged_count = 0;
    bool answered = false;  // in this attempt
    bool open = false;      // in this attempt: more is to come
    std::unique_ptr<std::byte[]> frame;
    bool keep_frame = false;
  };

  bool MakeRoom(std::uint32_t target_index, std::uint64_t bytes);
  // Another frame has come than in an earlier attempt.
  void StartFrameAnew(std::uint32_t target_index);
  std::byte* MemoryOf(std::uint32_t target_index) {
    return into_frames() ? progress_[target_index].frame.get() : targets_[target_index].raw.data();
  }
  absl::Status AcceptResult(const v1::BlockResult& result);
  void Advance(std::uint32_t target_index, std::uint64_t end_bytes);
  void Damaged(std::uint32_t target_index);
  void CloseInAttempt(Progress& progress);
  void ReportLayers();

  const std::span<const FetchTarget> targets_;
  const FetchOptions& options_;
  const KvGeometry* const geometry_;
  const Into into_;

  std::vector<FetchedBlock> blocks_;
  std::vector<Progress> progress_;
  std::vector<std::uint32_t> attempt_;      // target indexes
  std::vector<std::uint32_t> layer_lacks_;  // per layer: blocks that neither have it nor are missed
  std::uint32_t next_layer_ = 0;
  std::uint32_t first_pending_ = 0;  // none before it is pending
  std::size_t pending_;
  std::size_t open_in_attempt_ = 0;
  std::uint64_t damaged_blocks_ = 0;
  std::uint64_t accepted_bytes_ = 0;
};

}  // namespace kvtrie
