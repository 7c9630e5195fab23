#include "storage/engine/record_block_writer.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

std::uint64_t FrameBytes(const KvGeometry& geometry, std::size_t section_count) {
  return FrameHeaderBytes(section_count) + geometry.raw_block_bytes();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RecordBlockWriter>> RecordBlockWriter::Create(
    std::uint32_t block_index, PutSession::Encoding encoding, std::uint64_t total_bytes,
    const ModelId& model, const KvGeometry& geometry, std::string_view descriptor) {
  std::vector<std::uint32_t> section_bytes = RawSectionBytes(geometry);
  const std::uint64_t expected_bytes = encoding == PutSession::Encoding::kRaw
                                           ? geometry.raw_block_bytes()
                                           : FrameBytes(geometry, section_bytes.size());
  if (total_bytes != expected_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("block ", block_index, ": has ", total_bytes,
                                                   " bytes; a block of this model has ",
                                                   expected_bytes));
  }
  return absl::WrapUnique(new RecordBlockWriter(block_index, encoding, total_bytes, model,
                                                std::move(section_bytes), descriptor));
}

RecordBlockWriter::RecordBlockWriter(std::uint32_t block_index, PutSession::Encoding encoding,
                                     std::uint64_t total_bytes, const ModelId& model,
                                     std::vector<std::uint32_t> section_bytes,
                                     std::string_view descriptor)
    : BlockWriter(block_index, total_bytes),
      encoding_(encoding),
      model_(model),
      section_bytes_(std::move(section_bytes)),
      header_bytes_(FrameHeaderBytes(section_bytes_.size())),
      record_(descriptor,
              encoding == PutSession::Encoding::kRaw ? header_bytes_ + total_bytes : total_bytes),
      incoming_(record_.payload().data() +
                (encoding == PutSession::Encoding::kRaw ? header_bytes_ : 0)) {
  if (encoding_ == PutSession::Encoding::kFrame) {
    sections_.push_back({.bytes = static_cast<std::uint32_t>(header_bytes_)});
  }
  for (const std::uint32_t bytes : section_bytes_) sections_.push_back({.bytes = bytes});
}

void RecordBlockWriter::Copy(std::span<const std::byte> piece) {
  while (!piece.empty()) {
    FrameSection& section = sections_[section_index_];
    const auto part =
        piece.first(std::min<std::size_t>(piece.size(), section.bytes - section_filled_));
    section_crc_ = CopyAndCrc32c(part, incoming_ + received_bytes_, section_crc_);
    received_bytes_ += part.size();
    section_filled_ += static_cast<std::uint32_t>(part.size());
    if (section_filled_ == section.bytes) {
      section.crc32c = section_crc_;
      ++section_index_;
      section_filled_ = 0;
      section_crc_ = 0;
    }
    piece = piece.subspan(part.size());
  }
}

absl::Status RecordBlockWriter::AppendChunk(std::span<const std::span<const std::byte>> pieces,
                                            std::uint32_t crc32c) {
  std::uint64_t chunk_bytes = 0;
  for (const auto& piece : pieces) chunk_bytes += piece.size();
  if (chunk_bytes > total_bytes_ - received_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", block_index_, ": more bytes than its ", total_bytes_));
  }
  const std::uint64_t begin = received_bytes_;
  const std::size_t first_section = section_index_;
  const bool is_one_section = section_filled_ == 0 && first_section < sections_.size() &&
                              sections_[first_section].bytes == chunk_bytes;
  for (const auto& piece : pieces) Copy(piece);

  const std::uint32_t copied_crc =
      is_one_section ? sections_[first_section].crc32c
                     : Crc32c({incoming_ + begin, static_cast<std::size_t>(chunk_bytes)});
  if (copied_crc != crc32c) {
    return absl::InvalidArgumentError(absl::StrCat("block ", block_index_, ": chunk at offset ",
                                                   begin, " does not match its crc32c"));
  }
  return absl::OkStatus();
}

// The record's checksum from those of its parts, which were taken as they were copied here.
void RecordBlockWriter::JoinChecksums(std::uint32_t crc, std::span<const FrameSection> parts) {
  std::uint32_t shift = 0;
  std::uint32_t shift_bytes = 0;
  for (const FrameSection& part : parts) {
    if (part.bytes != shift_bytes) shift = Crc32cShift(shift_bytes = part.bytes);
    crc = JoinCrc32c(crc, part.crc32c, shift);
  }
  record_.SetPayloadCrc32c(crc);
}

absl::Status RecordBlockWriter::Seal() {
  KV_CHECK(complete());
  if (encoding_ == PutSession::Encoding::kRaw) {
    const auto header = record_.payload().first(header_bytes_);
    WriteFrameHeader({.model = model_, .raw_bytes = total_bytes_, .sections = sections_}, header);
    JoinChecksums(Crc32c(header), sections_);
    return absl::OkStatus();
  }
  const auto refuse = [this](std::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", block_index_, ": not a frame of this model: ", std::string(why)));
  };
  absl::StatusOr<FrameView> frame = FrameView::Parse(record_.payload());
  if (!frame.ok()) return refuse(std::string(frame.status().message()));
  if (frame->codec() != CodecId::kRaw) return refuse("codec is not supported");
  if (frame->rung() != Rung::kExact || frame->quality() != Quality::kExact) {
    return refuse("a raw frame is exact");
  }
  if (frame->model() != model_) return refuse("it names another model");
  if (frame->section_count() != section_bytes_.size()) return refuse("sections differ");
  for (std::size_t i = 0; i < section_bytes_.size(); ++i) {
    const FrameSection section = frame->section(i);
    if (section.bytes != section_bytes_[i]) return refuse("sections differ");
    if (section.crc32c != sections_[i + 1].crc32c) {
      return refuse(absl::StrCat("section ", i, " does not match its crc32c"));
    }
  }
  JoinChecksums(0, sections_);
  return absl::OkStatus();
}

}  // namespace kvtrie
