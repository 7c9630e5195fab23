#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/frame.h"
#include "storage/codec/reference_table.h"
#include "storage/engine/put_session.h"
#include "storage/kv/model_spec.h"
#include "storage/meta/node_row.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

// What a block of a put has to be.
struct ExpectedBlock {
  std::uint32_t block_index = 0;
  NodeDescriptor descriptor;  // rung, quality, codec and profile are the writer's to say
  Quality frame_quality_min = Quality::kExact;  // that the put has announced
  // At which it may be served at most; less than exact on top of a lossy prefix.
  Quality served_quality_max = Quality::kExact;
  // Frames that this put may be coded against.
  std::shared_ptr<const std::vector<OfferedReference>> offered_references;
};

// Builds the frame of one block in the memory of a payload record as chunks arrive. Raw bytes get a
// header; a frame that the client made is checked whole. Either way each byte is copied once, and
// its checksum comes from the copy.
class RecordBlockWriter final : public BlockWriter {
 public:
  // Raw KV. InvalidArgument: `total_bytes` is not the size of such a block.
  static absl::StatusOr<std::unique_ptr<RecordBlockWriter>> CreateRaw(ExpectedBlock expected,
                                                                      std::uint64_t total_bytes,
                                                                      const KvGeometry& geometry);
  // A frame that begins with `head`. InvalidArgument: it is of another model or geometry, of less
  // quality than the put has announced, or coded where the model's layout allows exact ones only.
  static absl::StatusOr<std::unique_ptr<RecordBlockWriter>> CreateFrame(ExpectedBlock expected,
                                                                        const FrameView& head,
                                                                        const ModelSpec& spec,
                                                                        const KvGeometry& geometry);

  absl::Status AppendChunk(std::span<const std::span<const std::byte>> pieces,
                           std::uint32_t crc32c) override;

  // REQUIRES: complete(). InvalidArgument: a frame of the client's is damaged, another one than its
  // head said, or bound to another place or other tokens.
  absl::Status Seal();

  // REQUIRES: sealed.
  PayloadRecord& record() { return record_; }
  // As the node's row will say it, but for the location.
  RungRow rung() const;
  Quality frame_quality() const { return frame_quality_; }
  // What it was coded against; empty of a frame that stands alone.
  const ReferenceTable& reference_table() const { return reference_table_; }

 private:
  enum class Content { kRawKv, kFrame };

  RecordBlockWriter(ExpectedBlock expected, std::uint64_t total_bytes, const KvGeometry& geometry,
                    Content content, Quality frame_quality);

  // Copies a piece and takes the checksums of the sections that it fills.
  void CopyRaw(std::span<const std::byte> piece);
  std::uint32_t AppendRaw(std::span<const std::span<const std::byte>> pieces,
                          std::uint64_t chunk_bytes);
  std::uint32_t AppendFrame(std::span<const std::span<const std::byte>> pieces,
                            std::uint64_t chunk_bytes);
  void SealRaw();
  absl::Status SealFrame();
  absl::Status CheckFrame(const FrameView& frame) const;
  absl::Status TakeReferences(const FrameView& frame);

  const Content content_;
  NodeDescriptor descriptor_;
  const Quality frame_quality_;
  const std::shared_ptr<const std::vector<OfferedReference>> offered_references_;
  // Of a frame that is sealed.
  ReferenceTable reference_table_;
  std::vector<RungReference> references_;
  const std::vector<std::uint32_t> section_bytes_;  // of raw KV
  const std::size_t raw_bytes_;
  const std::size_t header_bytes_;  // in front of the client's byte 0
  PayloadRecord record_;
  std::byte* const incoming_;  // where the client's byte 0 goes
  // Raw KV: the sections that the copied bytes have reached.
  std::vector<FrameSection> sections_;
  std::size_t section_index_ = 0;
  std::uint32_t section_filled_ = 0;
  std::uint32_t section_crc_ = 0;
  // A frame: of the bytes that are here.
  std::uint32_t frame_crc_ = 0;
};

}  // namespace kvtrie
