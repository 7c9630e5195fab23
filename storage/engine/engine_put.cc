#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/engine/record_block_writer.h"
#include "storage/engine/trie_put_session.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// As a block index: the caller has dropped its session.
constexpr std::uint32_t kCloseSession = 0xffffffffu;

// Records that are written at once: enough for small ones to cost little each.
constexpr std::uint64_t kGroupBytesMax = std::uint64_t{8} << 20;
// A thread that writes takes what came meanwhile along up to so many bytes.
constexpr std::uint64_t kTakenTogetherBytes = std::uint64_t{256} << 10;

// What of a node's frames is on a rung.
std::optional<Quality> QualityOn(const IndexNode& node, Rung rung) {
  if (!node.has_frame()) return std::nullopt;
  if (RungOf(node.codec()) == rung) return node.quality();
  if (node.has_other()) return node.other_quality();
  return std::nullopt;
}

// A node that a put of this session would add nothing to.
bool HasEnough(const TriePutSession& session, std::uint32_t block, const IndexNode& node) {
  const Quality wanted = session.Wanted(block);
  if (!session.beside_exact) return node.any_serves(wanted);
  const auto coded = QualityOn(node, Rung::kCoded);
  return coded && IsAtLeast(*coded, wanted);
}

RungRow At(RungRow rung, const PayloadLocation& at) {
  rung.segment = at.segment;
  rung.offset_units = at.offset_units;
  rung.record_bytes = at.record_bytes;
  return rung;
}

}  // namespace

NodeRow TriePutSession::MakeRow(std::uint32_t block) const {
  NodeRow row;
  row.model = model;
  if (block > 0) row.parent = blocks[block - 1].id;
  row.depth = block + 1;
  row.provenance = blocks[block].provenance;
  row.path_hash = blocks[block].path_hash;
  if (block < block_surprisal_bits.size()) row.surprisal_bits = block_surprisal_bits[block];
  row.created_unix_seconds = created_unix_seconds;
  row.expires_unix_seconds = expires_seconds;
  row.priority = static_cast<std::uint8_t>(priority);
  if (block == 0) row.salt = salt;
  if (const auto extra = extra_keys.find(block); extra != extra_keys.end()) {
    row.extra_key = extra->second;
  }
  const auto block_of_tokens = tokens_of(block);
  row.tokens.assign(block_of_tokens.begin(), block_of_tokens.end());
  return row;
}

ExpectedBlock TriePutSession::Expect(std::uint32_t block) const {
  ExpectedBlock expected;
  expected.block_index = block;
  expected.descriptor.tenant = tenant;
  expected.descriptor.node = blocks[block].id;
  expected.descriptor.row = MakeRow(block);
  expected.frame_quality_min = quality;
  expected.served_quality_max = ServedMax(block);
  return expected;
}

// That what the rows of a put will hold can be stored.
absl::Status CheckAnnouncement(const PutAnnouncement& put) {
  if (put.path.salt.size() > kSaltBytesMax) return absl::InvalidArgumentError("salt: too long");
  if (put.session_id.size() > kSessionIdBytesMax) {
    return absl::InvalidArgumentError("session_id: too long");
  }
  const ExtraKey* before = nullptr;
  for (const ExtraKey& extra : put.path.extra_keys) {
    if (extra.key.size() > kExtraKeyBytesMax) {
      return absl::InvalidArgumentError("extra_keys: a key is too long");
    }
    if (before != nullptr && before->block_index >= extra.block_index) {
      return absl::InvalidArgumentError("extra_keys: block_index must ascend");
    }
    before = &extra;
  }
  const bool surprisals_hold =
      std::all_of(put.block_surprisal_bits.begin(), put.block_surprisal_bits.end(),
                  [](float bits) { return std::isfinite(bits) && !std::signbit(bits); });
  if (!surprisals_hold) {
    return absl::InvalidArgumentError("block_surprisal_bits: must be finite and not negative");
  }
  if (put.ttl.count() < 0) return absl::InvalidArgumentError("ttl: must not be negative");
  if (!IsQuality(put.quality)) return absl::InvalidArgumentError("quality: unknown");
  if (!IsQuality(put.restored_quality)) {
    return absl::InvalidArgumentError("restored_quality: unknown");
  }
  if (put.beside_exact && put.quality == Quality::kExact) {
    return absl::InvalidArgumentError(
        "beside_exact: is for coded frames; announce a quality less than exact");
  }
  return absl::OkStatus();
}

// What the caller holds: forwards, and closes the session when it goes.
class PutSessionHandle final : public PutSession {
 public:
  PutSessionHandle(Engine::Core& core, std::shared_ptr<TriePutSession> session,
                   std::vector<TrieNodeId> stored)
      : core_(core), session_(std::move(session)), stored_(std::move(stored)) {}

  ~PutSessionHandle() override {
    session_->closed = true;
    core_.GiveUpBlock(session_, kCloseSession);
  }

  const std::vector<std::uint32_t>& missing_blocks() const override {
    return session_->missing_blocks;
  }
  std::uint32_t block_count() const override { return static_cast<std::uint32_t>(stored_.size()); }
  std::uint32_t ignored_tail_tokens() const override { return session_->ignored_tail_tokens; }
  std::uint64_t raw_block_bytes() const override {
    return session_->registered->geometry.raw_block_bytes();
  }
  bool IsStored(std::uint32_t block_index, TrieNodeId* node) const override {
    if (block_index >= stored_.size() || stored_[block_index].empty()) return false;
    *node = stored_[block_index];
    return true;
  }

  absl::StatusOr<std::unique_ptr<BlockWriter>> StartBlock(std::uint32_t block_index,
                                                          std::uint64_t bytes) override {
    KV_RETURN_IF_ERROR(MayStart(block_index));
    KV_ASSIGN_OR_RETURN(std::unique_ptr<BlockWriter> writer,
                        RecordBlockWriter::CreateRaw(session_->Expect(block_index), bytes,
                                                     session_->registered->geometry));
    session_->begun[block_index] = true;
    return writer;
  }

  absl::StatusOr<std::unique_ptr<BlockWriter>> StartFrame(std::uint32_t block_index,
                                                          const FrameView& head) override {
    KV_RETURN_IF_ERROR(MayStart(block_index));
    const RegisteredModel& model = *session_->registered;
    KV_ASSIGN_OR_RETURN(std::unique_ptr<BlockWriter> writer,
                        RecordBlockWriter::CreateFrame(session_->Expect(block_index), head,
                                                       model.spec, model.geometry));
    session_->begun[block_index] = true;
    return writer;
  }

  void FinishBlocks(std::vector<FinishedBlock> blocks) override {
    core_.WriteBlocks(session_, std::move(blocks));
  }

  void AbandonBlock(std::uint32_t block_index) override {
    if (block_index < stored_.size()) core_.GiveUpBlock(session_, block_index);
  }

 private:
  absl::Status MayStart(std::uint32_t block_index) const {
    if (block_index >= stored_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "block ", block_index, ": the announced prefix has ", stored_.size(), " full blocks"));
    }
    if (!std::binary_search(session_->missing_blocks.begin(), session_->missing_blocks.end(),
                            block_index)) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block_index, ": was not asked for"));
    }
    if (session_->begun[block_index]) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block_index, ": begun twice"));
    }
    return absl::OkStatus();
  }

  Engine::Core& core_;
  const std::shared_ptr<TriePutSession> session_;
  const std::vector<TrieNodeId> stored_;  // ids of blocks that were stored at the beginning
};

absl::StatusOr<std::unique_ptr<PutSession>> Engine::Core::BeginPut(TenantId tenant,
                                                                   const PutAnnouncement& put) {
  if (draining_) return absl::UnavailableError("the server is draining");
  if (put.path.tokens.size() > kPathTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens: at most ", kPathTokensMax, " are allowed"));
  }
  if (put.priority > 15) return absl::InvalidArgumentError("priority: must be between 0 and 15");
  KV_RETURN_IF_ERROR(CheckAnnouncement(put));

  auto session = std::make_shared<TriePutSession>();
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    KV_ASSIGN_OR_RETURN(session->slot, FindRegistered(tenant, put.path.model));
    session->registered = models_.find(session->slot)->second;
  }
  const std::uint32_t block_tokens = session->registered->spec.block_tokens;
  const HashedPath hashed(*hasher_, tenant, put.path, block_tokens);
  const std::uint32_t block_count = hashed.block_count();
  if (put.first_block > block_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first_block: ", put.first_block, ", but the prefix has ", block_count, " full blocks"));
  }
  session->tenant = tenant;
  session->model = put.path.model;
  session->block_tokens = block_tokens;
  session->tokens.assign(put.path.tokens.begin(),
                         put.path.tokens.begin() + std::size_t{block_count} * block_tokens);
  session->salt = put.path.salt;
  for (const ExtraKey& extra : put.path.extra_keys) {
    session->extra_keys.emplace(extra.block_index, extra.key);
  }
  session->session_id = put.session_id;
  session->block_surprisal_bits = put.block_surprisal_bits;
  session->quality = put.quality;
  session->beside_exact = put.beside_exact;
  session->durable = put.durable;
  session->priority = put.priority;
  session->created_unix_seconds = clock_.UnixSeconds();
  session->expires_seconds = ExpiryOf(put.ttl);
  session->ignored_tail_tokens = hashed.ignored_tail_tokens();
  session->blocks.resize(block_count);
  session->begun.resize(block_count);

  // What is stored already, by walking; the rest by its ids, since blocks may lie behind a hole.
  const bool on_lossy = put.restored_quality != Quality::kExact && put.restored_blocks > 0;
  const auto walked = Walk(session->slot, tenant, put.path, block_tokens,
                           on_lossy ? put.restored_quality : Quality::kExact, /*may_block=*/true);
  const absl::Status prefix_is_gone = absl::FailedPreconditionError(
      "restored_blocks: that prefix is not stored any more; put it again from its first block");
  const std::uint32_t restored_blocks = on_lossy ? std::min(put.restored_blocks, block_count) : 0;
  if (walked->nodes.size() < restored_blocks) return prefix_is_gone;
  session->lossy_quality = put.restored_quality;
  Provenance provenance = Provenance::kExact;
  std::uint64_t hash = hasher_->Root(tenant, put.path.model, put.path.salt);
  TrieNodeId parent;
  for (std::uint32_t index = 0; index < block_count; ++index) {
    TriePutSession::Block& block = session->blocks[index];
    const bool was_found =
        index < walked->nodes.size() && (!on_lossy || index < put.restored_blocks);
    if (was_found ? index >= walked->exact_blocks : on_lossy && index >= put.restored_blocks) {
      provenance = Provenance::kOnLossy;
    }
    block.provenance = provenance;
    hash = hasher_->Extend(hash, provenance, hashed.extra_key(index), hashed.tokens(index));
    block.path_hash = hash;
    block.id = was_found ? walked->nodes[index].second
                         : namer_->Name(put.path.model, parent, provenance,
                                        index == 0 ? put.path.salt : std::string_view(),
                                        hashed.extra_key(index), hashed.tokens(index));
    parent = block.id;
  }
  std::vector<TrieNodeId> stored(block_count);
  TrieNodeId deepest_stored;
  {
    absl::MutexLock lock(&index_mutex_);
    const std::uint32_t now = NowSeconds();
    for (std::uint32_t index = 0; index < block_count; ++index) {
      TriePutSession::Block& block = session->blocks[index];
      const NodeRef ref = index_.FindById(block.id);
      const bool is_there =
          ref != 0 && index_.node(ref).has_frame() && !index_.node(ref).expired(now);
      if (is_there) session->hold = {ref, block.id};
      // What was restored lossily is not the client's to offer: it has no better bytes of it.
      const bool offered = index >= put.first_block && index >= restored_blocks;
      if (is_there && (!offered || HasEnough(*session, index, index_.node(ref)))) {
        block.state = TriePutSession::State::kStored;
        stored[index] = block.id;
      } else if (offered) {
        session->missing_blocks.push_back(index);
      } else if (index < restored_blocks) {
        return prefix_is_gone;
      } else {
        block.state = TriePutSession::State::kFailed;  // nobody will send it
      }
    }
    if (session->hold.ref != 0) holds_.Take(session->hold);
    deepest_stored = session->hold.id;
    ++open_puts_;
  }
  if (session->missing_blocks.empty() && !deepest_stored.empty() && !put.session_id.empty()) {
    // Nothing will be published that names the session. A name is not worth failing a put for.
    MetaBatch batch(tenant);
    batch.Put(MetaTable::kSessions, SessionRowKey{tenant, session->session_id}.Encode(),
              std::string(deepest_stored.view()));
    absl::MutexLock change(&change_mutex_);
    WriteMeta(batch).IgnoreError();
  }
  return std::make_unique<PutSessionHandle>(*this, std::move(session), std::move(stored));
}

// Both go to another thread: writing and publishing wait for the disk. Bounded by the put budget,
// so never refused. What comes while the threads are busy is written together: nobody waits for it,
// and small blocks that are sent one by one share pages too.
void Engine::Core::WriteBlocks(std::shared_ptr<TriePutSession> session,
                               std::vector<PutSession::FinishedBlock> blocks) {
  {
    absl::MutexLock lock(&session->finished_mutex);
    session->finished.push_back(std::move(blocks));
  }
  write_pool_->Post([this, session = std::move(session)] {
    std::vector<PutSession::FinishedBlock> taken;
    {
      absl::MutexLock lock(&session->finished_mutex);
      std::uint64_t taken_bytes = 0;
      // One thread writes what hardly costs more than its calls; the rest is for others.
      while (!session->finished.empty() && taken_bytes < kTakenTogetherBytes) {
        for (PutSession::FinishedBlock& block : session->finished.front()) {
          taken_bytes += block.writer->total_bytes();
          taken.push_back(std::move(block));
        }
        session->finished.pop_front();
      }
    }
    if (taken.empty()) return;  // an earlier thread has taken it
    std::vector<PublishItem> items;
    items.reserve(taken.size());
    std::vector<RecordToWrite> group;
    std::uint64_t group_bytes = 0;
    // No more than what MakeRoom evicts at a time, or than fits well into a segment.
    const std::uint64_t group_bytes_max =
        std::min({kGroupBytesMax, options_.disk_limit_bytes / 16, options_.segment_bytes / 4});
    const auto write_group = [&] {
      if (!group.empty()) WriteRecords(group);
      group.clear();
      group_bytes = 0;
    };
    for (PutSession::FinishedBlock& block : taken) {
      PublishItem& item = items.emplace_back(SealBlock(session, block));
      if (!item.failure.ok()) continue;
      PayloadRecord& record = static_cast<RecordBlockWriter&>(*block.writer).record();
      if (group.size() == PayloadStore::kGroupRecordsMax ||
          group_bytes + record.record_bytes() > group_bytes_max) {
        write_group();
      }
      group.push_back({&record, &item});
      group_bytes += record.record_bytes();
    }
    write_group();
    Enqueue(std::move(items));
  });
}

void Engine::Core::GiveUpBlock(std::shared_ptr<TriePutSession> session, std::uint32_t block) {
  write_pool_->Post([this, session = std::move(session), block] {
    std::vector<PublishItem> items;
    items.push_back({.session = session,
                     .block = block,
                     .failure = absl::CancelledError("block: not sent"),
                     .rung = {},
                     .at = {},
                     .frame = {},
                     .on_done = nullptr});
    Enqueue(std::move(items));
  });
}

absl::Status Engine::Core::CheckProfile(const PublishItem& item) const {
  const ProfileId& id = item.rung.profile;
  if (id.empty()) return absl::OkStatus();
  const std::string of_block = absl::StrCat("block ", item.block, ": its profile ", id.ToHex());
  const auto profile = profiles_->Find(id);
  if (!profile) {
    return absl::FailedPreconditionError(
        absl::StrCat(of_block, " is not stored here; call PutProfile with it first"));
  }
  if (!item.session->registered->Fits(profile->header)) {
    return absl::InvalidArgumentError(absl::StrCat(of_block, " is for another model (codec key)"));
  }
  if (item.frame_quality != Quality::kExact &&
      profile->header.FindLevel(item.frame_quality) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(of_block, " has no level of the frame's quality"));
  }
  return absl::OkStatus();
}

Engine::Core::PublishItem Engine::Core::SealBlock(std::shared_ptr<TriePutSession> session,
                                                  PutSession::FinishedBlock& finished) {
  PublishItem item;
  item.session = std::move(session);
  item.block = finished.writer->block_index();
  item.on_done = std::move(finished.on_done);
  auto& block = static_cast<RecordBlockWriter&>(*finished.writer);
  item.failure = block.Seal();
  if (item.failure.ok()) {
    item.rung = block.rung();
    item.frame_quality = block.frame_quality();
    item.failure = CheckProfile(item);
  }
  return item;
}

void Engine::Core::WriteRecords(std::span<const RecordToWrite> group) {
  const auto write_at_once = [this](std::span<const RecordToWrite> some) {
    std::vector<PayloadRecord*> records;
    records.reserve(some.size());
    for (const RecordToWrite& one : some) records.push_back(one.record);
    const std::uint64_t room = GroupDiskBytes(records);
    if (absl::Status status = MakeRoom(room); !status.ok()) return status;
    auto places = payload_->AppendGroup(records);
    if (absl::IsResourceExhausted(places.status()) && options_.eviction) {
      // The disk is full below our own limit: somebody else fills it. Shrink once, try again.
      const auto evicted = Evict(4 * room, Victims::kFramesThenLeaves);
      if (evicted.ok() && *evicted > 0 && SyncAndFree().ok()) {
        places = payload_->AppendGroup(records);
      }
    }
    reserved_bytes_ -= room;
    const absl::Status status = places.status();
    SetDegraded(Degradation::kDiskFull, absl::IsResourceExhausted(status));
    SetDegraded(Degradation::kDiskUnwritable, !status.ok() && !absl::IsResourceExhausted(status));
    for (std::size_t i = 0; status.ok() && i < some.size(); ++i) {
      some[i].item->at = (*places)[i];
      some[i].item->frame = std::move(*some[i].record).TakePayload();
    }
    return status;
  };
  absl::Status failure = write_at_once(group);
  if (failure.ok()) return;
  if (absl::IsResourceExhausted(failure) && group.size() > 1) {
    // There may be room for the first blocks, which are of use without those behind them.
    while (!group.empty()) {
      failure = write_at_once(group.first(1));
      if (!failure.ok()) break;
      group = group.subspan(1);
    }
  }
  for (const RecordToWrite& one : group) {
    one.item->failure = failure;
    if (absl::IsResourceExhausted(failure)) {
      counters_.refused_full.fetch_add(1, std::memory_order_relaxed);
    }
  }
}

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
  const Quality quality = item.rung.quality;
  const auto on_rung = QualityOn(node, item.rung.rung);
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
  std::vector<PublishItem> ready;  // items of `pending`, same order
  // Blocks that another session of this group publishes: stored once that is written.
  std::vector<std::pair<PublishItem, std::size_t>> twins;
  // Other frames of nodes that this group publishes.
  std::vector<PublishItem> next_group;

  std::map<TenantId, MetaBatch> batches;
  const auto name_session = [&batches](const TriePutSession& session, const TrieNodeId& node) {
    if (session.session_id.empty()) return;
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
    --open_puts_;
  };

  std::vector<PublishItem> work = std::move(group);
  std::reverse(work.begin(), work.end());  // a stack, first item on top
  while (!work.empty()) {
    PublishItem item = std::move(work.back());
    work.pop_back();
    TriePutSession& session = *item.session;
    if (item.block == kCloseSession) {
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
    const State before = item.block == 0 ? State::kStored : session.blocks[item.block - 1].state;
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
    if (same_in_group != pending_ids.end() && !is_twin) {
      next_group.push_back(std::move(item));
      continue;
    }
    PendingNode node;
    if (!is_twin && arrival != Arrival::kDuplicate) {
      absl::Status prepared = CheckProfile(item);  // it may have been deleted meanwhile
      if (prepared.ok()) prepared = PrepareNode(item, existing, arrival, &node);
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
  if (!published.empty()) AddToIndex(published);
  for (PendingNode& node : published) {
    conclude(*node.item, PutBlockResult{node.id, PutOutcome::kStored});
  }
  return next_group;
}

void Engine::Core::AddToIndex(const std::vector<PendingNode>& published) {
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
          census_.Remove(node.session->slot, dropped);
          frees.push_back(LocationOf(dropped));
        }
        index_.SetFrames(ref, frames);
        index_.SetRetention(ref, static_cast<std::uint32_t>(node.row.expires_unix_seconds),
                            node.row.priority);
      } else {
        ref = index_.Insert(
            {.id = node.id,
             .parent = node.block == 0 ? 0 : index_.FindById(node.row.parent),
             .model = node.session->slot,
             .path_hash = node.row.path_hash,
             .provenance = node.row.provenance,
             .salt = node.row.salt,
             .extra_key = node.row.extra_key,
             .tokens = node.row.tokens,
             .frames = frames,
             .block_surprisal_bits = node.row.surprisal_bits,
             .last_used_seconds = now,
             .expires_seconds = static_cast<std::uint32_t>(node.row.expires_unix_seconds),
             .priority = node.row.priority});
      }
      census_.Add(node.session->slot, *node.row.FindRung(node.item->rung.rung));
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

bool Engine::Core::Drain(std::chrono::milliseconds deadline) {
  draining_ = true;
  bool finished;
  {
    absl::MutexLock lock(&index_mutex_);
    const auto none_open = [this] { return open_puts_ == 0; };
    finished =
        index_mutex_.AwaitWithTimeout(absl::Condition(&none_open), absl::FromChrono(deadline));
  }
  return SyncAndFree().ok() && finished;
}

}  // namespace kvtrie
