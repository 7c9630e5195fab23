#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/block_coder.h"
#include "storage/codec/frame.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/rotated.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

struct EncodedFrame {
  std::vector<std::byte> bytes;  // the whole frame
  CodecId codec = CodecId::kRaw;
  Quality quality = Quality::kExact;  // at least what was asked for
  // Of the block's tokens: kept as they were, which are all of a lossless frame without a profile;
  // and coded as the difference to a reference.
  std::uint32_t exact_tokens = 0;
  std::uint32_t referenced_tokens = 0;
};

struct FrameToDecode {
  FrameView frame;  // of the whole frame, its body verified
  std::span<const TokenId> tokens;
  std::span<std::byte> raw;  // where the raw KV goes
  // Those that ReferencesOf(frame) names, in any order, and any others.
  std::span<const ReferenceBlock> references = {};
};

// Blocks of one model as frames, and back, whatever codec they are of. What a codec cannot do falls
// to one that can: a level that the profile has not, or a model without a profile, is coded without
// loss; a frame never holds less than was asked for.
//
// Immutable, thread-safe.
class FrameCodec {
 public:
  // `residual` may be null: the model has no profile then. It is of this spec. `coder` does its
  // work; null: the calling thread does. What the coder is not available for falls to the thread.
  FrameCodec(const ModelSpec& spec, std::shared_ptr<const ResidualCodec> residual,
             std::shared_ptr<const BlockCoder> coder = nullptr);

  // Null: without a profile.
  const ResidualCodec* residual() const { return residual_.get(); }

  // In order. A block with references is coded with and without them, which takes twice as long,
  // and the smaller frame is kept; a frame that uses them is of codec kReferenced. REQUIRES: sizes
  // as the model's geometry says. InvalidArgument: references or runs that are not as BlockToEncode
  // wants them.
  absl::StatusOr<std::vector<EncodedFrame>> Encode(std::span<const BlockToEncode> blocks,
                                                   Quality quality) const;

  // Quality exact at the least size: with the profile where there is one, which takes several times
  // as long as Encode does for exact.
  absl::StatusOr<std::vector<EncodedFrame>> EncodeSmallestExact(
      std::span<const BlockToEncode> blocks) const;

  // All of them, or an error and `raw` with anything in it. REQUIRES: frames have passed
  // FrameView::CheckGeometry of this model. Errors: DataLoss; InvalidArgument for other tokens, a
  // profile that is not the one here, a reference that is missing or is not what the frame was
  // coded against: the message names it.
  absl::Status Decode(std::span<const FrameToDecode> frames) const;

 private:
  EncodedFrame Frame(CodecId codec, Quality quality, std::span<const std::byte> body,
                     std::span<const std::uint32_t> section_bytes) const;
  EncodedFrame EncodeLosslessly(const BlockToEncode& block) const;
  absl::StatusOr<std::vector<EncodedFrame>> EncodeWithProfile(std::span<const BlockToEncode> blocks,
                                                              Quality quality) const;
  absl::Status DecodeWithProfile(std::span<const FrameToDecode> frames) const;
  absl::StatusOr<std::vector<EncodedBlock>> EncodeBlocks(std::span<const BlockToEncode> blocks,
                                                         Quality quality) const;
  absl::Status DecodeBlocks(std::span<const BlockToDecode> blocks) const;

  const KvGeometry geometry_;
  const ModelId model_;
  const std::shared_ptr<const ResidualCodec> residual_;
  const std::shared_ptr<const BlockCoder> coder_;
};

}  // namespace kvtrie
