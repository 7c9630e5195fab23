#include "server/fetch_plan.h"

#include "absl/strings/str_cat.h"
#include "server/status_translation.h"
#include "server/wire_conversion.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {

bool FetchShape::NeedsGeometry(const v1::FetchRequest& request) {
  return request.order() == v1::FETCH_ORDER_LAYER_MAJOR || request.first_layer() != 0 ||
         request.layer_count() != 0;
}

ReadAs ReadAsOf(const v1::FetchRequest& request) {
  if (request.encoding() != v1::ENCODING_FRAME) return ReadAs::kRaw;
  return request.accept_referenced() ? ReadAs::kStored : ReadAs::kFrame;
}

absl::StatusOr<FetchShape> FetchShape::Make(const v1::FetchRequest& request,
                                            std::shared_ptr<const KvGeometry> geometry) {
  FetchShape shape;
  shape.layer_major = request.order() == v1::FETCH_ORDER_LAYER_MAJOR;
  shape.whole_frame = request.encoding() == v1::ENCODING_FRAME;
  shape.read_as = ReadAsOf(request);
  if (!NeedsGeometry(request)) return shape;

  const std::uint32_t model_layers = geometry->layer_count();
  if (request.first_layer() >= model_layers) {
    return absl::InvalidArgumentError(absl::StrCat("first_layer: ", request.first_layer(),
                                                   "; the model has ", model_layers, " layers"));
  }
  const std::uint32_t layers_left = model_layers - request.first_layer();
  if (request.layer_count() > layers_left) {
    return absl::InvalidArgumentError(absl::StrCat("layer_count: ", request.layer_count(),
                                                   " from layer ", request.first_layer(),
                                                   " on; the model has ", model_layers, " layers"));
  }
  shape.first_layer = request.first_layer();
  shape.layer_count = request.layer_count() == 0 ? layers_left : request.layer_count();
  shape.geometry = std::move(geometry);
  return shape;
}

FetchSteps::FetchSteps(const FetchShape& shape, std::size_t block_count)
    : block_count_(block_count),
      visits_per_block_(shape.layer_major ? shape.layer_count : 1),
      first_layer_(shape.first_layer),
      layer_count_(shape.layer_major ? 1 : shape.layer_count) {}

FetchStep FetchSteps::operator[](std::size_t index) const {
  const std::size_t visit = index / block_count_;
  return {.block_index = static_cast<std::uint32_t>(index % block_count_),
          .first_layer = first_layer_ + static_cast<std::uint32_t>(visit),
          .layer_count = layer_count_,
          .first_visit = visit == 0,
          .last_visit = visit + 1 == visits_per_block_};
}

absl::StatusOr<ChunkCursor> ChunkCursor::Make(const FrameView& frame, const FetchShape& shape,
                                              const FetchStep& step) {
  ChunkCursor cursor;
  cursor.frame_ = &frame;
  if (shape.whole_frame) {
    cursor.header_done_ = false;
    cursor.section_end_ = frame.section_count();
    cursor.offset_of_body_ = frame.header_bytes();
    if (shape.layer_major) KV_RETURN_IF_ERROR(cursor.CutForLayers(shape, step));
    return cursor;
  }
  KV_CHECK(frame.codec() == CodecId::kRaw);
  if (step.layer_count == 0) {
    cursor.section_end_ = frame.section_count();
    return cursor;
  }

  const std::uint64_t begin = shape.geometry->layer_begin(step.first_layer);
  const std::uint64_t end = shape.geometry->layer_end(step.first_layer + step.layer_count - 1);
  std::uint64_t offset = 0;
  std::size_t section = 0;
  while (section < frame.section_count() && offset < begin) {
    offset += frame.section(section++).bytes;
  }
  cursor.section_ = section;
  cursor.body_offset_ = offset;
  const bool begins_right = offset == begin;
  while (section < frame.section_count() && offset < end) {
    offset += frame.section(section++).bytes;
  }
  cursor.section_end_ = section;
  if (!begins_right || offset != end) {
    return absl::DataLossError("sections of the stored frame do not meet the model's layers");
  }
  return cursor;
}

absl::Status ChunkCursor::CutForLayers(const FetchShape& shape, const FetchStep& step) {
  KV_ASSIGN_OR_RETURN(const auto layers, LayersOfSections(*frame_, *shape.geometry));
  header_done_ = !step.first_visit;
  while (section_ < layers.size() && !step.first_visit &&
         (section_ == 0 || layers[section_ - 1] < step.first_layer)) {
    body_offset_ += frame_->section(section_++).bytes;
  }
  section_end_ = section_;
  const std::uint32_t wanted = step.first_layer + step.layer_count;
  while (section_end_ < layers.size() && (section_end_ == 0 || layers[section_end_ - 1] < wanted)) {
    ++section_end_;
  }
  return absl::OkStatus();
}

std::uint32_t ChunkCursor::chunk_bytes() const {
  return header_done_ ? frame_->section(section_).bytes
                      : static_cast<std::uint32_t>(frame_->header_bytes());
}

void ChunkCursor::Read(v1::Chunk* chunk, std::size_t* frame_offset) const {
  if (!header_done_) {
    const std::size_t header_bytes = frame_->header_bytes();
    // The header lies right before the body.
    const std::span<const std::byte> header{frame_->body().data() - header_bytes, header_bytes};
    chunk->set_offset(0);
    chunk->set_bytes(static_cast<std::uint32_t>(header_bytes));
    chunk->set_crc32c(Crc32c(header));
    *frame_offset = 0;
    return;
  }
  const FrameSection section = frame_->section(section_);
  chunk->set_offset(offset_of_body_ + body_offset_);
  chunk->set_bytes(section.bytes);
  chunk->set_crc32c(section.crc32c);
  *frame_offset = frame_->header_bytes() + body_offset_;
}

void ChunkCursor::Advance() {
  if (!header_done_) {
    header_done_ = true;
    return;
  }
  body_offset_ += frame_->section(section_).bytes;
  ++section_;
}

std::uint64_t BlockBytes(const FrameView& frame, const FetchShape& shape) {
  return shape.whole_frame ? frame.frame_bytes() : frame.raw_bytes();
}

void FetchMessage::Clear() {
  header_.Clear();
  runs_.clear();
  bytes_ = 0;
  full_ = false;
}

void FetchMessage::AddFailure(std::uint32_t block_index, const absl::Status& status) {
  v1::BlockResult* result = header_.add_blocks();
  result->set_block_index(block_index);
  ToItemStatus(status, result->mutable_status());
}

void FetchMessage::AddBlock(std::uint32_t block_index, const StoredFrame& stored, CodecId codec,
                            std::uint64_t block_bytes, std::span<const TokenId> tokens) {
  v1::BlockResult* result = header_.add_blocks();
  result->set_block_index(block_index);
  result->set_rung(ToProto(stored.rung));
  result->set_quality(ToProto(stored.quality));
  result->set_codec(ToProto(codec));
  result->set_bytes(block_bytes);
  if (!tokens.empty()) {
    result->set_tokens(tokens.data(), tokens.size_bytes());
    bytes_ += result->tokens().size();
  }
}

void FetchMessage::AddChunks(std::uint32_t block_index,
                             const std::shared_ptr<const HeldFrame>& frame, ChunkCursor* cursor) {
  std::size_t run_end = 0;  // 0: no run of this frame is open
  for (; !cursor->AtEnd(); cursor->Advance()) {
    if (bytes_ > 0 && bytes_ + cursor->chunk_bytes() > kTargetBytes) {
      full_ = true;
      return;
    }
    v1::Chunk* chunk = header_.add_chunks();
    std::size_t frame_offset = 0;
    cursor->Read(chunk, &frame_offset);
    chunk->set_block_index(block_index);
    if (run_end == frame_offset && run_end != 0) {
      runs_.back().bytes += chunk->bytes();
    } else {
      runs_.push_back({frame, frame_offset, chunk->bytes()});
    }
    run_end = frame_offset + chunk->bytes();
    bytes_ += chunk->bytes();
  }
}

}  // namespace kvtrie
