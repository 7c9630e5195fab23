#include "client/member_decoding.h"

#include <algorithm>
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

std::vector<std::size_t> MemberDecoding::Decode(const ReferenceFrames& frames) {
  std::vector<std::size_t> failed;
  const std::size_t at_once = CodingBlocks(geometry_.block_tokens());
  DecodedReferences references;
  std::vector<std::size_t> all(members_.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const std::size_t group_size = at_once * static_cast<std::size_t>(std::max(threads_, 1));
  for (std::size_t begin = 0; begin < all.size(); begin += group_size) {
    const auto group = std::span(all).subspan(begin, std::min(group_size, all.size() - begin));
    std::vector<TrieNodeId> nodes;
    for (const std::size_t member : group) {
      for (const FrameReference& reference : tables_[member].references) {
        nodes.push_back(reference.node);
      }
    }
    references =
        DecodeReferences(geometry_, model_, nodes, frames, codec_of_, std::move(references));
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
