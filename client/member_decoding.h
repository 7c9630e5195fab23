#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/fetch_types.h"
#include "client/reference_decoding.h"
#include "storage/codec/frame.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/reference_table.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// A frame of one of a Fetch's targets that was coded against other blocks.
struct MemberFrame {
  std::size_t target = 0;
  FrameView view;  // into `memory`
  std::unique_ptr<std::byte[]> memory;
  std::shared_ptr<const FrameCodec> codec;
};

// Decodes what one Fetch brought of blocks that were coded against others. Not thread-safe.
class MemberDecoding {
 public:
  // `targets` outlive this; they have tokens and raw memory of the model's sizes.
  MemberDecoding(const ModelSpec& spec, std::span<const FetchTarget> targets, CodecOf codec_of,
                 std::vector<MemberFrame> members, int threads);

  // The blocks that they were coded against, each once.
  std::vector<TrieNodeId> References() const;

  // Decodes members with the frames that are there, in groups, so that no more raw KV of
  // references is in memory than one group needs. Gives the members for which that failed: a frame
  // is missing, or is not the one that they were coded against.
  std::vector<std::size_t> Decode(const ReferenceFrames& frames);

  std::size_t target(std::size_t member) const { return members_[member].target; }
  const ReferenceTable& table(std::size_t member) const { return tables_[member]; }

 private:
  const ModelId model_;
  const KvGeometry geometry_;
  const std::span<const FetchTarget> targets_;
  const CodecOf codec_of_;
  const std::vector<MemberFrame> members_;
  std::vector<ReferenceTable> tables_;  // of the members
  const int threads_;
};

}  // namespace kvtrie
