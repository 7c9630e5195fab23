#include "storage/engine/engine.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/random_id.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

absl::Status NoSuchModel(const ModelId& model) {
  return absl::NotFoundError(
      absl::StrCat("model_id ", model.ToHex(), ": not registered; call RegisterModel first"));
}

// Differs for every run, so that watchers see that the numbers begin again.
std::uint64_t NewEpoch() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

// A node with two frames has one on each rung.
std::uint8_t RungBitsOf(const IndexNode& node) {
  const std::uint8_t both = RungBit(Rung::kCoded) | RungBit(Rung::kExact);
  return static_cast<std::uint8_t>(RungBit(Rung::kTokens) |
                                   (node.has_other() ? both : RungBit(RungOf(node.codec()))));
}

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

absl::Status NoSuchNode() { return absl::NotFoundError("selection: nothing of it is stored"); }

}  // namespace

RegisteredModel::RegisteredModel(const ModelSpec& from)
    : spec(from),
      geometry(from),
      codec_key(from.CodecKey()),
      raw_frame_bytes(FrameHeaderBytes(RawSectionBytes(geometry).size()) +
                      geometry.raw_block_bytes()) {}

Quality ServedQuality(const NodeRow& row, const RungRow& rung) {
  // What calls itself exact on a lossy prefix has no level that we know.
  return row.provenance == Provenance::kOnLossy && rung.quality == Quality::kExact
             ? Quality::kUnrated
             : rung.quality;
}

NodeFrames FramesOf(const NodeRow& row) {
  const RungRow* frame = nullptr;
  const RungRow* other = nullptr;
  for (const RungRow& rung : row.rungs) {
    if (frame == nullptr || rung.record_bytes < frame->record_bytes ||
        (rung.record_bytes == frame->record_bytes && IsAtLeast(rung.quality, frame->quality))) {
      other = std::exchange(frame, &rung);
    } else {
      other = &rung;
    }
  }
  NodeFrames frames;
  if (frame != nullptr) {
    frames.frame = {frame->segment, frame->offset_units, frame->record_bytes};
    frames.quality = ServedQuality(row, *frame);
    frames.codec = frame->codec;
  }
  if (other != nullptr) frames.other_quality = ServedQuality(row, *other);
  return frames;
}

Engine::Core::Core(const EngineOptions& options, Clock& clock,
                   std::shared_ptr<const BlockDecoder> decoder)
    : options_(options),
      clock_(clock),
      events_(NewEpoch(), options.event_log_max),
      put_budget_(options.put_memory_bytes),
      decoder_(std::move(decoder)),
      tier_(options.memory_tier_bytes),
      index_(options.token_cache_bytes) {}

Engine::Core::~Core() {
  // Opening failed: nothing is under way, and the payload store may not take frees yet.
  closing_ = true;
  if (prefaulter_.joinable()) prefaulter_.join();
  if (!opened_) return;
  // Pools run out first, and stay: their work may post to one another and hand things to the
  // syncer.
  blocking_pool_->Finish();
  read_pool_->Finish();
  decode_pool_->Finish();
  write_pool_->Finish();
  {
    absl::MutexLock lock(&sync_mutex_);
    ending_ = true;
  }
  if (syncer_.joinable()) syncer_.join();
  SyncAndFree().IgnoreError();
}

std::uint64_t Engine::Core::RawFrameBytes(ModelSlot slot) const {
  const auto model = models_.find(slot);
  return model == models_.end() ? 0 : model->second->raw_frame_bytes;
}

std::uint64_t Engine::Core::StoredBytes(const IndexNode& node) const {
  return node.frame.record_bytes + (node.has_other() ? RawFrameBytes(node.model) : 0);
}

// --- models ---

absl::StatusOr<ModelSlot> Engine::Core::FindRegistered(TenantId tenant,
                                                       const ModelId& model) const {
  const auto slot = index_.FindModel(tenant, model);
  if (!slot || !models_.contains(*slot)) return NoSuchModel(model);
  return *slot;
}

ModelInfo Engine::Core::DescribeModel(ModelSlot slot) const {
  const RegisteredModel& model = *models_.find(slot)->second;
  const ModelRoot& root = index_.model(slot);
  return {.id = root.model,
          .spec = model.spec,
          .raw_block_bytes = model.geometry.raw_block_bytes(),
          .node_count = root.node_count,
          .stored_bytes = census_.OfModel(slot).bytes,
          .profile =
              model.spec.layout_tag.empty() ? profiles_->NewestFor(model.codec_key) : ProfileId{}};
}

absl::StatusOr<ModelInfo> Engine::Core::RegisterModel(TenantId tenant, const ModelSpec& spec) {
  KV_RETURN_IF_ERROR(spec.Validate());
  const ModelId id = spec.Digest();
  absl::MutexLock change(&change_mutex_);
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    if (const auto slot = FindRegistered(tenant, id); slot.ok()) return DescribeModel(*slot);
  }
  MetaBatch batch(tenant);
  batch.Put(MetaTable::kModels, ModelRowKey{tenant, id}.Encode(), spec.Encode());
  KV_RETURN_IF_ERROR(WriteMeta(batch));
  absl::MutexLock lock(&index_mutex_);
  const auto slot = index_.AddModel(tenant, id, spec.block_tokens);
  if (!slot) return absl::ResourceExhaustedError("spec: this server has no room for more models");
  models_[*slot] = std::make_shared<const RegisteredModel>(spec);
  return DescribeModel(*slot);
}

absl::StatusOr<ModelInfo> Engine::Core::GetModel(TenantId tenant, const ModelId& id) {
  absl::ReaderMutexLock lock(&index_mutex_);
  KV_ASSIGN_OR_RETURN(const ModelSlot slot, FindRegistered(tenant, id));
  return DescribeModel(slot);
}

std::vector<ModelInfo> Engine::Core::ListModels(TenantId tenant) {
  absl::ReaderMutexLock lock(&index_mutex_);
  std::vector<ModelInfo> infos;
  for (std::size_t slot = 0; slot < index_.model_count(); ++slot) {
    const auto model = static_cast<ModelSlot>(slot);
    if (index_.model(model).tenant == tenant && models_.contains(model)) {
      infos.push_back(DescribeModel(model));
    }
  }
  return infos;
}

// --- lookups ---

std::size_t Engine::Core::CompareWithRows(const std::vector<std::pair<NodeRef, TrieNodeId>>& nodes,
                                          const std::vector<std::uint32_t>& unverified,
                                          TenantId tenant, const HashedPath& path) {
  std::vector<std::pair<std::size_t, std::vector<TokenId>>> loaded;
  std::size_t good_blocks = nodes.size();
  for (const std::uint32_t block : unverified) {
    counters_.token_cache_misses.fetch_add(1, std::memory_order_relaxed);
    const auto text =
        meta_->Get(MetaTable::kNodes, NodeRowKey{tenant, nodes[block].second}.Encode());
    const auto wanted = path.tokens(block);
    absl::StatusOr<NodeRow> row = absl::NotFoundError("");
    if (text.ok() && text->has_value()) row = NodeRow::Decode(**text);
    const bool is_wanted = row.ok() && std::equal(row->tokens.begin(), row->tokens.end(),
                                                  wanted.begin(), wanted.end());
    // Kept even when they are others: then the next walk passes this node by.
    if (row.ok()) loaded.emplace_back(block, std::move(row->tokens));
    if (!is_wanted) {
      good_blocks = block;
      break;
    }
  }
  absl::MutexLock lock(&index_mutex_);
  for (const auto& [block, tokens] : loaded) {
    const auto& [ref, id] = nodes[block];
    if (index_.alive(ref) && index_.node(ref).id == id) index_.CacheTokens(ref, tokens);
  }
  return good_blocks;
}

std::optional<Engine::Core::Walked> Engine::Core::Walk(ModelSlot slot, TenantId tenant,
                                                       const PathView& path,
                                                       std::uint32_t block_tokens,
                                                       Quality min_quality, bool may_block) {
  // Nodes of equal hash that stand in the way of the right one; more than one is beyond chance.
  constexpr int kWalksMax = 4;
  const HashedPath hashed(*hasher_, tenant, path, block_tokens);
  Walked walked{{}, 0, hashed.block_count(), hashed.ignored_tail_tokens()};
  for (int walk = 0; walk < kWalksMax; ++walk) {
    std::vector<std::uint32_t> unverified;
    walked.nodes.clear();
    walked.exact_blocks = 0;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      WalkResult found = index_.Walk(slot, *hasher_, hashed, min_quality, NowSeconds());
      if (!found.unverified.empty() && !may_block) return std::nullopt;
      walked.nodes.reserve(found.refs.size());
      for (const NodeRef ref : found.refs) {
        walked.nodes.emplace_back(ref, index_.node(ref).id);
        walked.exact_blocks += index_.node(ref).on_lossy == 0 ? 1 : 0;
      }
      unverified = std::move(found.unverified);
    }
    if (unverified.empty()) break;
    const std::size_t found_blocks = walked.nodes.size();
    walked.nodes.resize(CompareWithRows(walked.nodes, unverified, tenant, hashed));
    if (walked.nodes.size() == found_blocks) break;
  }
  return walked;
}

std::optional<absl::StatusOr<LookupResult>> Engine::Core::Lookup(TenantId tenant,
                                                                 const LookupQuery& query,
                                                                 bool may_block) {
  std::vector<Walked> walks;
  LookupResult result;
  std::vector<ModelSlot> slots;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const ModelId& model : query.models) {
      const auto slot = FindRegistered(tenant, model);
      if (!slot.ok()) return slot.status();
      const std::uint32_t block_tokens = index_.model(*slot).block_tokens;
      if (result.block_tokens != 0 && result.block_tokens != block_tokens) {
        return absl::InvalidArgumentError("model_ids: the models have different block_tokens");
      }
      result.block_tokens = block_tokens;
      slots.push_back(*slot);
    }
  }
  std::size_t matched = SIZE_MAX;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    PathView path = query.path;
    path.model = query.models[i];
    auto walked = Walk(slots[i], tenant, path, result.block_tokens, query.min_quality, may_block);
    if (!walked) return std::nullopt;
    matched = std::min(matched, walked->nodes.size());
    walks.push_back(*std::move(walked));
  }
  if (walks.empty()) return absl::InvalidArgumentError("model_ids: at least one is needed");
  result.ignored_tail_tokens = walks.front().ignored_tail_tokens;

  // What was found may have gone since; only what is there now is told, and leased.
  const auto fill = [&]() ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    for (const Walked& walked : walks) {
      for (std::size_t block = 0; block < matched; ++block) {
        const auto& [ref, id] = walked.nodes[block];
        if (!index_.alive(ref) || index_.node(ref).id != id ||
            !index_.node(ref).any_serves(query.min_quality)) {
          matched = block;
        }
      }
    }
    const std::uint32_t now = NowSeconds();
    if (query.want_blocks) result.blocks.resize(walks.size());
    for (std::size_t i = 0; i < walks.size(); ++i) {
      if (query.want_blocks) result.blocks[i].reserve(matched);
      for (std::size_t block = 0; block < matched; ++block) {
        const NodeRef ref = walks[i].nodes[block].first;
        const IndexNode& node = index_.node(ref);
        index_.Touch(ref, now);
        // Where only the larger of two frames will do, its exact size is in a row.
        const bool from_index = node.serves(query.min_quality);
        const std::uint64_t bytes =
            from_index ? node.frame.record_bytes : RawFrameBytes(node.model);
        result.fetch_bytes += bytes;
        result.quality =
            LowerOf(result.quality, from_index ? node.quality() : node.other_quality());
        if (query.want_blocks) result.blocks[i].push_back({node.id, RungBitsOf(node), bytes});
      }
    }
  };
  if (query.lease.count() > 0) {
    absl::MutexLock lock(&index_mutex_);
    fill();
    if (matched > 0) {
      HoldTable::Lease lease{.tenant = tenant, .holds = {}, .end = {}};
      for (const Walked& walked : walks) {
        const auto& [ref, id] = walked.nodes[matched - 1];
        lease.holds.push_back({ref, id});
      }
      result.lease_granted = std::min(query.lease, options_.lease_max);
      result.lease = RandomId<LeaseId>();
      lease.end = clock_.Monotonic() + result.lease_granted;
      holds_.AddLease(result.lease, std::move(lease));
    }
  } else {
    absl::ReaderMutexLock lock(&index_mutex_);
    fill();
  }
  result.matched_blocks = static_cast<std::uint32_t>(matched);
  counters_.lookups.fetch_add(1, std::memory_order_relaxed);
  counters_.lookup_blocks.fetch_add(walks.front().block_count, std::memory_order_relaxed);
  counters_.lookup_hit_blocks.fetch_add(matched, std::memory_order_relaxed);
  return result;
}

void Engine::Core::ReleaseLease(TenantId tenant, const LeaseId& lease) {
  absl::MutexLock lock(&index_mutex_);
  holds_.DropLease(tenant, lease);
}

// --- small calls ---

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
  for (const auto& [ref, id] : nodes) {
    if (!index_.alive(ref) || index_.node(ref).id != id) break;
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
  if (nodes.empty()) return NoSuchNode();

  absl::MutexLock change(&change_mutex_);
  PinInfo info{.id = RandomId<PinId>(),
               .node = nodes.back().second,
               .blocks = static_cast<std::uint32_t>(nodes.size()),
               .bytes = 0,
               .end_unix_seconds = clock_.UnixSeconds() + duration.count()};
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [ref, id] : nodes) {
      if (!index_.alive(ref) || index_.node(ref).id != id) return NoSuchNode();
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
    if (nodes.empty()) return NoSuchNode();
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
      changed.dropped = DropAbove(*level, &changed.row);
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
      census_.Remove(index_.node(ref).model, *changed.dropped);
      frees.push_back(LocationOf(*changed.dropped));
      change->freed_bytes += frees.back().disk_bytes();
    }
  }
  change->dropped_frames += frees.size();
  FreeLater(frees);
  return absl::OkStatus();
}

// --- descriptions ---

NodeInfo Engine::Core::Describe(NodeRef ref) const {
  const IndexNode& node = index_.node(ref);
  NodeInfo info;
  info.id = node.id;
  if (const NodeRef parent = index_.parent(ref); parent != 0) info.parent = index_.node(parent).id;
  info.model = index_.model(node.model).model;
  info.depth = node.depth;
  if (node.has_frame()) {
    info.frames.push_back(FrameInIndex(node));
    info.in_memory.push_back(tier_.Contains(info.frames.back().at));
    info.quality = info.frames.back().quality;
  }
  info.holds_two_frames = node.has_other();
  info.use_count = node.use_count;
  info.last_used_unix_seconds = node.last_used_seconds;
  info.expires_unix_seconds = node.expires_seconds;
  info.priority = node.priority;
  info.surprisal_bits = static_cast<double>(node.surprisal_bits);
  info.pinned = holds_.IsPinned(ref);
  info.leased = holds_.IsLeased(ref);
  for (NodeRef child = node.first_child; child != 0; child = index_.node(child).next_sibling) {
    ++info.child_count;
  }
  info.extra_key_bytes = static_cast<std::uint32_t>(index_.extra_key(ref).size());
  return info;
}

void Engine::Core::DescribeOtherFrames(TenantId tenant, std::vector<NodeInfo>* infos) {
  for (NodeInfo& info : *infos) {
    if (!info.holds_two_frames) continue;
    const auto row = ReadRow(tenant, info.id);
    if (!row.ok()) continue;
    for (const RungRow& rung : row->rungs) {
      if (LocationOf(rung) == info.frames.front().at) continue;
      StoredFrame frame = info.frames.front();
      frame.rung = rung.rung;
      frame.quality = ServedQuality(*row, rung);
      frame.codec = rung.codec;
      frame.at = LocationOf(rung);
      info.frames.push_back(frame);
      info.in_memory.push_back(tier_.Contains(frame.at));
      if (IsAtLeast(frame.quality, info.quality)) info.quality = frame.quality;
      break;
    }
  }
}

absl::StatusOr<std::vector<NodeInfo>> Engine::Core::ListChildren(TenantId tenant,
                                                                 const ModelId& model,
                                                                 const TrieNodeId& parent,
                                                                 const TrieNodeId& after,
                                                                 std::size_t count) {
  std::vector<NodeInfo> infos;
  KV_RETURN_IF_ERROR(CollectChildren(tenant, model, parent, after, count, &infos));
  DescribeOtherFrames(tenant, &infos);
  return infos;
}

absl::Status Engine::Core::CollectChildren(TenantId tenant, const ModelId& model,
                                           const TrieNodeId& parent, const TrieNodeId& after,
                                           std::size_t count, std::vector<NodeInfo>* infos) {
  absl::ReaderMutexLock lock(&index_mutex_);
  KV_ASSIGN_OR_RETURN(const ModelSlot slot, FindRegistered(tenant, model));
  NodeRef child = index_.model(slot).first_child;
  NodeRef parent_ref = 0;
  if (!parent.empty()) {
    const NodeRef ref = parent_ref = index_.FindById(parent);
    if (ref == 0 || index_.node(ref).model != slot) {
      return absl::NotFoundError("parent_id: no such trie node in this model");
    }
    child = index_.node(ref).first_child;
  }
  if (!after.empty()) {
    const NodeRef ref = index_.FindById(after);
    if (ref == 0 || index_.node(ref).model != slot || index_.parent(ref) != parent_ref) {
      return absl::NotFoundError("page_token: its trie node is gone; start again");
    }
    child = index_.node(ref).next_sibling;
  }
  for (; child != 0 && infos->size() < count; child = index_.node(child).next_sibling) {
    infos->push_back(Describe(child));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<NodeInfo>> Engine::Core::DescribePath(TenantId tenant,
                                                                 const Selection& selection) {
  if (selection.model || selection.all) {
    return absl::InvalidArgumentError("selection: a single path is described, not a whole model");
  }
  KV_ASSIGN_OR_RETURN(const auto nodes, SelectPath(tenant, selection));
  if (nodes.empty()) return NoSuchNode();
  std::vector<NodeInfo> infos;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [ref, id] : nodes) {
      if (!index_.alive(ref) || index_.node(ref).id != id) break;
      infos.push_back(Describe(ref));
    }
  }
  DescribeOtherFrames(tenant, &infos);
  return infos;
}

EngineStats Engine::Core::Stats() {
  EngineStats stats;
  const EngineCounters& c = counters_;
  stats.lookups_total = c.lookups;
  stats.lookup_blocks_total = c.lookup_blocks;
  stats.lookup_hit_blocks_total = c.lookup_hit_blocks;
  stats.memory_reads_total = c.memory_reads;
  stats.disk_reads_total = c.disk_reads;
  stats.disk_read_bytes_total = c.disk_read_bytes;
  stats.missed_reads_total = c.missed_reads;
  stats.corrupt_frames_total = c.corrupt_frames;
  stats.read_errors_total = c.read_errors;
  stats.decoded_blocks_total = c.decoded_blocks;
  stats.undecoded_blocks_total = c.undecoded_blocks;
  stats.decode_errors_total = c.decode_errors;
  stats.undecodable_frames_total = c.undecodable_frames;
  stats.decode_seconds_total = static_cast<double>(c.decode_nanoseconds) * 1e-9;
  if (decoder_ != nullptr) {
    const BlockDecoderStats decoder = decoder_->Stats();
    stats.missing_profiles_total = decoder.missing_profiles_total;
    stats.unusable_profiles_total = decoder.unusable_profiles_total;
    stats.codec_hits_total = decoder.codecs.hits_total;
    stats.codec_builds_total = decoder.codecs.builds_total;
    stats.codec_count = decoder.codecs.codecs;
    stats.codec_bytes = decoder.codecs.bytes;
  }
  stats.put_blocks_total = c.put_blocks;
  stats.stored_blocks_total = c.stored_blocks;
  stats.duplicate_blocks_total = c.duplicate_blocks;
  stats.failed_blocks_total = c.failed_blocks;
  stats.stored_bytes_total = c.stored_bytes;
  stats.raw_bytes_total = c.raw_bytes;
  stats.evicted_blocks_total = c.evicted_blocks;
  stats.evicted_frames_total = c.evicted_frames;
  stats.evicted_bytes_total = c.evicted_bytes;
  stats.expired_blocks_total = c.expired_blocks;
  stats.deleted_blocks_total = c.deleted_blocks;
  stats.refused_full_total = c.refused_full;
  stats.token_cache_misses_total = c.token_cache_misses;
  stats.syncs_total = c.syncs;
  stats.sync_errors_total = c.sync_errors;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    stats.model_count = models_.size();
    stats.node_count = index_.node_count();
    for (std::size_t i = 0; i < index_.model_count(); ++i) {
      const ModelRoot& root = index_.model(static_cast<ModelSlot>(i));
      const auto model = models_.find(static_cast<ModelSlot>(i));
      if (model != models_.end()) {
        stats.raw_live_bytes += root.frame_count * model->second->geometry.raw_block_bytes();
      }
    }
    stats.live_bytes = census_.Total().bytes;
    for (const CodecId codec : kAllCodecs) {
      const FrameCensus::Usage usage = census_.OfCodec(codec);
      stats.codecs.push_back({codec, usage.frames, usage.bytes});
    }
    stats.index_bytes = index_.memory_bytes();
    stats.token_cache_bytes = index_.token_cache_bytes();
    stats.lease_count = holds_.lease_count();
    stats.pin_count = holds_.pins().size();
    stats.pinned_bytes = holds_.pinned_bytes();
  }
  stats.profile_count = profiles_->count();
  stats.profile_bytes = profiles_->disk_bytes();
  stats.damaged_profiles_total = profiles_->damaged_total();
  stats.disk_bytes = DiskBytes();
  stats.disk_limit_bytes = options_.disk_limit_bytes;
  stats.segment_count = payload_->Usage().segment_count;
  stats.memory_tier_bytes = tier_.used_bytes();
  stats.memory_tier_limit_bytes = options_.memory_tier_bytes;
  stats.prefaulted_bytes = prefaulted_bytes_;
  stats.put_memory_bytes = put_budget_.used_bytes();
  stats.open_puts = open_puts_;
  stats.io_queue_length =
      read_pool_->queue_length() + write_pool_->queue_length() + blocking_pool_->queue_length();
  stats.decode_queue_length = decode_pool_->queue_length();
  stats.degraded = DegradedReasons();
  absl::MutexLock lock(&sync_mutex_);
  stats.pending_free_bytes = pending_free_bytes_;
  return stats;
}

// --- the facade ---

absl::StatusOr<std::unique_ptr<Engine>> Engine::OpenEmbedded(
    const EngineOptions& options, Clock& clock, const OpenProgress& progress,
    std::shared_ptr<const BlockDecoder> decoder) {
  KV_RETURN_IF_ERROR(options.Validate());
  auto core = std::make_unique<Core>(options, clock, std::move(decoder));
  KV_RETURN_IF_ERROR(core->Open(progress));
  return absl::WrapUnique(new Engine(std::move(core)));
}

Engine::Engine(std::unique_ptr<Core> core) : core_(std::move(core)) {}
Engine::~Engine() = default;

absl::StatusOr<ModelInfo> Engine::RegisterModel(TenantId tenant, const ModelSpec& spec) {
  return core_->RegisterModel(tenant, spec);
}
absl::StatusOr<ModelInfo> Engine::GetModel(TenantId tenant, const ModelId& id) const {
  return core_->GetModel(tenant, id);
}
std::vector<ModelInfo> Engine::ListModels(TenantId tenant) const {
  return core_->ListModels(tenant);
}
std::optional<absl::StatusOr<LookupResult>> Engine::TryLookup(TenantId tenant,
                                                              const LookupQuery& query) {
  return core_->Lookup(tenant, query, /*may_block=*/false);
}
absl::StatusOr<LookupResult> Engine::Lookup(TenantId tenant, const LookupQuery& query) {
  return *core_->Lookup(tenant, query, /*may_block=*/true);
}
void Engine::ReleaseLease(TenantId tenant, const LeaseId& lease) {
  core_->ReleaseLease(tenant, lease);
}
std::optional<absl::StatusOr<Engine::FoundFrames>> Engine::TryFindFrames(
    TenantId tenant, const ModelId& model, std::span<const TrieNodeId> nodes, Quality min_quality,
    ReadAs as) {
  return core_->FindFrames(tenant, model, nodes, min_quality, as, /*may_block=*/false);
}
absl::StatusOr<Engine::FoundFrames> Engine::FindFrames(TenantId tenant, const ModelId& model,
                                                       std::span<const TrieNodeId> nodes,
                                                       Quality min_quality, ReadAs as) {
  return *core_->FindFrames(tenant, model, nodes, min_quality, as, /*may_block=*/true);
}
absl::StatusOr<Engine::FoundFrames> Engine::FindFramesOfPath(TenantId tenant, const PathView& path,
                                                             std::uint32_t first_block,
                                                             std::uint32_t block_count,
                                                             Quality min_quality, ReadAs as) {
  return core_->FindFramesOfPath(tenant, path, first_block, block_count, min_quality, as);
}
std::optional<LoadedFrame> Engine::TryReadFrame(const StoredFrame& frame, ReadAs as) {
  return core_->TryReadFrame(frame, as);
}
void Engine::ReadFrame(const StoredFrame& frame, ReadAs as,
                       std::function<void(absl::StatusOr<LoadedFrame>)> on_read) {
  core_->ReadFrames(
      {&frame, 1}, as,
      [on_read = std::move(on_read)](std::size_t, absl::StatusOr<LoadedFrame> loaded) {
        on_read(std::move(loaded));
      });
}
void Engine::ReadFrames(std::span<const StoredFrame> frames, ReadAs as, OnFrameRead on_read) {
  core_->ReadFrames(frames, as, std::move(on_read));
}
absl::StatusOr<std::unique_ptr<PutSession>> Engine::BeginPut(TenantId tenant,
                                                             const PutAnnouncement& put) {
  return core_->BeginPut(tenant, put);
}
ByteBudget& Engine::put_budget() { return core_->put_budget_; }
absl::StatusOr<std::uint32_t> Engine::Touch(TenantId tenant, const Selection& selection) {
  return core_->Touch(tenant, selection);
}
absl::StatusOr<PinInfo> Engine::Pin(TenantId tenant, const Selection& selection,
                                    std::chrono::seconds duration) {
  return core_->Pin(tenant, selection, duration);
}
absl::StatusOr<PinInfo> Engine::ExtendPin(TenantId tenant, const PinId& pin,
                                          std::chrono::seconds duration) {
  return core_->ExtendPin(tenant, pin, duration);
}
absl::StatusOr<bool> Engine::Unpin(TenantId tenant, const PinId& pin) {
  return core_->Unpin(tenant, pin);
}
std::vector<PinInfo> Engine::ListPins(TenantId tenant) const { return core_->ListPins(tenant); }
absl::StatusOr<DeletedCount> Engine::Delete(TenantId tenant, const Selection& selection) {
  return core_->Delete(tenant, selection);
}
absl::StatusOr<RetentionChange> Engine::SetRetention(TenantId tenant, const Selection& selection,
                                                     const Retention& retention) {
  return core_->SetRetention(tenant, selection, retention);
}
absl::StatusOr<std::unique_ptr<Engine::ProfileUpload>> Engine::BeginProfile(
    TenantId tenant, std::uint64_t total_bytes, const ProfileId& expected) {
  return core_->BeginProfile(tenant, total_bytes, expected);
}
absl::StatusOr<std::unique_ptr<ProfileStore::Reader>> Engine::OpenProfile(const ProfileId& id) {
  return core_->profiles_->OpenToRead(id);
}
std::vector<StoredProfile> Engine::ListProfiles(TenantId tenant) const {
  return core_->ListProfiles(tenant);
}
absl::Status Engine::DeleteProfile(const ProfileId& id) { return core_->DeleteProfile(id); }
const EventLog& Engine::events() const { return core_->events_; }
absl::StatusOr<std::vector<NodeInfo>> Engine::ListChildren(TenantId tenant, const ModelId& model,
                                                           const TrieNodeId& parent,
                                                           const TrieNodeId& after,
                                                           std::size_t count) {
  return core_->ListChildren(tenant, model, parent, after, count);
}
absl::StatusOr<std::vector<NodeInfo>> Engine::DescribePath(TenantId tenant,
                                                           const Selection& selection) {
  return core_->DescribePath(tenant, selection);
}
EngineStats Engine::Stats() const { return core_->Stats(); }
const RecoveryReport& Engine::recovery() const { return core_->recovery_; }
const EngineOptions& Engine::options() const { return core_->options_; }
absl::Status Engine::Verify(bool structure_only, bool repair,
                            const std::function<bool(const VerifyProgress&)>& report) {
  return core_->Verify(structure_only, repair, report);
}
bool Engine::RunBlocking(std::function<void()> work) {
  return core_->blocking_pool_->TryPost(std::move(work));
}
bool Engine::Drain(std::chrono::milliseconds deadline) { return core_->Drain(deadline); }
void Engine::RunMaintenance() { core_->RunMaintenance(); }

}  // namespace kvtrie
