#include <algorithm>
#include <utility>

#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/group/group_tree.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// What a look at a group finds, in the words of the engine.
GroupInfo InfoOf(const TrieIndex& index, NodeRef cut, const GroupSums& sums) {
  const IndexNode& node = index.node(cut);
  return {.id = node.id,
          .model = index.model(node.model).model,
          .sessions = sums.sessions,
          .shared_blocks = sums.shared_blocks,
          .shared_bits = sums.shared_bits,
          .shared_bits_estimated = sums.is_estimated,
          .shared_end = index.node(sums.shared_end).id,
          .blocks = sums.blocks,
          .stored_bytes = sums.stored_bytes,
          .saved_bytes = sums.saved_bytes,
          .centroid_end = index.node(sums.centroid_end).id,
          .centroid_blocks = sums.centroid_blocks};
}

}  // namespace

std::vector<Engine::Core::SessionMove> Engine::Core::FindMoves(const NamedEnds& ends) {
  std::vector<SessionMove> moves;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [session, end] : ends) {
      const NodeRef known = session_ends_.EndOf(session.first, session.second);
      moves.push_back({.tenant = session.first,
                       .session = session.second,
                       .from = known == 0 ? TrieNodeId{} : index_.node(known).id,
                       .to = end});
    }
  }
  if (options_.group_threshold_bits == 0) return moves;
  for (SessionMove& move : moves) {
    if (!move.from.empty()) continue;
    const auto row =
        meta_->Get(MetaTable::kSessions, SessionRowKey{move.tenant, move.session}.Encode());
    if (row.ok() && row->has_value()) {
      move.from = TrieNodeId::FromBytes(**row).value_or(TrieNodeId{});
    }
  }
  return moves;
}

void Engine::Core::MoveSessions(const std::vector<SessionMove>& moves) {
  const auto find = [this](const TrieNodeId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_) {
    return id.empty() ? 0 : index_.FindById(id);
  };
  for (const SessionMove& move : moves) {
    const NodeRef to = find(move.to);
    if (groups_.enabled() && move.from != move.to) {
      if (const NodeRef from = find(move.from); from != 0) groups_.RemoveName(from);
      if (to != 0) groups_.AddName(to);
    }
    if (to != 0) {
      session_ends_.Set(move.tenant, move.session, to);
    } else if (move.to.empty()) {
      session_ends_.Remove(move.tenant, move.session);
    }
  }
}

// Names are not in the rows of nodes. Those whose last block is gone are swept with their rows.
void Engine::Core::LoadSessions() {
  absl::flat_hash_map<NodeRef, std::uint32_t> names;
  const absl::Status scanned =
      meta_->Scan(MetaTable::kSessions, "", "", [&](std::string_view key, std::string_view value) {
        const auto row_key = SessionRowKey::Decode(key);
        const auto end = TrieNodeId::FromBytes(value);
        if (!row_key || !end) return true;
        absl::MutexLock lock(&index_mutex_);
        const NodeRef ref = index_.FindById(*end);
        if (ref == 0 || index_.model(index_.node(ref).model).tenant != row_key->tenant) return true;
        session_ends_.Set(row_key->tenant, row_key->session_id, ref);
        ++names[ref];
        return true;
      });
  if (!scanned.ok()) {
    recovery_.notes.push_back(
        "names of sessions could not be read; groups count unnamed sessions only");
  }
  absl::MutexLock lock(&index_mutex_);
  if (!groups_.enabled()) return;
  for (const auto& [ref, count] : names) index_.SetNameCount(ref, count);
  groups_.Rebuild();
}

TrieNodeId Engine::Core::GroupOfPath(const std::vector<std::pair<NodeRef, TrieNodeId>>& nodes,
                                     std::size_t matched) const {
  if (!groups_.enabled()) return {};
  // Surprisal grows along a path.
  const auto end = nodes.begin() + static_cast<std::ptrdiff_t>(matched);
  const auto cut = std::partition_point(
      nodes.begin(), end, [this](const auto& node) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
        return groups_.IsBelowThreshold(node.first);
      });
  return cut != end && groups_.SessionCount(cut->first) > 0 ? cut->second : TrieNodeId{};
}

absl::StatusOr<std::optional<TrieNodeId>> Engine::Core::GroupOf(TenantId tenant,
                                                                const TrieNodeId& node) {
  absl::ReaderMutexLock lock(&index_mutex_);
  const NodeRef ref = index_.FindById(node);
  if (ref == 0 || index_.model(index_.node(ref).model).tenant != tenant) {
    return absl::NotFoundError("node_id: there is no such trie node");
  }
  const NodeRef cut = groups_.CutOf(ref);
  if (cut == 0 || groups_.SessionCount(cut) == 0) return std::optional<TrieNodeId>();
  return std::optional(index_.node(cut).id);
}

absl::StatusOr<GroupPage> Engine::Core::ListGroups(TenantId tenant, const TrieNodeId& after,
                                                   std::size_t count) {
  std::vector<std::pair<NodeRef, TrieNodeId>> cuts;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    NodeRef after_ref = 0;
    if (!after.empty()) {
      after_ref = index_.FindById(after);
      if (after_ref == 0 || index_.model(index_.node(after_ref).model).tenant != tenant) {
        return absl::NotFoundError("page_token: its group is gone; start again");
      }
    }
    const auto is_own = [&](NodeRef cut) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      return index_.model(index_.node(cut).model).tenant == tenant;
    };
    for (const NodeRef cut : groups_.List(after_ref, count, is_own)) {
      cuts.emplace_back(cut, index_.node(cut).id);
    }
  }
  GroupPage page;
  if (cuts.size() == count && count > 0) page.next = cuts.back().second;
  page.groups.reserve(cuts.size());
  for (const auto& [cut, id] : cuts) {
    // One lock for each: a look at all of a group is long enough.
    absl::ReaderMutexLock lock(&index_mutex_);
    if (!index_.alive(cut) || index_.node(cut).id != id || groups_.SessionCount(cut) == 0) continue;
    const GroupTree tree(index_, cut, [this](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      return StoredBytes(index_.node(ref));
    });
    page.groups.push_back(InfoOf(index_, cut, tree.sums()));
  }
  return page;
}

absl::StatusOr<GroupDescription> Engine::Core::DescribeGroup(TenantId tenant, const TrieNodeId& id,
                                                             std::size_t branches_max) {
  absl::ReaderMutexLock lock(&index_mutex_);
  const NodeRef cut = index_.FindById(id);
  if (cut == 0 || index_.model(index_.node(cut).model).tenant != tenant ||
      groups_.SessionCount(cut) == 0) {
    return absl::NotFoundError("group_id: no such group; it may have dissolved");
  }
  const GroupTree tree(index_, cut, [this](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    return StoredBytes(index_.node(ref));
  });
  GroupDescription described;
  described.group = InfoOf(index_, cut, tree.sums());
  for (const GroupBranch& branch : tree.Branches(branches_max, &described.is_all)) {
    described.branches.push_back({.parent = branch.parent,
                                  .first = index_.node(branch.first).id,
                                  .last = index_.node(branch.last).id,
                                  .blocks = branch.blocks,
                                  .surprisal_bits = branch.surprisal_bits,
                                  .surprisal_estimated = branch.is_estimated,
                                  .stored_bytes = branch.stored_bytes,
                                  .sessions = branch.sessions,
                                  .probability = branch.probability,
                                  .on_centroid = branch.on_centroid});
  }
  return described;
}

}  // namespace kvtrie
