#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/path_encoder.h"
#include "client/put_types.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// Size of the pieces in which a block of this geometry is sent: those of a stored frame (no piece
// spans two layers), so that a server can keep the checksums as they are.
std::vector<std::uint32_t> PutChunkBytes(const KvGeometry& geometry);

// Where one PutPath stands, over one or more attempts: which blocks are acknowledged, which the
// server wants. No I/O. Not thread-safe.
class PutProgress {
 public:
  // `path` and `geometry` outlive this. Blocks of the wrong size, or without tokens, fail at once,
  // as does what follows them. With a codec, raw blocks are sent as its frames, made on so many
  // threads when the server wants them; against references that `references_of` gives, if it is set
  // and the path wants so.
  PutProgress(const PutPath& path, const KvGeometry& geometry,
              std::shared_ptr<const FrameCodec> codec = nullptr, int coding_threads = 1,
              PathEncoder::ReferencesOf references_of = nullptr);

  // A new attempt. The announcement that starts it; blocks that were acknowledged are not sent
  // again.
  v1::PutAnnounce Announce(std::uint64_t put_id);
  // Blocks (indexes in `path.blocks`) to send now; grows with an eager announcement and with a
  // plan.
  std::deque<std::uint32_t>& to_send() { return to_send_; }
  const std::deque<std::uint32_t>& to_send() const { return to_send_; }

  void Accept(const v1::PutPlan& plan);
  void Accept(const v1::PutAck& ack);
  void Accept(const v1::PutDone& done);

  bool done() const { return unsettled_ == 0; }
  // Some block failed in a way that a later attempt may mend.
  bool blocks_to_retry() const { return blocks_to_retry_; }
  bool attempt_done() const { return attempt_done_; }

  void FailRest(const absl::Status& why);

  const PutPath& path() const { return path_; }
  // What blocks were coded against in vain: what the client keeps of it may be of yesterday.
  std::span<const TrieNodeId> refused_references() const { return refused_references_; }
  // What is sent of the first block of to_send().
  std::span<const std::byte> SendingBytes();
  // Size of the chunk that begins at `offset`, where one of block i (in `path.blocks`) does.
  std::uint32_t ChunkBytesAt(std::uint32_t i, std::size_t offset) const;
  std::uint32_t block_index(std::uint32_t i) const { return path_.first_block + i; }

  PutReport TakeReport();

 private:
  bool sends_frames() const { return encoder_.has_value() || path_.form == BlockForm::kFrame; }
  bool HasRightSize(std::size_t bytes) const;
  void Settle(std::uint32_t i, absl::Status status, bool duplicate);

  const PutPath& path_;
  const KvGeometry& geometry_;
  // Whether the server is asked what blocks can be coded against.
  bool asks_for_references() const;

  std::optional<PathEncoder> encoder_;
  PathEncoder::ReferencesOf references_of_;       // null: none are wanted (any more)
  const std::vector<std::uint32_t> chunk_bytes_;  // of raw blocks
  std::vector<std::size_t> chunk_offsets_;        // of raw blocks
  std::vector<PutBlockReport> blocks_;
  std::vector<bool> settled_;
  std::vector<bool> missing_;  // as the last plan had it
  std::size_t offered_;        // blocks that pass the checks
  std::size_t unsettled_;
  std::deque<std::uint32_t> to_send_;
  int attempts_ = 0;
  bool eager_ = false;
  bool planned_ = false;
  bool attempt_done_ = false;
  bool blocks_to_retry_ = false;
  std::vector<TrieNodeId> refused_references_;
  bool coded_anew_ = false;  // since the last announcement: its failures are of frames before that
};

}  // namespace kvtrie
