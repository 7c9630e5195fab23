#include "client/path_encoder.h"

#include <algorithm>
#include <utility>

#include "client/coding_threads.h"
#include "storage/base/check.h"

namespace kvtrie {

PathEncoder::PathEncoder(const PutPath& path, std::uint32_t block_tokens,
                         std::shared_ptr<const FrameCodec> codec, int threads)
    : path_(path),
      block_tokens_(block_tokens),
      codec_(std::move(codec)),
      threads_(threads),
      frames_(path.blocks.size()) {}

const EncodedFrame& PathEncoder::Frame(const std::deque<std::uint32_t>& wanted) {
  const std::uint32_t first = wanted.front();
  if (frames_[first].bytes.empty()) {
    const std::size_t at_once = CodingBlocks(block_tokens_);
    std::vector<std::uint32_t> blocks;
    for (const std::uint32_t i : wanted) {
      if (blocks.size() == at_once * static_cast<std::size_t>(threads_)) break;
      if (frames_[i].bytes.empty()) blocks.push_back(i);
    }
    const std::size_t parts = (blocks.size() + at_once - 1) / at_once;
    OnThreads(threads_, parts, [&](std::size_t part) {
      const auto rest = std::span<const std::uint32_t>(blocks).subspan(part * at_once);
      Encode(rest.first(std::min(rest.size(), at_once)));
    });
  }
  return frames_[first];
}

void PathEncoder::Encode(std::span<const std::uint32_t> blocks) {
  std::vector<BlockToEncode> to_encode;
  for (const std::uint32_t i : blocks) {
    const std::size_t first = std::size_t{path_.first_block + i} * block_tokens_;
    to_encode.push_back({.first_position = static_cast<std::uint32_t>(first),
                         .session_tokens = static_cast<std::uint32_t>(path_.path.tokens.size()),
                         .tokens = path_.path.tokens.subspan(first, block_tokens_),
                         .raw = path_.blocks[i]});
  }
  auto encoded = codec_->Encode(to_encode, path_.quality);
  // What cannot be coded at this quality can be kept as it is.
  if (!encoded.ok()) encoded = codec_->Encode(to_encode, Quality::kExact);
  KV_CHECK(encoded.ok());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    frames_[blocks[i]] = std::move((*encoded)[i]);
  }
}

}  // namespace kvtrie
