#include "storage/engine/engine.h"

#include <random>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
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
                   std::shared_ptr<const BlockCodec> codec)
    : options_(options),
      clock_(clock),
      events_(NewEpoch(), options.event_log_max),
      put_budget_(options.put_memory_bytes),
      codec_(std::move(codec)),
      tier_(options.memory_tier_bytes, PrefetchBytes()),
      index_(options.token_cache_bytes),
      groups_(index_, options.group_threshold_bits) {}

Engine::Core::~Core() {
  // Opening failed: nothing is under way, and the payload store may not take frees yet.
  closing_ = true;
  if (prefaulter_.joinable()) prefaulter_.join();
  {
    absl::MutexLock lock(&recode_ending_mutex_);
    recode_ending_ = true;
  }
  if (recoder_.joinable()) recoder_.join();
  if (!opened_) return;
  // Pools run out first, and stay: their work may post to one another and hand things to the
  // syncer.
  if (prefetcher_ != nullptr) prefetcher_->Stop();
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

Engine::Core::ServedSize Engine::Core::ServedBy(const IndexNode& node, Quality min_quality) const {
  if (node.serves(min_quality)) return {node.frame.record_bytes, node.quality()};
  return {RawFrameBytes(node.model), node.other_quality()};
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
  retention_.SetModel(*slot, spec);
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

// --- the facade ---

absl::StatusOr<std::unique_ptr<Engine>> Engine::OpenEmbedded(
    const EngineOptions& options, Clock& clock, const OpenProgress& progress,
    std::shared_ptr<const BlockCodec> codec) {
  KV_RETURN_IF_ERROR(options.Validate());
  auto core = std::make_unique<Core>(options, clock, std::move(codec));
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
absl::StatusOr<SimilarResult> Engine::Similar(TenantId tenant, const SimilarRequest& request) {
  return core_->Similar(tenant, request);
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
std::vector<std::vector<TokenId>> Engine::TokensOfBlocks(TenantId tenant, const ModelId& model,
                                                         std::span<const TrieNodeId> nodes) {
  return core_->TokensOfBlocks(tenant, model, nodes);
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
absl::StatusOr<std::optional<TrieNodeId>> Engine::GroupOf(TenantId tenant,
                                                          const TrieNodeId& node) const {
  return core_->GroupOf(tenant, node);
}
absl::StatusOr<GroupPage> Engine::ListGroups(TenantId tenant, const TrieNodeId& after,
                                             std::size_t count) const {
  return core_->ListGroups(tenant, after, count);
}
absl::StatusOr<GroupDescription> Engine::DescribeGroup(TenantId tenant, const TrieNodeId& id,
                                                       std::size_t branches_max) const {
  return core_->DescribeGroup(tenant, id, branches_max);
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

std::size_t Engine::RunRecoding() { return core_->RecodeSome(); }

}  // namespace kvtrie
