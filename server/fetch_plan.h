#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/base/byte_budget.h"
#include "storage/engine/engine.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// How the frames of a fetch are read.
ReadAs ReadAsOf(const v1::FetchRequest& request);

// What a Fetch wants of each block.
struct FetchShape {
  bool layer_major = false;
  bool whole_frame = false;  // ENCODING_FRAME
  ReadAs read_as = ReadAs::kRaw;
  // Layers [first_layer, first_layer + layer_count); a count of 0 with no geometry = the whole
  // block.
  std::uint32_t first_layer = 0;
  std::uint32_t layer_count = 0;
  std::shared_ptr<const KvGeometry> geometry;  // set when layers matter

  // True when the request can be answered without knowing where layers lie.
  static bool NeedsGeometry(const v1::FetchRequest& request);
  // REQUIRES: CheckFetch passed; geometry is set if NeedsGeometry.
  // InvalidArgument: the layers are not the model's.
  static absl::StatusOr<FetchShape> Make(const v1::FetchRequest& request,
                                         std::shared_ptr<const KvGeometry> geometry);
};

// One visit to one block. A layer-major fetch visits each block once per layer.
struct FetchStep {
  std::uint32_t block_index = 0;
  std::uint32_t first_layer = 0;
  std::uint32_t layer_count = 0;  // 0 = the whole block
  bool first_visit = true;
  bool last_visit = true;
};

// The visits of a fetch, in the order in which their bytes are sent.
class FetchSteps {
 public:
  FetchSteps() = default;
  FetchSteps(const FetchShape& shape, std::size_t block_count);

  std::size_t size() const { return block_count_ * visits_per_block_; }
  FetchStep operator[](std::size_t index) const;

 private:
  std::size_t block_count_ = 0;
  std::size_t visits_per_block_ = 1;
  std::uint32_t first_layer_ = 0;
  std::uint32_t layer_count_ = 0;
};

// A frame while a response needs it, with what it takes of the server's memory for streams.
struct HeldFrame {
  LoadedFrame loaded;
  ByteReservation reservation;
};

// Walks over the bytes of one visit, chunk by chunk. A chunk is one section of the frame with the
// checksum that is stored with it; of a whole frame the header is the first chunk. A layer-major
// visit to a whole frame has the sections that its layer needs and no earlier one has brought:
// none, often.
class ChunkCursor {
 public:
  ChunkCursor() = default;
  // REQUIRES: the frame was read as shape.read_as.
  // DataLoss: sections do not meet the bounds of the layers, or do not say which layers they have.
  static absl::StatusOr<ChunkCursor> Make(const FrameView& frame, const FetchShape& shape,
                                          const FetchStep& step);

  bool AtEnd() const { return header_done_ && section_ == section_end_; }
  std::uint32_t chunk_bytes() const;
  // Writes the chunk at the cursor (all but block_index) and where its bytes begin in the frame.
  void Read(v1::Chunk* chunk, std::size_t* frame_offset) const;
  void Advance();

 private:
  absl::Status CutForLayers(const FetchShape& shape, const FetchStep& step);

  const FrameView* frame_ = nullptr;
  bool header_done_ = true;
  std::size_t section_ = 0;
  std::size_t section_end_ = 0;
  std::uint64_t body_offset_ = 0;  // of the section at the cursor
  std::uint64_t offset_of_body_ =
      0;  // what chunk offsets count from: 0 raw, the header's size for frames
};

// Size of a block in the encoding of the request.
std::uint64_t BlockBytes(const FrameView& frame, const FetchShape& shape);

// A FetchResponse in the making: the message proper, and the runs of frame bytes that follow it.
class FetchMessage {
 public:
  struct Run {
    std::shared_ptr<const HeldFrame> frame;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };

  // Data per message that is aimed at; one chunk more at most.
  static constexpr std::size_t kTargetBytes = std::size_t{1} << 20;
  // Results (of misses, which have no data) per message.
  static constexpr int kResultsMax = 4096;

  void Clear();
  bool empty() const { return header_.blocks_size() == 0 && header_.chunks_size() == 0; }
  bool full() const {
    return full_ || bytes_ >= kTargetBytes || header_.blocks_size() >= kResultsMax;
  }

  void AddFailure(std::uint32_t block_index, const absl::Status& status);
  // `codec`: as the reader is told. `tokens`: of the block, if wanted.
  void AddBlock(std::uint32_t block_index, const StoredFrame& stored, CodecId codec,
                std::uint64_t block_bytes, std::span<const TokenId> tokens = {});
  // Takes chunks from the cursor until it is at its end or the message is full.
  void AddChunks(std::uint32_t block_index, const std::shared_ptr<const HeldFrame>& frame,
                 ChunkCursor* cursor);

  const v1::FetchResponse& header() const { return header_; }
  const std::vector<Run>& runs() const { return runs_; }
  std::size_t bytes() const { return bytes_; }

 private:
  v1::FetchResponse header_;
  std::vector<Run> runs_;
  std::size_t bytes_ = 0;
  bool full_ = false;  // a chunk did not fit
};

}  // namespace kvtrie
