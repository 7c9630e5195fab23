#include "client/reference_decoding.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace kvtrie {
namespace {

// The frame, if it can be decoded by itself.
std::optional<FrameView> ParseGood(const ReferenceFrame& frame, const KvGeometry& geometry,
                                   const ModelId& model) {
  const auto view = FrameView::Parse(frame.bytes);
  const bool is_good = view.ok() && view->frame_bytes() == frame.bytes.size() &&
                       view->model() == model && view->codec() != CodecId::kReferenced &&
                       frame.tokens.size() == geometry.block_tokens() &&
                       view->CheckGeometry(geometry).ok() && view->VerifyBody().ok();
  return is_good ? std::optional(*view) : std::nullopt;
}

}  // namespace

DecodedReferences DecodeReferences(const KvGeometry& geometry, const ModelId& model,
                                   std::span<const TrieNodeId> nodes, const ReferenceFrames& frames,
                                   const CodecOf& codec_of, DecodedReferences last) {
  struct ToDecode {
    TrieNodeId node;
    FrameView view;
  };
  DecodedReferences decoded;
  std::map<ProfileId, std::vector<ToDecode>> by_profile;
  for (const TrieNodeId& node : nodes) {
    if (decoded.contains(node)) continue;
    if (auto kept = last.extract(node)) {
      decoded.insert(std::move(kept));
      continue;
    }
    const auto found = frames.find(node);
    if (found == frames.end()) continue;
    const auto view = ParseGood(*found->second, geometry, model);
    if (!view) continue;
    DecodedReference& reference = decoded[node];
    reference.frame = found->second;
    reference.raw = std::make_unique_for_overwrite<std::byte[]>(geometry.raw_block_bytes());
    reference.quality = view->quality();
    if (view->codec() == CodecId::kRaw) {
      std::copy_n(view->body().begin(), geometry.raw_block_bytes(), reference.raw.get());
    } else {
      reference.first_position = view->binding().first_position;
      by_profile[view->profile()].push_back({node, *view});
    }
  }
  for (const auto& [profile, own] : by_profile) {
    const auto codec = codec_of(profile);
    std::vector<FrameToDecode> to_decode;
    for (const ToDecode& one : own) {
      const DecodedReference& reference = decoded.at(one.node);
      to_decode.push_back({.frame = one.view,
                           .tokens = reference.frame->tokens,
                           .raw = {reference.raw.get(), geometry.raw_block_bytes()}});
    }
    if (codec.ok() && (*codec)->Decode(to_decode).ok()) continue;
    // One of them at least is bad: which?
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (!codec.ok() || !(*codec)->Decode({&to_decode[i], 1}).ok()) decoded.erase(own[i].node);
    }
  }
  return decoded;
}

}  // namespace kvtrie
