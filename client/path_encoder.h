#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "client/put_types.h"
#include "client/reference_decoding.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/reference_table.h"

namespace kvtrie {

// Raw blocks of one PutPath as frames of its quality, made when they are about to be sent: what is
// stored already is never encoded. No I/O. Not thread-safe.
class PathEncoder {
 public:
  // `path` outlives this; its blocks are raw and of the model's size.
  PathEncoder(const PutPath& path, std::uint32_t block_tokens,
              std::shared_ptr<const FrameCodec> codec, int threads);

  // From now on, blocks are coded as the server's plan says: finer ones finer, others against the
  // references that `references_of` gives raw.
  using ReferencesOf = std::function<DecodedReferences(std::span<const TrieNodeId> nodes)>;
  void Follow(const v1::PutPlan& plan, ReferencesOf references_of);
  // Codes anew, without references, what was coded against some; gives these. Empty: nothing was.
  std::vector<TrieNodeId> ForgetReferences();

  // The frame of the first block of `wanted` (indexes in `path.blocks`), which is encoded with
  // those that follow it, where it is not yet. Stays where it is for as long as this lives.
  const EncodedFrame& Frame(const std::deque<std::uint32_t>& wanted);
  // Null: it was not wanted.
  const EncodedFrame* frame(std::uint32_t i) const {
    return frames_[i].bytes.empty() ? nullptr : &frames_[i];
  }

 private:
  // A block's references, and where in it they are.
  struct Planned {
    std::vector<TrieNodeId> nodes;
    std::vector<ReferenceRun> runs;
  };
  void Encode(std::span<const std::uint32_t> blocks, const DecodedReferences& references);
  void EncodeAt(Quality quality, std::span<const std::uint32_t> blocks,
                const DecodedReferences& references);

  const PutPath& path_;
  const std::uint32_t block_tokens_;
  const std::shared_ptr<const FrameCodec> codec_;
  const int threads_;
  std::vector<EncodedFrame> frames_;          // empty where not made
  std::map<std::uint32_t, Planned> planned_;  // by index in `path.blocks`
  std::set<std::uint32_t> finer_;
  Quality finer_quality_ = Quality::kExact;
  ReferencesOf references_of_;
};

}  // namespace kvtrie
