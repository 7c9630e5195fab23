#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/reference_cache.h"
#include "storage/codec/frame_codec.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// Frames that others are coded against, by the blocks that they are of.
using ReferenceFrames = std::map<TrieNodeId, std::shared_ptr<const ReferenceFrame>>;

// One of them as raw KV.
struct DecodedReference {
  std::shared_ptr<const ReferenceFrame> frame;
  std::unique_ptr<std::byte[]> raw;
  std::uint32_t first_position = 0;  // of its first token in its own session; 0 of a raw frame
  Quality quality = Quality::kUnrated;
};
using DecodedReferences = std::map<TrieNodeId, DecodedReference>;

// Gives the codec for frames that name this profile; an empty id: that name none.
using CodecOf = std::function<absl::StatusOr<std::shared_ptr<const FrameCodec>>(const ProfileId&)>;

// Decodes the frames of some blocks; what is there of `last` is taken from there. What is not to be
// had, is damaged, of another model, or itself coded against others, is not in the result.
DecodedReferences DecodeReferences(const KvGeometry& geometry, const ModelId& model,
                                   std::span<const TrieNodeId> nodes, const ReferenceFrames& frames,
                                   const CodecOf& codec_of, DecodedReferences last = {});

}  // namespace kvtrie
