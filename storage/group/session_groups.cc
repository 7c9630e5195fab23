#include "storage/group/session_groups.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace kvtrie {

std::uint32_t SessionGroups::SessionsEndingAt(NodeRef ref, bool is_leaf) const {
  return std::max(index_.name_count(ref), is_leaf ? 1u : 0u);
}

NodeRef SessionGroups::CutOf(NodeRef ref) const {
  if (!enabled() || IsBelowThreshold(ref)) return 0;
  for (NodeRef up = index_.parent(ref); up != 0 && !IsBelowThreshold(up); up = index_.parent(up)) {
    ref = up;
  }
  return ref;
}

std::uint32_t SessionGroups::SessionCount(NodeRef cut) const {
  const auto found = session_counts_.find(cut);
  return found == session_counts_.end() ? 0 : found->second;
}

// So many sessions more end at or below this node, if it has a cut node.
void SessionGroups::Add(NodeRef ref, std::int64_t sessions) {
  if (sessions == 0) return;
  const NodeRef cut = CutOf(ref);
  if (cut == 0) return;
  const auto found = session_counts_.find(cut);
  // A node that is there has a leaf at or below it.
  const std::int64_t before = found == session_counts_.end() ? 1 : found->second;
  const std::int64_t after = before + sessions;
  if (after < 2) {
    if (found != session_counts_.end()) session_counts_.erase(found);
  } else {
    session_counts_[cut] = static_cast<std::uint32_t>(after);
  }
}

void SessionGroups::OnInserted(NodeRef ref) {
  if (!enabled()) return;
  const NodeRef parent = index_.parent(ref);
  // Above the threshold nothing is counted, and a new cut node has one session.
  if (parent == 0 || IsBelowThreshold(parent)) return;
  const bool was_leaf =
      index_.node(parent).first_child == ref && index_.node(ref).next_sibling == 0;
  const std::int64_t before = SessionsEndingAt(parent, was_leaf);
  const std::int64_t after = SessionsEndingAt(parent, false);
  Add(parent, 1 + after - before);
}

void SessionGroups::OnErasing(NodeRef ref) {
  if (!enabled() || IsBelowThreshold(ref)) return;
  const NodeRef parent = index_.parent(ref);
  if (parent == 0 || IsBelowThreshold(parent)) {
    session_counts_.erase(ref);
    return;
  }
  const bool becomes_leaf =
      index_.node(parent).first_child == ref && index_.node(ref).next_sibling == 0;
  const std::int64_t here = SessionsEndingAt(ref, true);
  const std::int64_t before = SessionsEndingAt(parent, false);
  const std::int64_t after = SessionsEndingAt(parent, becomes_leaf);
  Add(parent, after - before - here);
}

void SessionGroups::SetNames(NodeRef ref, std::uint32_t count) {
  const bool is_leaf = index_.node(ref).is_leaf();
  const std::int64_t before = SessionsEndingAt(ref, is_leaf);
  index_.SetNameCount(ref, count);
  Add(ref, SessionsEndingAt(ref, is_leaf) - before);
}

void SessionGroups::AddName(NodeRef ref) { SetNames(ref, index_.name_count(ref) + 1); }

void SessionGroups::RemoveName(NodeRef ref) {
  const std::uint32_t count = index_.name_count(ref);
  if (count > 0) SetNames(ref, count - 1);
}

std::uint64_t SessionGroups::CountBelow(NodeRef cut) const {
  std::uint64_t sessions = 0;
  std::vector<NodeRef> stack = {cut};
  while (!stack.empty()) {
    const NodeRef ref = stack.back();
    stack.pop_back();
    const IndexNode& node = index_.node(ref);
    sessions += SessionsEndingAt(ref, node.is_leaf());
    for (NodeRef child = node.first_child; child != 0; child = index_.node(child).next_sibling) {
      stack.push_back(child);
    }
  }
  return sessions;
}

SessionGroups::SessionCounts SessionGroups::CountAnew() const {
  SessionCounts counts;
  if (!enabled()) return counts;
  std::vector<NodeRef> above;
  const auto look_at_children = [&](NodeRef first) {
    for (NodeRef child = first; child != 0; child = index_.node(child).next_sibling) {
      if (IsBelowThreshold(child)) {
        above.push_back(child);
      } else if (const std::uint64_t sessions = CountBelow(child); sessions >= 2) {
        counts.emplace(child, static_cast<std::uint32_t>(sessions));
      }
    }
  };
  for (std::size_t slot = 0; slot < index_.model_count(); ++slot) {
    look_at_children(index_.model(static_cast<ModelSlot>(slot)).first_child);
  }
  while (!above.empty()) {
    const NodeRef ref = above.back();
    above.pop_back();
    look_at_children(index_.node(ref).first_child);
  }
  return counts;
}

void SessionGroups::Rebuild() { session_counts_ = CountAnew(); }

std::vector<NodeRef> SessionGroups::List(NodeRef after, std::size_t count,
                                         const std::function<bool(NodeRef)>& pass) const {
  std::vector<NodeRef> cuts;
  for (auto at = session_counts_.upper_bound(after);
       at != session_counts_.end() && cuts.size() < count; ++at) {
    if (pass(at->first)) cuts.push_back(at->first);
  }
  return cuts;
}

std::size_t SessionGroups::memory_bytes() const {
  // Nodes of the tree are at least half full, but for the root.
  return session_counts_.size() * 2 * sizeof(SessionCounts::value_type);
}

absl::Status SessionGroups::CheckInvariants() const {
  const SessionCounts counts = CountAnew();
  if (counts == session_counts_) return absl::OkStatus();
  for (const auto& [cut, sessions] : counts) {
    if (SessionCount(cut) != sessions) {
      return absl::InternalError(absl::StrCat("group of trie node ", cut, ": counts ",
                                              SessionCount(cut), " sessions; there are ",
                                              sessions));
    }
  }
  return absl::InternalError("groups: one has no sessions");
}

}  // namespace kvtrie
