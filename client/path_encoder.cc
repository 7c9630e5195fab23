#include "client/path_encoder.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "client/coding_threads.h"
#include "storage/base/byte_order.h"
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
    std::vector<TrieNodeId> nodes;
    for (const std::uint32_t i : blocks) {
      const auto planned = planned_.find(i);
      if (planned == planned_.end()) continue;
      nodes.insert(nodes.end(), planned->second.nodes.begin(), planned->second.nodes.end());
    }
    const DecodedReferences references =
        nodes.empty() ? DecodedReferences() : references_of_(nodes);
    const std::size_t parts = (blocks.size() + at_once - 1) / at_once;
    OnThreads(threads_, parts, [&](std::size_t part) {
      const auto rest = std::span<const std::uint32_t>(blocks).subspan(part * at_once);
      Encode(rest.first(std::min(rest.size(), at_once)), references);
    });
  }
  return frames_[first];
}

void PathEncoder::Follow(const v1::PutPlan& plan, ReferencesOf references_of) {
  references_of_ = std::move(references_of);
  planned_.clear();
  finer_.clear();
  const auto in_path = [this](std::uint32_t block) -> std::optional<std::uint32_t> {
    if (block < path_.first_block || block - path_.first_block >= frames_.size()) {
      return std::nullopt;
    }
    return block - path_.first_block;
  };
  for (const v1::BlockReferences& of_block : plan.references()) {
    const auto i = in_path(of_block.block_index());
    if (!i) continue;
    Planned planned;
    const std::string& ids = of_block.node_ids();
    for (std::size_t at = 0; at + TrieNodeId::kBytes <= ids.size(); at += TrieNodeId::kBytes) {
      planned.nodes.push_back(*TrieNodeId::FromBytes(ids.substr(at, TrieNodeId::kBytes)));
    }
    const auto number = [](std::uint32_t value) { return static_cast<std::uint16_t>(value); };
    for (const v1::TokenRun& run : of_block.runs()) {
      planned.runs.push_back({number(run.first_token()), number(run.token_count()),
                              number(run.reference()), number(run.offset())});
    }
    planned_.emplace(*i, std::move(planned));
  }
  finer_quality_ = static_cast<Quality>(plan.finer_quality());
  const std::string& finer = plan.finer_blocks();
  for (std::size_t at = 0; at + sizeof(std::uint32_t) <= finer.size();
       at += sizeof(std::uint32_t)) {
    const auto i = in_path(LoadLittle<std::uint32_t>(finer.data() + at));
    if (i && IsQuality(finer_quality_)) finer_.insert(*i);
  }
}

std::vector<TrieNodeId> PathEncoder::ForgetReferences() {
  std::set<TrieNodeId> forgotten;
  for (std::uint32_t i = 0; i < frames_.size(); ++i) {
    EncodedFrame& frame = frames_[i];
    if (frame.bytes.empty() || frame.codec != CodecId::kReferenced) continue;
    frame = {};
    const std::vector<TrieNodeId>& nodes = planned_[i].nodes;
    forgotten.insert(nodes.begin(), nodes.end());
  }
  planned_.clear();
  return {forgotten.begin(), forgotten.end()};
}

void PathEncoder::Encode(std::span<const std::uint32_t> blocks,
                         const DecodedReferences& references) {
  std::vector<std::uint32_t> at_level, finer;
  for (const std::uint32_t i : blocks) (finer_.contains(i) ? finer : at_level).push_back(i);
  EncodeAt(path_.quality, at_level, references);
  EncodeAt(finer_quality_, finer, references);
}

void PathEncoder::EncodeAt(Quality quality, std::span<const std::uint32_t> blocks,
                           const DecodedReferences& references) {
  if (blocks.empty()) return;
  std::vector<BlockToEncode> to_encode;
  std::vector<std::vector<ReferenceBlock>> of_block(blocks.size());
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::uint32_t i = blocks[b];
    const std::size_t first = std::size_t{path_.first_block + i} * block_tokens_;
    to_encode.push_back({.first_position = static_cast<std::uint32_t>(first),
                         .session_tokens = static_cast<std::uint32_t>(path_.path.tokens.size()),
                         .tokens = path_.path.tokens.subspan(first, block_tokens_),
                         .raw = path_.blocks[i]});
    const auto planned = planned_.find(i);
    if (planned == planned_.end()) continue;
    for (const TrieNodeId& node : planned->second.nodes) {
      const auto reference = references.find(node);
      if (reference == references.end()) break;
      of_block[b].push_back({.node = node,
                             .first_position = reference->second.first_position,
                             .tokens = reference->second.frame->tokens,
                             .raw = {reference->second.raw.get(), path_.blocks[i].size()},
                             .quality = reference->second.quality});
    }
    if (of_block[b].size() < planned->second.nodes.size()) continue;
    to_encode.back().references = of_block[b];
    to_encode.back().runs = planned->second.runs;
  }
  auto encoded = codec_->Encode(to_encode, quality);
  if (!encoded.ok()) {
    // References or runs that are not as they should be, of a server that says so.
    for (BlockToEncode& block : to_encode) {
      block.references = {};
      block.runs = {};
    }
    encoded = codec_->Encode(to_encode, path_.quality);
  }
  // What cannot be coded at this quality can be kept as it is.
  if (!encoded.ok()) encoded = codec_->Encode(to_encode, Quality::kExact);
  KV_CHECK(encoded.ok());
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    frames_[blocks[b]] = std::move((*encoded)[b]);
  }
}

}  // namespace kvtrie
