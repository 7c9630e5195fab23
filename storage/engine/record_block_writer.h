#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/frame.h"
#include "storage/engine/put_session.h"
#include "storage/kv/model_spec.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

// Builds the frame of one block in the memory of a payload record, section by section as chunks
// arrive. Raw bytes get a header; a frame that the client made is checked whole. Either way each
// byte is copied once, and its checksum comes from the copy.
class RecordBlockWriter final : public BlockWriter {
 public:
  // Bytes that `total_bytes` must have for raw KV of this geometry.
  static absl::StatusOr<std::unique_ptr<RecordBlockWriter>> Create(
      std::uint32_t block_index, PutSession::Encoding encoding, std::uint64_t total_bytes,
      const ModelId& model, const KvGeometry& geometry, std::string_view descriptor);

  absl::Status AppendChunk(std::span<const std::span<const std::byte>> pieces,
                           std::uint32_t crc32c) override;

  // REQUIRES: complete(). InvalidArgument: a frame of the client's is not what this model stores.
  absl::Status Seal();

  // REQUIRES: sealed.
  PayloadRecord& record() { return record_; }

 private:
  RecordBlockWriter(std::uint32_t block_index, PutSession::Encoding encoding,
                    std::uint64_t total_bytes, const ModelId& model,
                    std::vector<std::uint32_t> section_bytes, std::string_view descriptor);

  void Copy(std::span<const std::byte> piece);
  void JoinChecksums(std::uint32_t crc, std::span<const FrameSection> parts);

  const PutSession::Encoding encoding_;
  const ModelId model_;
  const std::vector<std::uint32_t> section_bytes_;
  const std::size_t header_bytes_;
  PayloadRecord record_;
  std::byte* const incoming_;  // where the client's byte 0 goes
  // Of the sections that the copied bytes have reached. A client's frame is one header "section",
  // then those.
  std::vector<FrameSection> sections_;
  std::size_t section_index_ = 0;
  std::uint32_t section_filled_ = 0;
  std::uint32_t section_crc_ = 0;
};

}  // namespace kvtrie
