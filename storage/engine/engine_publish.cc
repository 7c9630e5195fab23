#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/engine/trie_put_session.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

RungRow At(RungRow rung, const PayloadLocation& at) {
  rung.segment = at.segment;
  rung.offset_units = at.offset_units;
  rung.record_bytes = at.record_bytes;
  return rung;
}

}  // namespace

// The thread that finds nobody publishing does it for all that came meanwhile: one row batch for
// many blocks, without a thread of its own.
void Engine::Core::Enqueue(std::vector<PublishItem> items) {
  {
    absl::MutexLock lock(&publish_mutex_);
    std::move(items.begin(), items.end(), std::back_inserter(publish_queue_));
    if (publishing_) return;
    publishing_ = true;
  }
  while (true) {
    std::vector<PublishItem> group;
    {
      absl::MutexLock lock(&publish_mutex_);
      if (publish_queue_.empty()) {
        publishing_ = false;
        return;
      }
      group.assign(std::make_move_iterator(publish_queue_.begin()),
                   std::make_move_iterator(publish_queue_.end()));
      publish_queue_.clear();
    }
    while (!group.empty()) {
      std::vector<Outcome> outcomes;
      {
        absl::MutexLock change(&change_mutex_);
        group = PublishGroup(std::move(group), &outcomes);
      }
      Conclude(std::move(outcomes));
    }
  }
}

Engine::Core::Arrival Engine::Core::ArrivalOf(const IndexNode& node,
                                              const PublishItem& item) const {
  if (!node.has_frame() || node.expired(NowSeconds())) return Arrival::kNew;
  if (item.session->detaches_at && node.codec() == CodecId::kReferenced) return Arrival::kUpgrade;
  const Quality quality = item.rung.quality;
  if (item.session->replaces_larger && node.codec() == CodecId::kResidual &&
      node.quality() == quality && item.at.record_bytes < node.frame.record_bytes) {
    return Arrival::kUpgrade;
  }
  const auto on_rung = node.quality_on(item.rung.rung);
  const bool adds_nothing = (on_rung && IsAtLeast(*on_rung, quality)) ||
                            (!item.session->beside_exact && node.any_serves(quality));
  return adds_nothing ? Arrival::kDuplicate : Arrival::kUpgrade;
}

// The row of a node with the frame of this item.
absl::Status Engine::Core::PrepareNode(const PublishItem& item, NodeRef existing, Arrival arrival,
                                       PendingNode* node) {
  TriePutSession& session = *item.session;
  node->session = item.session;
  node->block = item.block;
  node->id = session.blocks[item.block].id;
  node->existing = existing;
  node->is_upgrade = arrival == Arrival::kUpgrade;
  if (node->is_upgrade) {
    KV_ASSIGN_OR_RETURN(node->row, ReadRow(session.tenant, node->id));
    if (const RungRow* worse = node->row.FindRung(item.rung.rung)) node->dropped = {*worse};
  } else {
    // An expired node makes way, with all that it holds.
    if (existing != 0) node->dropped = RungsOf(existing);
    node->row = session.MakeRow(item.block);
  }
  node->row.SetRung(At(item.rung, item.at));
  return absl::OkStatus();
}

// Sorts finished blocks into those that can be published now, those that wait for the block before
// them, and those that failed; publishes the first with one batch of rows.
std::vector<Engine::Core::PublishItem> Engine::Core::PublishGroup(std::vector<PublishItem> group,
                                                                  std::vector<Outcome>* outcomes) {
  using State = TriePutSession::State;
  std::vector<PendingNode> pending;
  absl::flat_hash_map<TrieNodeId, std::size_t> pending_ids;
  absl::flat_hash_set<TrieNodeId> pending_references;  // what frames of `pending` are coded against
  std::vector<PublishItem> ready;                      // items of `pending`, same order
  // Blocks that another session of this group publishes: stored once that is written.
  std::vector<std::pair<PublishItem, std::size_t>> twins;
  // Other frames of nodes that this group publishes.
  std::vector<PublishItem> next_group;

  std::map<TenantId, MetaBatch> batches;
  NamedEnds session_ends;
  const auto name_session = [&](const TriePutSession& session, const TrieNodeId& node) {
    if (session.session_id.empty()) return;
    session_ends[{session.tenant, session.session_id}] = node;
    batches.try_emplace(session.tenant, session.tenant)
        .first->second.Put(MetaTable::kSessions,
                           SessionRowKey{session.tenant, session.session_id}.Encode(),
                           std::string(node.view()));
  };
  const auto conclude = [&](PublishItem& item, absl::StatusOr<PutBlockResult> result) {
    if (item.at && (!result.ok() || result->outcome == PutOutcome::kDuplicate)) {
      payload_->Free(item.at);  // nobody has been told of it
    }
    if (item.on_done == nullptr) return;
    counters_.put_blocks.fetch_add(1, std::memory_order_relaxed);
    if (!result.ok()) {
      counters_.failed_blocks.fetch_add(1, std::memory_order_relaxed);
    } else if (result->outcome == PutOutcome::kDuplicate) {
      counters_.duplicate_blocks.fetch_add(1, std::memory_order_relaxed);
    } else {
      counters_.stored_blocks.fetch_add(1, std::memory_order_relaxed);
      counters_.stored_bytes.fetch_add(item.at.record_bytes, std::memory_order_relaxed);
      counters_.raw_bytes.fetch_add(item.session->registered->geometry.raw_block_bytes(),
                                    std::memory_order_relaxed);
    }
    outcomes->push_back({std::move(item.on_done), std::move(result), item.session->durable});
  };
  const auto fail = [&](PublishItem item, const absl::Status& why) {
    TriePutSession& session = *item.session;
    session.blocks[item.block].state = State::kFailed;
    conclude(item, why);
    if (session.only_existing) return;
    // All behind it: what waits, and what is still on its way.
    for (std::size_t later = item.block + 1; later < session.blocks.size(); ++later) {
      if (session.blocks[later].state == State::kMissing) {
        session.blocks[later].state = State::kFailed;
      }
    }
    while (!session.parked.empty() && session.parked.rbegin()->first > item.block) {
      auto last = std::prev(session.parked.end());
      PublishItem waiting = std::move(last->second);
      session.parked.erase(last);
      session.blocks[waiting.block].state = State::kFailed;
      conclude(waiting, session.closed
                            ? absl::CancelledError("put: ended before this block was published")
                            : absl::FailedPreconditionError(
                                  absl::StrCat("block ", waiting.block, ": block ", item.block,
                                               " before it was not stored")));
    }
  };
  const auto close = [&](TriePutSession& session) {
    while (!session.parked.empty()) {
      PublishItem waiting = std::move(session.parked.begin()->second);
      session.parked.erase(session.parked.begin());
      conclude(waiting, absl::CancelledError("put: ended before this block was published"));
    }
    absl::MutexLock lock(&index_mutex_);
    if (session.hold.ref != 0) holds_.Release(session.hold);
    session.hold = {};
    for (const HoldTable::Hold& hold : session.reference_holds) holds_.Release(hold);
    session.reference_holds.clear();
    --open_puts_;
  };

  std::vector<PublishItem> work = std::move(group);
  std::reverse(work.begin(), work.end());  // a stack, first item on top
  while (!work.empty()) {
    PublishItem item = std::move(work.back());
    work.pop_back();
    TriePutSession& session = *item.session;
    if (item.block == TriePutSession::kClose) {
      close(session);
      continue;
    }
    if (session.closed && item.failure.ok()) {
      item.failure = absl::CancelledError("put: ended before this block was published");
    }
    TriePutSession::Block& block = session.blocks[item.block];
    if (!item.failure.ok()) {
      const absl::Status why = item.failure;
      if (block.state == State::kMissing) {
        fail(std::move(item), why);
      } else {
        conclude(item, why);
      }
      continue;
    }
    // Frames for nodes that are there wait for no other.
    const State before = item.block == 0 || session.only_existing
                             ? State::kStored
                             : session.blocks[item.block - 1].state;
    if (before == State::kMissing) {
      const std::uint32_t index = item.block;
      session.parked.emplace(index, std::move(item));
      continue;
    }
    if (before == State::kFailed) {
      const absl::Status why = absl::FailedPreconditionError(
          absl::StrCat("block ", item.block, ": the block before it was not stored"));
      fail(std::move(item), why);
      continue;
    }
    NodeRef existing = 0;
    Arrival arrival = Arrival::kNew;
    bool parent_is_there = true;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      if (item.block > 0) {
        const TrieNodeId& parent = session.blocks[item.block - 1].id;
        parent_is_there = pending_ids.contains(parent) || index_.FindById(parent) != 0;
      }
      existing = index_.FindById(block.id);
      if (existing != 0) arrival = ArrivalOf(index_.node(existing), item);
    }
    if (session.only_existing && (existing == 0 || arrival == Arrival::kNew)) {
      const absl::Status why =
          absl::NotFoundError(absl::StrCat("block ", item.block, ": was removed meanwhile"));
      fail(std::move(item), why);
      continue;
    }
    if (!parent_is_there) {
      const absl::Status why = absl::FailedPreconditionError(
          absl::StrCat("block ", item.block, ": the block before it was removed meanwhile"));
      fail(std::move(item), why);
      continue;
    }
    const auto same_in_group = pending_ids.find(block.id);
    const bool is_twin =
        same_in_group != pending_ids.end() &&
        pending[same_in_group->second].row.FindRung(item.rung.rung) != nullptr &&
        IsAtLeast(pending[same_in_group->second].row.FindRung(item.rung.rung)->quality,
                  item.rung.quality);
    // What a frame is coded against neither changes in the same group nor becomes a member in it.
    const auto is_pending = [&pending_ids](const RungReference& reference) {
      return pending_ids.contains(reference.node);
    };
    const bool waits =
        (same_in_group != pending_ids.end() && !is_twin) || pending_references.contains(block.id) ||
        std::any_of(item.rung.references.begin(), item.rung.references.end(), is_pending);
    if (waits) {
      next_group.push_back(std::move(item));
      continue;
    }
    PendingNode node;
    if (!is_twin && arrival != Arrival::kDuplicate) {
      absl::Status prepared = CheckProfile(item);  // it may have been deleted meanwhile
      if (prepared.ok()) prepared = CheckReferences(item);
      if (prepared.ok()) prepared = PrepareNode(item, existing, arrival, &node);
      if (prepared.ok()) prepared = CheckNotNeeded(item, node);
      if (!prepared.ok()) {
        fail(std::move(item), prepared);
        continue;
      }
    }
    if (const auto next = session.parked.find(item.block + 1); next != session.parked.end()) {
      work.push_back(std::move(next->second));
      session.parked.erase(next);
    }
    if (is_twin) {
      block.state = State::kPending;
      twins.emplace_back(std::move(item), same_in_group->second);
      continue;
    }
    if (arrival == Arrival::kDuplicate) {
      block.state = State::kStored;
      name_session(session, block.id);
      conclude(item, PutBlockResult{block.id, PutOutcome::kDuplicate});
      continue;
    }
    block.state = State::kPending;
    for (const RungReference& reference : item.rung.references) {
      pending_references.insert(reference.node);
    }
    pending_ids.emplace(block.id, pending.size());
    pending.push_back(std::move(node));
    ready.push_back(std::move(item));
  }
  for (const PendingNode& node : pending) {
    const TenantId tenant = node.session->tenant;
    MetaBatch& batch = batches.try_emplace(tenant, tenant).first->second;
    batch.Put(MetaTable::kNodes, NodeRowKey{tenant, node.id}.Encode(), node.row.Encode());
    name_session(*node.session, node.id);
  }
  for (const auto& [item, original] : twins) {
    name_session(*item.session, item.session->blocks[item.block].id);
  }
  std::vector<SessionMove> moves = FindMoves(session_ends);
  std::map<TenantId, absl::Status> written;
  for (const auto& [tenant, batch] : batches) written[tenant] = WriteMeta(batch);

  std::vector<PendingNode> published;
  for (std::size_t i = 0; i < pending.size(); ++i) {
    const absl::Status& status = written[pending[i].session->tenant];
    if (!status.ok()) {
      fail(std::move(ready[i]), status);
      continue;
    }
    pending[i].session->blocks[pending[i].block].state = State::kStored;
    pending[i].item = &ready[i];
    published.push_back(std::move(pending[i]));
  }
  for (auto& [item, original] : twins) {
    const TrieNodeId id = item.session->blocks[item.block].id;
    if (const absl::Status& status = written[item.session->tenant]; !status.ok()) {
      fail(std::move(item), status);
    } else {
      item.session->blocks[item.block].state = State::kStored;
      conclude(item, PutBlockResult{id, PutOutcome::kDuplicate});
    }
  }
  std::erase_if(moves, [&](const SessionMove& move) { return !written[move.tenant].ok(); });
  if (!published.empty() || !moves.empty()) AddToIndex(published, moves);
  for (PendingNode& node : published) {
    conclude(*node.item, PutBlockResult{node.id, PutOutcome::kStored});
  }
  return next_group;
}

void Engine::Core::AddToIndex(const std::vector<PendingNode>& published,
                              const std::vector<SessionMove>& moves) {
  std::vector<StoreEvent> events;
  std::vector<PayloadLocation> frees;
  for (const PendingNode& node : published) tier_.Insert(node.item->at, node.item->frame);
  {
    absl::MutexLock lock(&index_mutex_);
    const std::uint32_t now = NowSeconds();
    for (const PendingNode& node : published) {
      const NodeFrames frames = FramesOf(node.row);
      NodeRef ref = node.existing;
      if (ref != 0) {
        for (const RungRow& dropped : node.dropped) {
          UncountFrame(ref, dropped);
          frees.push_back(LocationOf(dropped));
        }
        index_.SetFrames(ref, frames);
        index_.SetRetention(ref, static_cast<std::uint32_t>(node.row.expires_unix_seconds),
                            node.row.priority);
      } else {
        const std::vector<std::uint32_t>& missing = node.session->missing_blocks;
        const NodeRef parent = node.block == 0 ? 0 : index_.FindById(node.row.parent);
        ref = index_.Insert(
            {.id = node.id,
             .parent = parent,
             .model = node.session->slot,
             .path_hash = node.row.path_hash,
             .provenance = node.row.provenance,
             .salt = node.row.salt,
             .extra_key = node.row.extra_key,
             .tokens = node.row.tokens,
             .frames = frames,
             .block_surprisal_bits = node.row.surprisal_bits,
             .last_used_seconds = now,
             .traffic = retention_.Arrives(
                 node.id, parent,
                 {.new_blocks = missing.size(), .is_first = node.block == missing.front()}, now),
             .expires_seconds = static_cast<std::uint32_t>(node.row.expires_unix_seconds),
             .priority = node.row.priority});
        runs_->Add(index_, ref,
                   TextSpaceOf(node.session->tenant, node.session->model, node.session->salt));
        groups_.OnInserted(ref);
        retention_.OnInsert(ref);
      }
      CountFrame(ref, *node.row.FindRung(node.item->rung.rung));
      if (node.row.expires_unix_seconds != 0) {
        expiries_.emplace(static_cast<std::uint32_t>(node.row.expires_unix_seconds), node.id);
      }
      TriePutSession& session = *node.session;
      const bool is_deepest = session.hold.ref == 0 || !index_.alive(session.hold.ref) ||
                              index_.node(session.hold.ref).depth < index_.node(ref).depth;
      if (!session.closed && is_deepest) {
        HoldTable::Hold hold{ref, node.id};
        holds_.Take(hold);
        if (session.hold.ref != 0) holds_.Release(session.hold);
        session.hold = hold;
      }
      if (node.is_upgrade) continue;
      events.push_back({.kind = StoreEventKind::kStored,
                        .tenant = session.tenant,
                        .model = session.model,
                        .node = node.id,
                        .parent = node.row.parent,
                        .depth = node.row.depth,
                        .tokens = node.row.tokens});
    }
    MoveSessions(moves);
  }
  FreeLater(frees);
  events_.Append(std::move(events));
}

void Engine::Core::Conclude(std::vector<Outcome> outcomes) {
  std::vector<Outcome> durable;
  for (Outcome& outcome : outcomes) {
    if (outcome.durable && outcome.result.ok()) {
      durable.push_back(std::move(outcome));
    } else {
      outcome.on_done(std::move(outcome.result));
    }
  }
  if (durable.empty()) return;
  absl::MutexLock lock(&sync_mutex_);
  std::move(durable.begin(), durable.end(), std::back_inserter(durable_waiters_));
}

}  // namespace kvtrie
