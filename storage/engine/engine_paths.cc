#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/random_id.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// The exact frame goes where a coded one reaches the level; nullopt: nothing goes.
std::optional<RungRow> DropAbove(Quality level, NodeRow* row) {
  const RungRow* coded = row->FindRung(Rung::kCoded);
  const RungRow* exact = row->FindRung(Rung::kExact);
  if (coded == nullptr || exact == nullptr) return std::nullopt;
  if (!IsAtLeast(ServedQuality(*row, *coded), level) ||
      IsAtLeast(level, ServedQuality(*row, *exact))) {
    return std::nullopt;
  }
  const RungRow dropped = *exact;
  row->rungs = {*coded};
  return dropped;
}

}  // namespace

absl::StatusOr<std::vector<std::pair<NodeRef, TrieNodeId>>> Engine::Core::SelectPath(
    TenantId tenant, const Selection& selection) {
  std::vector<std::pair<NodeRef, TrieNodeId>> nodes;
  if (selection.path) {
    ModelSlot slot;
    std::uint32_t block_tokens;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      KV_ASSIGN_OR_RETURN(slot, FindRegistered(tenant, selection.path->model));
      block_tokens = index_.model(slot).block_tokens;
    }
    return Walk(slot, tenant, *selection.path, block_tokens, Quality::kUnrated,
                /*may_block=*/true)
        ->nodes;
  }
  std::optional<TrieNodeId> deepest = selection.node;
  if (!deepest) {
    const auto row = meta_->Get(MetaTable::kSessions,
                                SessionRowKey{tenant, std::string(selection.session_id)}.Encode());
    if (!row.ok()) return row.status();
    if (row->has_value()) deepest = TrieNodeId::FromBytes(**row);
    if (!deepest) return nodes;
  }
  absl::ReaderMutexLock lock(&index_mutex_);
  NodeRef ref = index_.FindById(*deepest);
  if (ref == 0 || index_.model(index_.node(ref).model).tenant != tenant) return nodes;
  for (; ref != 0; ref = index_.parent(ref)) nodes.emplace_back(ref, index_.node(ref).id);
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

absl::StatusOr<std::uint32_t> Engine::Core::Touch(TenantId tenant, const Selection& selection) {
  if (selection.model || selection.all) {
    return absl::InvalidArgumentError("selection: name a node, a prefix or a session");
  }
  KV_ASSIGN_OR_RETURN(const auto nodes, SelectPath(tenant, selection));
  const std::uint32_t now = NowSeconds();
  std::uint32_t touched = 0;
  absl::ReaderMutexLock lock(&index_mutex_);
  RetentionPolicy::Uses uses(retention_);
  for (const auto& [ref, id] : nodes) {
    if (!index_.alive(ref) || index_.node(ref).id != id) break;
    uses.Add(ref, now);
    index_.Touch(ref, now);
    ++touched;
  }
  return touched;
}

absl::StatusOr<PinInfo> Engine::Core::Pin(TenantId tenant, const Selection& selection,
                                          std::chrono::seconds duration) {
  if (!selection.node && !selection.path) {
    return absl::InvalidArgumentError("selection: a pin takes node_id or prefix");
  }
  if (duration.count() < 1 || duration > options_.pin_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("seconds: must be between 1 and ", options_.pin_max.count()));
  }
  KV_ASSIGN_OR_RETURN(const auto nodes, SelectPath(tenant, selection));
  if (nodes.empty()) return NothingSelected();

  absl::MutexLock change(&change_mutex_);
  PinInfo info{.id = RandomId<PinId>(),
               .node = nodes.back().second,
               .blocks = static_cast<std::uint32_t>(nodes.size()),
               .bytes = 0,
               .end_unix_seconds = clock_.UnixSeconds() + duration.count()};
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [ref, id] : nodes) {
      if (!index_.alive(ref) || index_.node(ref).id != id) return NothingSelected();
      info.bytes += StoredBytes(index_.node(ref));
    }
    const std::uint64_t cap = options_.disk_limit_bytes / 100 * options_.pinned_percent_max;
    if (holds_.pinned_bytes() + info.bytes > cap) {
      return absl::ResourceExhaustedError(
          absl::StrCat("pin: ", info.bytes, " bytes are over the cap; free under it: ",
                       cap > holds_.pinned_bytes() ? cap - holds_.pinned_bytes() : 0));
    }
  }
  MetaBatch batch(tenant);
  batch.Put(MetaTable::kPins, PinRowKey{tenant, info.id}.Encode(),
            PinRow{info.node, info.end_unix_seconds}.Encode());
  KV_RETURN_IF_ERROR(WriteMeta(batch));
  absl::MutexLock lock(&index_mutex_);
  holds_.AddPin(info.id, {.tenant = tenant,
                          .hold = {nodes.back().first, info.node},
                          .blocks = info.blocks,
                          .bytes = info.bytes,
                          .end_unix_seconds = info.end_unix_seconds});
  return info;
}

absl::StatusOr<PinInfo> Engine::Core::ExtendPin(TenantId tenant, const PinId& pin,
                                                std::chrono::seconds duration) {
  if (duration.count() < 1 || duration > options_.pin_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("seconds: must be between 1 and ", options_.pin_max.count()));
  }
  absl::MutexLock change(&change_mutex_);
  PinInfo info;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const HoldTable::Pin* found = holds_.FindPin(tenant, pin);
    if (found == nullptr) return absl::NotFoundError("pin_id: unknown, or the pin has ended");
    info = {pin, found->hold.id, found->blocks, found->bytes,
            clock_.UnixSeconds() + duration.count()};
  }
  MetaBatch batch(tenant);
  batch.Put(MetaTable::kPins, PinRowKey{tenant, pin}.Encode(),
            PinRow{info.node, info.end_unix_seconds}.Encode());
  KV_RETURN_IF_ERROR(WriteMeta(batch));
  absl::MutexLock lock(&index_mutex_);
  holds_.SetPinEnd(pin, info.end_unix_seconds);
  return info;
}

absl::StatusOr<bool> Engine::Core::Unpin(TenantId tenant, const PinId& pin) {
  absl::MutexLock change(&change_mutex_);
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    if (holds_.FindPin(tenant, pin) == nullptr) return false;
  }
  MetaBatch batch(tenant);
  batch.Delete(MetaTable::kPins, PinRowKey{tenant, pin}.Encode());
  KV_RETURN_IF_ERROR(WriteMeta(batch));
  absl::MutexLock lock(&index_mutex_);
  holds_.DropPin(pin);
  return true;
}

std::vector<PinInfo> Engine::Core::ListPins(TenantId tenant) {
  std::vector<PinInfo> infos;
  absl::ReaderMutexLock lock(&index_mutex_);
  for (const auto& [id, pin] : holds_.pins()) {
    if (pin.tenant != tenant) continue;
    infos.push_back({id, pin.hold.id, pin.blocks, pin.bytes, pin.end_unix_seconds});
  }
  return infos;
}

std::uint32_t Engine::Core::ExpiryOf(std::chrono::seconds ttl) const {
  if (ttl.count() == 0) return 0;
  const std::int64_t left = std::int64_t{std::numeric_limits<std::uint32_t>::max()} - NowSeconds();
  return NowSeconds() + static_cast<std::uint32_t>(std::min<std::int64_t>(ttl.count(), left));
}

absl::StatusOr<RetentionChange> Engine::Core::SetRetention(TenantId tenant,
                                                           const Selection& selection,
                                                           const Retention& retention) {
  if (!retention.ttl && !retention.priority && !retention.quality) {
    return absl::InvalidArgumentError(
        "ttl_seconds, priority, quality: none is given; at least one must be");
  }
  if (retention.priority.value_or(0) > 15) {
    return absl::InvalidArgumentError("priority: must be between 0 and 15");
  }
  if (retention.ttl && retention.ttl->count() < 0) {
    return absl::InvalidArgumentError("ttl: must not be negative");
  }
  std::vector<std::pair<NodeRef, TrieNodeId>> nodes;
  if (selection.model || selection.all) {
    absl::ReaderMutexLock lock(&index_mutex_);
    std::optional<ModelSlot> only;
    if (selection.model) {
      KV_ASSIGN_OR_RETURN(only, FindRegistered(tenant, *selection.model));
    }
    for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
      if (!index_.alive(ref)) continue;
      const IndexNode& node = index_.node(ref);
      if (only ? node.model == *only : index_.model(node.model).tenant == tenant) {
        nodes.emplace_back(ref, node.id);
      }
    }
  } else {
    KV_ASSIGN_OR_RETURN(nodes, SelectPath(tenant, selection));
    if (nodes.empty()) return NothingSelected();
  }

  RetentionChange change;
  constexpr std::size_t kRowsPerBatch = 1024;
  for (std::size_t begin = 0; begin < nodes.size(); begin += kRowsPerBatch) {
    const auto piece =
        std::span(nodes).subspan(begin, std::min(kRowsPerBatch, nodes.size() - begin));
    KV_RETURN_IF_ERROR(SetRetentionOf(tenant, piece, retention, &change));
  }
  return change;
}

absl::Status Engine::Core::SetRetentionOf(TenantId tenant,
                                          std::span<const std::pair<NodeRef, TrieNodeId>> nodes,
                                          const Retention& retention, RetentionChange* change) {
  struct Changed {
    TrieNodeId id;
    NodeRow row;
    std::optional<RungRow> dropped;
    bool is_above = false;  // of the level
  };
  absl::MutexLock change_lock(&change_mutex_);
  std::vector<Changed> changes;
  MetaBatch batch(tenant);
  for (const auto& [_, id] : nodes) {
    const std::string row_key = NodeRowKey{tenant, id}.Encode();
    KV_ASSIGN_OR_RETURN(const auto text, meta_->Get(MetaTable::kNodes, row_key));
    if (!text.has_value()) continue;
    KV_ASSIGN_OR_RETURN(NodeRow row, NodeRow::Decode(*text));
    if (retention.ttl) row.expires_unix_seconds = ExpiryOf(*retention.ttl);
    if (retention.priority) row.priority = static_cast<std::uint8_t>(*retention.priority);
    Changed changed{.id = id, .row = std::move(row), .dropped = {}};
    if (const std::optional<Quality> level = retention.quality) {
      bool is_needed;  // by others that were coded against it
      {
        absl::ReaderMutexLock lock(&index_mutex_);
        is_needed = references_.IsReferenced(id, Rung::kExact);
      }
      if (!is_needed) changed.dropped = DropAbove(*level, &changed.row);
      changed.is_above = std::any_of(changed.row.rungs.begin(), changed.row.rungs.end(),
                                     [&](const RungRow& rung) {
                                       return !IsAtLeast(*level, ServedQuality(changed.row, rung));
                                     }) &&
                         !changed.dropped;
    }
    batch.Put(MetaTable::kNodes, row_key, changed.row.Encode());
    changes.push_back(std::move(changed));
  }
  KV_RETURN_IF_ERROR(WriteRemoval(batch));
  std::vector<PayloadLocation> frees;
  {
    absl::MutexLock lock(&index_mutex_);
    for (const Changed& changed : changes) {
      const NodeRef ref = index_.FindById(changed.id);
      KV_CHECK(ref != 0);  // its row is there, and changes stand still
      const auto expires = static_cast<std::uint32_t>(changed.row.expires_unix_seconds);
      index_.SetRetention(ref, expires, changed.row.priority);
      if (retention.ttl && expires != 0) expiries_.emplace(expires, changed.id);
      ++(changed.is_above ? change->unchanged_blocks : change->changed_blocks);
      if (!changed.dropped) continue;
      index_.SetFrames(ref, FramesOf(changed.row));
      UncountFrame(ref, *changed.dropped);
      frees.push_back(LocationOf(*changed.dropped));
      change->freed_bytes += frees.back().disk_bytes();
    }
  }
  change->dropped_frames += frees.size();
  FreeLater(frees);
  return absl::OkStatus();
}

}  // namespace kvtrie
