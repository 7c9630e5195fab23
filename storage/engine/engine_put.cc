#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/engine/record_block_writer.h"
#include "storage/engine/trie_put_session.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// Records that are written at once: enough for small ones to cost little each.
constexpr std::uint64_t kGroupBytesMax = std::uint64_t{8} << 20;
// A thread that writes takes what came meanwhile along up to so many bytes.
constexpr std::uint64_t kTakenTogetherBytes = std::uint64_t{256} << 10;

// A node that a put of this session would add nothing to.
bool HasEnough(const TriePutSession& session, std::uint32_t block, const IndexNode& node) {
  if (session.detaches_at) return node.codec() != CodecId::kReferenced;
  if (session.replaces_larger) return node.quality_on(Rung::kCoded) != session.quality;
  const Quality wanted = session.Wanted(block);
  if (!session.beside_exact) return node.any_serves(wanted);
  const auto coded = node.quality_on(Rung::kCoded);
  return coded && IsAtLeast(*coded, wanted);
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
  expected.offered_references = references;
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
  if (put.compute_seconds_per_token != 0 &&
      !IsComputeSecondsPerToken(put.compute_seconds_per_token)) {
    return absl::InvalidArgumentError(
        "compute_seconds_per_token: must be between 1e-9 and 1000; leave it out if it is not "
        "known");
  }
  if (put.ttl.count() < 0) return absl::InvalidArgumentError("ttl: must not be negative");
  if (!IsQuality(put.quality)) return absl::InvalidArgumentError("quality: unknown");
  if (!IsQuality(put.restored_quality)) {
    return absl::InvalidArgumentError("restored_quality: unknown");
  }
  if (put.first_reused_block && *put.first_reused_block < put.restored_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_reused_block: ", *put.first_reused_block, " lies within the ",
                     put.restored_blocks, " restored_blocks; name the first block behind them"));
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
    core_.GiveUpBlock(session_, TriePutSession::kClose);
  }

  const std::vector<std::uint32_t>& missing_blocks() const override {
    return session_->missing_blocks;
  }
  const CodingPlan& coding_plan() const override { return session_->coding_plan; }
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
  if (put.first_reused_block) {
    // Who cannot be offered any here may have made it by other means.
    const auto why = options_.text_reuse.Forbids(tenant, put.path.model, session->registered->spec);
    if (why && *why != TextReuseForbidden::kPositions) {
      return absl::FailedPreconditionError(
          "first_reused_block: this server forbids text reuse for this tenant or model "
          "(--text_reuse, --text_reuse_forbidden_models); put what was computed on exact KV only");
    }
  }
  const std::uint32_t block_tokens = session->registered->spec.block_tokens;
  const HashedPath hashed(*hasher_, tenant, put.path, block_tokens);
  const std::uint32_t block_count = hashed.block_count();
  if (put.first_block > block_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first_block: ", put.first_block, ", but the prefix has ", block_count, " full blocks"));
  }
  if (put.restored_blocks > block_count) {
    return absl::InvalidArgumentError(absl::StrCat("restored_blocks: ", put.restored_blocks,
                                                   ", but the prefix has ", block_count,
                                                   " full blocks"));
  }
  if (put.first_reused_block && *put.first_reused_block > block_count) {
    return absl::InvalidArgumentError(absl::StrCat("first_reused_block: ", *put.first_reused_block,
                                                   ", but the prefix has ", block_count,
                                                   " full blocks; it counts blocks, not tokens"));
  }
  session->tenant = tenant;
  session->model = put.path.model;
  session->block_tokens = block_tokens;
  session->tokens.assign(put.path.tokens.begin(),
                         put.path.tokens.begin() +
                             static_cast<std::ptrdiff_t>(std::size_t{block_count} * block_tokens));
  session->salt = put.path.salt;
  for (const ExtraKey& extra : put.path.extra_keys) {
    session->extra_keys.emplace(extra.block_index, extra.key);
  }
  session->session_id = put.session_id;
  KV_ASSIGN_OR_RETURN(session->block_surprisal_bits,
                      BlockSurprisalBits(put.probabilities, put.path.tokens, block_tokens));
  session->quality = put.quality;
  session->beside_exact = put.beside_exact;
  session->only_existing = put.only_existing;
  session->replaces_larger = put.replaces_larger;
  session->detaches_at = put.detaches_at;
  std::vector<OfferedReference> references = put.references;
  for (OfferedReference& reference : references) {
    if (!reference.at) reference.at = LocationOn(reference.node, reference.rung);
  }
  session->references =
      std::make_shared<const std::vector<OfferedReference>>(std::move(references));
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
  const std::uint32_t restored_blocks = on_lossy ? put.restored_blocks : 0;
  if (walked->nodes.size() < restored_blocks) return prefix_is_gone;
  session->lossy_quality = put.restored_quality;
  session->first_reused_block = put.first_reused_block.value_or(UINT32_MAX);
  Provenance provenance = Provenance::kExact;
  std::uint64_t hash = hasher_->Root(tenant, put.path.model, put.path.salt);
  TrieNodeId parent;
  for (std::uint32_t index = 0; index < block_count; ++index) {
    TriePutSession::Block& block = session->blocks[index];
    const bool is_reused = index >= session->first_reused_block;
    const bool was_found =
        index < walked->nodes.size() && (!on_lossy || index < put.restored_blocks) && !is_reused;
    if (was_found ? index >= walked->exact_blocks
                  : is_reused || (on_lossy && index >= put.restored_blocks)) {
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
    if (put.compute_seconds_per_token != 0 && !session->missing_blocks.empty()) {
      retention_.ComputeMeasured(session->slot, session->missing_blocks.front() + 1,
                                 session->missing_blocks.back() + 1, put.compute_seconds_per_token);
    }
    if (session->hold.ref != 0) holds_.Take(session->hold);
    deepest_stored = session->hold.id;
    ++open_puts_;
  }
  if (put.want_references) OfferReferences(session.get());
  if (!session->references->empty()) {
    absl::MutexLock lock(&index_mutex_);
    for (const OfferedReference& reference : *session->references) {
      const NodeRef ref = index_.FindById(reference.node);
      if (ref == 0) continue;  // publishing finds that out
      session->reference_holds.push_back({ref, reference.node});
      holds_.Take(session->reference_holds.back());
    }
  }
  if (session->missing_blocks.empty() && !deepest_stored.empty() && !put.session_id.empty()) {
    // Nothing will be published that names the session. A name is not worth failing a put for.
    MetaBatch batch(tenant);
    batch.Put(MetaTable::kSessions, SessionRowKey{tenant, session->session_id}.Encode(),
              std::string(deepest_stored.view()));
    absl::MutexLock change(&change_mutex_);
    const auto moves = FindMoves({{{tenant, session->session_id}, deepest_stored}});
    if (WriteMeta(batch).ok()) {
      absl::MutexLock lock(&index_mutex_);
      MoveSessions(moves);
    }
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
    std::vector<MemberToCheck> members;
    for (PutSession::FinishedBlock& block : taken) {
      PublishItem& item = items.emplace_back(SealBlock(session, block));
      const auto& table = static_cast<RecordBlockWriter&>(*block.writer).reference_table();
      // What this server coded itself it coded against what it read.
      if (item.failure.ok() && !table.references.empty() && !session->only_existing) {
        members.push_back({&item, &table});
      }
    }
    if (!members.empty()) CheckCodedAgainst(*session, members);
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
    for (std::size_t i = 0; i < taken.size(); ++i) {
      PublishItem& item = items[i];
      if (!item.failure.ok()) continue;
      PayloadRecord& record = static_cast<RecordBlockWriter&>(*taken[i].writer).record();
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
    if (absl::Status status = MakeRoom(room, some.size()); !status.ok()) return status;
    auto places = payload_->AppendGroup(records);
    if (absl::IsResourceExhausted(places.status()) && options_.eviction) {
      // The disk is full below our own limit: somebody else fills it. Shrink once, try again.
      const auto evicted = Evict(4 * room, 0);
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
