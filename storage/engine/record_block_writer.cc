#include "storage/engine/record_block_writer.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

const char* NameOf(Quality quality) {
  switch (quality) {
    case Quality::kUnrated:
      return "unrated";
    case Quality::kSmall:
      return "small";
    case Quality::kHigh:
      return "high";
    case Quality::kNearExact:
      return "near-exact";
    case Quality::kExact:
      return "exact";
  }
  return "no quality";
}

// Stands in a descriptor until the frame has said its own: a descriptor with a profile is longer.
ProfileId AnyProfile() {
  ProfileId profile;
  profile.bytes.fill(0xff);
  return profile;
}

absl::Status NoFrameOfThisPut(std::uint32_t block_index, const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("block ", block_index, ": not a frame of this put: ", why));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RecordBlockWriter>> RecordBlockWriter::CreateRaw(
    ExpectedBlock expected, std::uint64_t total_bytes, const KvGeometry& geometry) {
  if (total_bytes != geometry.raw_block_bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", expected.block_index, ": has ", total_bytes,
                     " bytes; a block of this model has ", geometry.raw_block_bytes()));
  }
  expected.descriptor.rung = Rung::kExact;
  expected.descriptor.codec = CodecId::kRaw;
  expected.descriptor.quality = expected.served_quality_max;
  return absl::WrapUnique(new RecordBlockWriter(std::move(expected), total_bytes, geometry,
                                                Content::kRawKv, Quality::kExact));
}

absl::StatusOr<std::unique_ptr<RecordBlockWriter>> RecordBlockWriter::CreateFrame(
    ExpectedBlock expected, const FrameView& head, const ModelSpec& spec,
    const KvGeometry& geometry) {
  const auto refuse = [&expected](const std::string& why) {
    return NoFrameOfThisPut(expected.block_index, why);
  };
  if (head.model() != expected.descriptor.row.model) return refuse("it names another model");
  if (absl::Status status = head.CheckGeometry(geometry); !status.ok()) {
    return refuse(std::string(status.message()));
  }
  if (head.rung() == Rung::kCoded && !spec.layout_tag.empty()) {
    return refuse("KV of a model with a layout_tag is stored exact only");
  }
  if (!IsAtLeast(head.quality(), expected.frame_quality_min)) {
    return refuse(absl::StrCat("its quality is ", NameOf(head.quality()),
                               ", and the put announced at least ",
                               NameOf(expected.frame_quality_min)));
  }
  expected.descriptor.rung = head.rung();
  expected.descriptor.codec = head.codec();
  expected.descriptor.quality = LowerOf(head.quality(), expected.served_quality_max);
  const bool has_profile =
      head.codec() == CodecId::kResidual || head.codec() == CodecId::kReferenced;
  if (has_profile) expected.descriptor.profile = AnyProfile();
  return absl::WrapUnique(new RecordBlockWriter(std::move(expected), head.frame_bytes(), geometry,
                                                Content::kFrame, head.quality()));
}

RecordBlockWriter::RecordBlockWriter(ExpectedBlock expected, std::uint64_t total_bytes,
                                     const KvGeometry& geometry, Content content,
                                     Quality frame_quality)
    : BlockWriter(expected.block_index, total_bytes),
      content_(content),
      descriptor_(std::move(expected.descriptor)),
      frame_quality_(frame_quality),
      offered_references_(std::move(expected.offered_references)),
      section_bytes_(RawSectionBytes(geometry)),
      raw_bytes_(geometry.raw_block_bytes()),
      header_bytes_(content == Content::kRawKv ? FrameHeaderBytes(section_bytes_.size()) : 0),
      record_(descriptor_.Encode(), header_bytes_ + total_bytes),
      incoming_(record_.payload().data() + header_bytes_) {
  for (const std::uint32_t bytes : section_bytes_) sections_.push_back({.bytes = bytes});
}

RungRow RecordBlockWriter::rung() const {
  return {.rung = descriptor_.rung,
          .quality = descriptor_.quality,
          .codec = descriptor_.codec,
          .profile = descriptor_.profile,
          .references = references_};
}

void RecordBlockWriter::CopyRaw(std::span<const std::byte> piece) {
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

// The checksum of the chunk; that of its section where the two are the same.
std::uint32_t RecordBlockWriter::AppendRaw(std::span<const std::span<const std::byte>> pieces,
                                           std::uint64_t chunk_bytes) {
  const std::uint64_t begin = received_bytes_;
  const std::size_t first_section = section_index_;
  const bool is_one_section = section_filled_ == 0 && first_section < sections_.size() &&
                              sections_[first_section].bytes == chunk_bytes;
  for (const auto& piece : pieces) CopyRaw(piece);
  return is_one_section ? sections_[first_section].crc32c
                        : Crc32c({incoming_ + begin, static_cast<std::size_t>(chunk_bytes)});
}

std::uint32_t RecordBlockWriter::AppendFrame(std::span<const std::span<const std::byte>> pieces,
                                             std::uint64_t chunk_bytes) {
  std::uint32_t crc = 0;
  for (const auto& piece : pieces) {
    crc = CopyAndCrc32c(piece, incoming_ + received_bytes_, crc);
    received_bytes_ += piece.size();
  }
  frame_crc_ = JoinCrc32c(frame_crc_, crc, Crc32cShift(chunk_bytes));
  return crc;
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
  const std::uint32_t copied_crc = content_ == Content::kRawKv ? AppendRaw(pieces, chunk_bytes)
                                                               : AppendFrame(pieces, chunk_bytes);
  if (copied_crc != crc32c) {
    return absl::InvalidArgumentError(absl::StrCat("block ", block_index_, ": chunk at offset ",
                                                   begin, " does not match its crc32c"));
  }
  return absl::OkStatus();
}

absl::Status RecordBlockWriter::Seal() {
  KV_CHECK(complete());
  if (content_ == Content::kFrame) return SealFrame();
  SealRaw();
  return absl::OkStatus();
}

// The record's checksum comes from those of its parts, which were taken as they were copied here.
void RecordBlockWriter::SealRaw() {
  const auto header = record_.payload().first(header_bytes_);
  WriteFrameHeader({.model = descriptor_.row.model, .raw_bytes = raw_bytes_, .sections = sections_},
                   header);
  std::uint32_t crc = Crc32c(header);
  std::uint32_t shift = 0;
  std::uint32_t shift_bytes = 0;
  for (const FrameSection& part : sections_) {
    if (part.bytes != shift_bytes) shift = Crc32cShift(shift_bytes = part.bytes);
    crc = JoinCrc32c(crc, part.crc32c, shift);
  }
  record_.SetPayloadCrc32c(crc);
}

absl::Status RecordBlockWriter::SealFrame() {
  const absl::StatusOr<FrameView> frame = FrameView::Parse(record_.payload());
  if (!frame.ok()) return NoFrameOfThisPut(block_index_, std::string(frame.status().message()));
  KV_RETURN_IF_ERROR(CheckFrame(*frame));
  KV_RETURN_IF_ERROR(TakeReferences(*frame));
  if (frame->codec() != CodecId::kRaw) {
    descriptor_.profile = frame->profile();
    record_.ReplaceDescriptor(descriptor_.Encode());
  }
  record_.SetPayloadCrc32c(frame_crc_);
  return absl::OkStatus();
}

absl::Status RecordBlockWriter::TakeReferences(const FrameView& frame) {
  auto table = ReferencesOf(frame, descriptor_.row.tokens.size());
  if (!table.ok()) return NoFrameOfThisPut(block_index_, std::string(table.status().message()));
  reference_table_ = *std::move(table);
  for (const FrameReference& reference : reference_table_.references) {
    const OfferedReference* offered = nullptr;
    for (std::size_t i = 0; offered_references_ != nullptr && i < offered_references_->size();
         ++i) {
      if ((*offered_references_)[i].node == reference.node) offered = &(*offered_references_)[i];
    }
    if (offered == nullptr) {
      return NoFrameOfThisPut(block_index_,
                              absl::StrCat("it was coded against block ", reference.node.ToHex(),
                                           ", which this put was not offered; announce it with "
                                           "want_references, and use those of its plan"));
    }
    references_.push_back({offered->node, offered->rung});
  }
  return absl::OkStatus();
}

absl::Status RecordBlockWriter::CheckFrame(const FrameView& frame) const {
  const auto refuse = [this](const std::string& why) {
    return NoFrameOfThisPut(block_index_, why);
  };
  // Shared memory may have changed since its head was checked.
  bool is_same = frame.frame_bytes() == total_bytes_ && frame.codec() == descriptor_.codec &&
                 frame.quality() == frame_quality_ && frame.model() == descriptor_.row.model &&
                 frame.raw_bytes() == raw_bytes_;
  if (frame.codec() == CodecId::kRaw) {
    is_same = is_same && frame.section_count() == section_bytes_.size();
    for (std::size_t i = 0; is_same && i < section_bytes_.size(); ++i) {
      is_same = frame.section(i).bytes == section_bytes_[i];
    }
  }
  if (!is_same) return refuse("its header is another one than it began with");
  if (absl::Status status = frame.VerifyBody(); !status.ok()) {
    return refuse(std::string(status.message()));
  }
  if (frame.codec() == CodecId::kRaw) return absl::OkStatus();
  const FrameBinding binding = frame.binding();
  const std::vector<TokenId>& tokens = descriptor_.row.tokens;
  const std::size_t position = std::size_t{block_index_} * tokens.size();
  if (binding.first_position != position) {
    return refuse(absl::StrCat("its first_position is ", binding.first_position,
                               ", that of the block is ", position));
  }
  if (binding.tokens_crc32c != Crc32c(std::as_bytes(std::span(tokens)))) {
    return refuse("its tokens_crc32c is not that of the block's announced tokens");
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
