#include "storage/codec/frame_codec.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/lossless.h"

namespace kvtrie {
namespace {

FrameBinding BindingOf(const BlockToEncode& block) {
  return {.first_position = block.first_position,
          .tokens_crc32c = Crc32c(std::as_bytes(block.tokens)),
          .profile = {}};
}

std::vector<std::uint32_t> SectionBytes(const FrameView& frame) {
  std::vector<std::uint32_t> bytes;
  for (std::size_t i = 0; i < frame.section_count(); ++i) bytes.push_back(frame.section(i).bytes);
  return bytes;
}

}  // namespace

FrameCodec::FrameCodec(const ModelSpec& spec, std::shared_ptr<const ResidualCodec> residual,
                       std::shared_ptr<const BlockCoder> coder)
    : geometry_(spec),
      model_(spec.Digest()),
      residual_(std::move(residual)),
      coder_(std::move(coder)) {
  KV_CHECK(coder_ == nullptr || residual_ != nullptr);
}

absl::StatusOr<std::vector<EncodedBlock>> FrameCodec::EncodeBlocks(
    std::span<const BlockToEncode> blocks, Quality quality) const {
  if (coder_ != nullptr) {
    auto encoded = coder_->Encode(blocks, quality);
    if (!absl::IsUnavailable(encoded.status())) return encoded;
  }
  return residual_->Encode(blocks, quality);
}

absl::Status FrameCodec::DecodeBlocks(std::span<const BlockToDecode> blocks) const {
  if (coder_ != nullptr) {
    absl::Status status = coder_->Decode(blocks);
    if (!absl::IsUnavailable(status)) return status;
  }
  return residual_->Decode(blocks);
}

EncodedFrame FrameCodec::Frame(CodecId codec, Quality quality, std::span<const std::byte> body,
                               std::span<const std::uint32_t> section_bytes) const {
  std::vector<FrameSection> sections;
  std::size_t at = 0;
  for (const std::uint32_t bytes : section_bytes) {
    sections.push_back({.bytes = bytes, .crc32c = Crc32c(body.subspan(at, bytes))});
    at += bytes;
  }
  KV_CHECK(at == body.size());
  EncodedFrame frame;
  frame.codec = codec;
  frame.quality = quality;
  const std::size_t header_bytes = FrameHeaderBytes(sections.size());
  frame.bytes.resize(header_bytes + body.size());
  WriteFrameHeader({.codec = codec,
                    .quality = quality,
                    .model = model_,
                    .raw_bytes = geometry_.raw_block_bytes(),
                    .sections = sections},
                   std::span(frame.bytes).first(header_bytes));
  std::memcpy(frame.bytes.data() + header_bytes, body.data(), body.size());
  return frame;
}

EncodedFrame FrameCodec::EncodeLosslessly(const BlockToEncode& block) const {
  const CodedBody body = EncodeLossless(geometry_, block.raw, BindingOf(block));
  EncodedFrame frame = Frame(CodecId::kLossless, Quality::kExact, body.bytes, body.section_bytes);
  frame.exact_tokens = static_cast<std::uint32_t>(geometry_.block_tokens());
  return frame;
}

absl::StatusOr<std::vector<EncodedFrame>> FrameCodec::EncodeWithProfile(
    std::span<const BlockToEncode> blocks, Quality quality) const {
  // Without their references, and behind them those that have some with them.
  std::vector<BlockToEncode> to_encode(blocks.begin(), blocks.end());
  for (BlockToEncode& block : to_encode) {
    block.references = {};
    block.runs = {};
  }
  std::vector<std::size_t> again;
  for (std::size_t i = 0; i < blocks.size() && residual_->HasDifferences(); ++i) {
    if (blocks[i].runs.empty() || quality == Quality::kExact) continue;
    to_encode.push_back(blocks[i]);
    again.push_back(i);
  }
  KV_ASSIGN_OR_RETURN(const std::vector<EncodedBlock> encoded, EncodeBlocks(to_encode, quality));
  std::vector<EncodedFrame> frames;
  for (std::size_t i = 0; i < encoded.size(); ++i) {
    // Too many tokens that must be kept as they are.
    if (encoded[i].body.empty()) {
      if (i < blocks.size()) frames.push_back(EncodeLosslessly(blocks[i]));
      continue;
    }
    const CodecId codec = quality == Quality::kExact         ? CodecId::kLossless
                          : encoded[i].referenced_tokens > 0 ? CodecId::kReferenced
                                                             : CodecId::kResidual;
    EncodedFrame frame = Frame(codec, quality, encoded[i].body, encoded[i].section_bytes);
    frame.exact_tokens = encoded[i].exact_tokens;
    frame.referenced_tokens = encoded[i].referenced_tokens;
    if (i < blocks.size()) {
      frames.push_back(std::move(frame));
    } else if (EncodedFrame& without = frames[again[i - blocks.size()]];
               frame.bytes.size() < without.bytes.size()) {
      without = std::move(frame);
    }
  }
  return frames;
}

absl::StatusOr<std::vector<EncodedFrame>> FrameCodec::Encode(std::span<const BlockToEncode> blocks,
                                                             Quality quality) const {
  if (quality != Quality::kExact && quality != Quality::kUnrated && residual_ != nullptr &&
      residual_->HasLevel(quality)) {
    return EncodeWithProfile(blocks, quality);
  }
  std::vector<EncodedFrame> frames;
  for (const BlockToEncode& block : blocks) {
    if (quality != Quality::kUnrated) {
      frames.push_back(EncodeLosslessly(block));
      continue;
    }
    KV_ASSIGN_OR_RETURN(const RotatedBlock rotated,
                        EncodeRotated(geometry_, block.raw, BindingOf(block), RotatedOptions{}));
    frames.push_back(Frame(CodecId::kRotated, Quality::kUnrated, rotated.body.bytes,
                           rotated.body.section_bytes));
  }
  return frames;
}

absl::StatusOr<std::vector<EncodedFrame>> FrameCodec::EncodeSmallestExact(
    std::span<const BlockToEncode> blocks) const {
  if (residual_ == nullptr || !residual_->HasLevel(Quality::kExact)) {
    return Encode(blocks, Quality::kExact);
  }
  return EncodeWithProfile(blocks, Quality::kExact);
}

absl::Status FrameCodec::DecodeWithProfile(std::span<const FrameToDecode> frames) const {
  if (residual_ == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame: needs profile ", frames[0].frame.profile().ToHex()));
  }
  std::vector<std::vector<std::uint32_t>> section_bytes;
  for (const FrameToDecode& frame : frames) section_bytes.push_back(SectionBytes(frame.frame));
  std::vector<BlockToDecode> blocks;
  for (std::size_t i = 0; i < frames.size(); ++i) {
    blocks.push_back({.body = frames[i].frame.body(),
                      .section_bytes = section_bytes[i],
                      .quality = frames[i].frame.quality(),
                      .tokens = frames[i].tokens,
                      .raw = frames[i].raw,
                      .is_referenced = frames[i].frame.codec() == CodecId::kReferenced,
                      .references = frames[i].references});
  }
  return DecodeBlocks(blocks);
}

absl::Status FrameCodec::Decode(std::span<const FrameToDecode> frames) const {
  // Exact and lossy frames of a profile do not share a batch. Those with references have one of
  // their own too: a batch does the work of each way of coding that any of its tokens has.
  std::vector<FrameToDecode> lossy, referenced, exact;
  for (const FrameToDecode& to_decode : frames) {
    const FrameView& frame = to_decode.frame;
    KV_CHECK(to_decode.tokens.size() == geometry_.block_tokens());
    KV_CHECK(to_decode.raw.size() == geometry_.raw_block_bytes());
    if (frame.codec() == CodecId::kRaw) {
      std::memcpy(to_decode.raw.data(), frame.body().data(), to_decode.raw.size());
      continue;
    }
    if (frame.tokens_crc32c() != Crc32c(std::as_bytes(to_decode.tokens))) {
      return absl::InvalidArgumentError("frame: made for other tokens");
    }
    if (!frame.profile().empty()) {
      (frame.quality() == Quality::kExact      ? exact
       : frame.codec() == CodecId::kReferenced ? referenced
                                               : lossy)
          .push_back(to_decode);
    } else if (frame.codec() == CodecId::kLossless) {
      KV_RETURN_IF_ERROR(DecodeLossless(geometry_, frame.body(), to_decode.raw));
    } else {
      KV_RETURN_IF_ERROR(DecodeRotated(geometry_, frame.body(), to_decode.raw));
    }
  }
  for (const auto& of_profile : {lossy, referenced, exact}) {
    if (!of_profile.empty()) KV_RETURN_IF_ERROR(DecodeWithProfile(of_profile));
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
