#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "client/put_types.h"
#include "storage/codec/frame_codec.h"

namespace kvtrie {

// Raw blocks of one PutPath as frames of its quality, made when they are about to be sent: what is
// stored already is never encoded. No I/O. Not thread-safe.
class PathEncoder {
 public:
  // `path` outlives this; its blocks are raw and of the model's size.
  PathEncoder(const PutPath& path, std::uint32_t block_tokens,
              std::shared_ptr<const FrameCodec> codec, int threads);

  // The frame of the first block of `wanted` (indexes in `path.blocks`), which is encoded with
  // those that follow it, where it is not yet. Stays where it is for as long as this lives.
  const EncodedFrame& Frame(const std::deque<std::uint32_t>& wanted);
  // Null: it was not wanted.
  const EncodedFrame* frame(std::uint32_t i) const {
    return frames_[i].bytes.empty() ? nullptr : &frames_[i];
  }

 private:
  void Encode(std::span<const std::uint32_t> blocks);

  const PutPath& path_;
  const std::uint32_t block_tokens_;
  const std::shared_ptr<const FrameCodec> codec_;
  const int threads_;
  std::vector<EncodedFrame> frames_;  // empty where not made
};

}  // namespace kvtrie
