#include "storage/engine/reference_counts.h"

#include <iterator>

#include "storage/base/check.h"

namespace kvtrie {

void ReferenceCounts::Add(const TrieNodeId& member, std::span<const RungReference> references) {
  for (const RungReference& reference : references) {
    const bool is_new = rungs_.insert({{reference.node, member}, reference.rung}).second;
    KV_CHECK(is_new);
  }
  if (!references.empty()) members_.insert(member);
}

void ReferenceCounts::Remove(const TrieNodeId& member, std::span<const RungReference> references) {
  for (const RungReference& reference : references) {
    KV_CHECK(rungs_.erase({reference.node, member}) == 1);
  }
  if (!references.empty()) members_.erase(member);
}

void ReferenceCounts::Forget(const TrieNodeId& member) {
  if (members_.erase(member) == 0) return;
  for (auto at = rungs_.begin(); at != rungs_.end();) {
    at = at->first.second == member ? rungs_.erase(at) : std::next(at);
  }
}

bool ReferenceCounts::IsReferenced(const TrieNodeId& node) const {
  const auto first = rungs_.lower_bound({node, TrieNodeId{}});
  return first != rungs_.end() && first->first.first == node;
}

bool ReferenceCounts::IsReferenced(const TrieNodeId& node, Rung rung) const {
  for (auto at = rungs_.lower_bound({node, TrieNodeId{}});
       at != rungs_.end() && at->first.first == node; ++at) {
    if (at->second == rung) return true;
  }
  return false;
}

std::vector<TrieNodeId> ReferenceCounts::MembersOf(const TrieNodeId& node) const {
  std::vector<TrieNodeId> members;
  for (auto at = rungs_.lower_bound({node, TrieNodeId{}});
       at != rungs_.end() && at->first.first == node; ++at) {
    members.push_back(at->first.second);
  }
  return members;
}

}  // namespace kvtrie
