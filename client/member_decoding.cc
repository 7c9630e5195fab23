#include "client/member_decoding.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "client/coding_threads.h"

namespace kvtrie {

MemberDecoding::MemberDecoding(const ModelSpec& spec, std::span<const FetchTarget> targets,
                               CodecOf codec_of, std::vector<MemberFrame> members, int threads)
    : model_(spec.Digest()),
      geometry_(spec),
      targets_(targets),
      codec_of_(std::move(codec_of)),
      members_(std::move(members)),
      threads_(threads) {
  for (const MemberFrame& member : members_) {
    auto table = ReferencesOf(member.view, geometry_.block_tokens());
    // Without one, it cannot be decoded.
    tables_.push_back(table.ok() ? *std::move(table) : ReferenceTable{});
  }
}

std::vector<TrieNodeId> MemberDecoding::References() const {
  std::set<TrieNodeId> nodes;
  for (const ReferenceTable& table : tables_) {
    for (const FrameReference& reference : table.references) nodes.insert(reference.node);
  }
  return {nodes.begin(), nodes.end()};
}

MemberDecoding::DecodedReferences MemberDecoding::DecodeReferences(
    std::span<const std::size_t> group,
    const std::map<TrieNodeId, std::shared_ptr<const ReferenceFrame>>& frames,
    DecodedReferences last) const {
  DecodedReferences decoded;
  std::map<ProfileId, std::vector<Decoded*>> by_profile;
  std::map<const Decoded*, FrameView> views;
  for (const std::size_t m : group) {
    for (const FrameReference& reference : tables_[m].references) {
      if (decoded.contains(reference.node)) continue;
      if (auto kept = last.extract(reference.node)) {
        decoded.insert(std::move(kept));
        continue;
      }
      const auto found = frames.find(reference.node);
      if (found == frames.end()) continue;
      const auto view = FrameView::Parse(found->second->bytes);
      const std::span<const TokenId> tokens = found->second->tokens;
      if (!view.ok() || view->frame_bytes() != found->second->bytes.size() ||
          view->model() != model_ || view->codec() == CodecId::kReferenced ||
          tokens.size() != geometry_.block_tokens() || !view->CheckGeometry(geometry_).ok() ||
          !view->VerifyBody().ok()) {
        continue;
      }
      Decoded& of_node = decoded[reference.node];
      of_node = {found->second,
                 std::make_unique_for_overwrite<std::byte[]>(geometry_.raw_block_bytes())};
      if (view->codec() == CodecId::kRaw) {
        std::copy_n(view->body().begin(), geometry_.raw_block_bytes(), of_node.raw.get());
        continue;
      }
      views.emplace(&of_node, *view);
      by_profile[view->profile()].push_back(&of_node);
    }
  }
  const auto drop = [&decoded](const Decoded* bad) {
    std::erase_if(decoded, [bad](const auto& entry) { return &entry.second == bad; });
  };
  for (const auto& [profile, own] : by_profile) {
    const auto codec = codec_of_(profile);
    std::vector<FrameToDecode> to_decode;
    for (const Decoded* of_node : own) {
      to_decode.push_back({.frame = views.at(of_node),
                           .tokens = of_node->frame->tokens,
                           .raw = {of_node->raw.get(), geometry_.raw_block_bytes()}});
    }
    if (codec.ok() && (*codec)->Decode(to_decode).ok()) continue;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (!codec.ok() || !(*codec)->Decode({&to_decode[i], 1}).ok()) drop(own[i]);
    }
  }
  return decoded;
}

std::vector<std::size_t> MemberDecoding::Decode(
    const std::map<TrieNodeId, std::shared_ptr<const ReferenceFrame>>& frames) {
  std::vector<std::size_t> failed;
  const std::size_t at_once = CodingBlocks(geometry_.block_tokens());
  DecodedReferences references;
  std::vector<std::size_t> all(members_.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const std::size_t group_size = at_once * static_cast<std::size_t>(std::max(threads_, 1));
  for (std::size_t begin = 0; begin < all.size(); begin += group_size) {
    const auto group = std::span(all).subspan(begin, std::min(group_size, all.size() - begin));
    references = DecodeReferences(group, frames, std::move(references));
    std::vector<std::vector<ReferenceBlock>> blocks(group.size());
    std::vector<FrameToDecode> to_decode;
    for (std::size_t g = 0; g < group.size(); ++g) {
      const MemberFrame& member = members_[group[g]];
      for (const FrameReference& reference : tables_[group[g]].references) {
        const auto found = references.find(reference.node);
        if (found == references.end()) continue;  // the codec will miss it
        blocks[g].push_back({.node = reference.node,
                             .first_position = reference.first_position,
                             .tokens = found->second.frame->tokens,
                             .raw = {found->second.raw.get(), geometry_.raw_block_bytes()}});
      }
      to_decode.push_back({.frame = member.view,
                           .tokens = targets_[member.target].tokens,
                           .raw = targets_[member.target].raw,
                           .references = blocks[g]});
    }
    std::vector<char> is_decoded(group.size());  // written by several threads
    OnThreads(threads_, (group.size() + at_once - 1) / at_once, [&](std::size_t part) {
      // Frames of one profile together; where one is bad, each by itself.
      const std::size_t end = std::min(group.size(), (part + 1) * at_once);
      for (std::size_t from = part * at_once, to = from; from < end; from = to) {
        const MemberFrame& first = members_[group[from]];
        while (to < end && members_[group[to]].view.profile() == first.view.profile()) ++to;
        const auto together = std::span(to_decode).subspan(from, to - from);
        const bool all_good = first.codec->Decode(together).ok();
        for (std::size_t g = from; g < to; ++g) {
          is_decoded[g] = all_good || first.codec->Decode({&to_decode[g], 1}).ok() ? 1 : 0;
        }
      }
    });
    for (std::size_t g = 0; g < group.size(); ++g) {
      if (is_decoded[g] == 0) failed.push_back(group[g]);
    }
  }
  return failed;
}

}  // namespace kvtrie
