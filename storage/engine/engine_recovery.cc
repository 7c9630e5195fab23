#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/file_system.h"
#include "storage/base/frame_memory.h"
#include "storage/base/free_space.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/rocksdb_meta_store.h"
#include "storage/payload/segment_store.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRowsPerBatch = 4096;
constexpr unsigned kBlockingThreads = 4;
// Small: RocksDB wants about as much free space to go on after the disk was full.
constexpr std::size_t kMetaBufferBytes = std::size_t{8} << 20;
// How far ahead of the last record a segment is allocated: less in small stores and on small disks,
// so that they are not spent on it.
constexpr std::uint64_t kAllocateAheadBytesMax = std::uint64_t{64} << 20;
constexpr std::uint64_t kAheadParts = 64;
constexpr char kIdentityRow[] = "identity";

absl::StatusOr<StoreConfig> ReadIdentityFile(const std::string& path) {
  KV_ASSIGN_OR_RETURN(const auto file,
                      PosixFileSystem().Open(path, FileSystem::Mode::kReadOnly, false));
  KV_ASSIGN_OR_RETURN(const std::uint64_t size, file->Size());
  if (size > 4096) return absl::DataLossError("identity: too long");
  std::string text(size, '\0');
  KV_ASSIGN_OR_RETURN(const std::size_t count,
                      file->Read(0, std::as_writable_bytes(std::span(text))));
  text.resize(count);
  return StoreConfig::Decode(text);
}

absl::Status WriteIdentityFile(const std::string& folder, const std::string& path,
                               const StoreConfig& config) {
  const std::string text = config.Encode();
  const std::string fresh = path + ".new";
  PosixFileSystem().Remove(fresh).IgnoreError();
  KV_ASSIGN_OR_RETURN(const auto file,
                      PosixFileSystem().Open(fresh, FileSystem::Mode::kCreateNew, false));
  KV_RETURN_IF_ERROR(file->Write(0, AsBytes(text)));
  KV_RETURN_IF_ERROR(file->SyncData());
  KV_RETURN_IF_ERROR(PosixFileSystem().Rename(fresh, path));
  return PosixFileSystem().SyncFolder(folder);
}

StoreConfig NewIdentity() {
  std::random_device device;
  StoreConfig config;
  config.path_hash_seed = std::uint64_t{device()} << 32 | device();
  while (config.namespace_secret.size() < 32) {
    const std::uint32_t word = device();
    config.namespace_secret.append(reinterpret_cast<const char*>(&word), sizeof word);
  }
  return config;
}

// Changes of many tenants, since a batch belongs to one.
class BatchesByTenant {
 public:
  MetaBatch& Of(TenantId tenant) { return batches_.try_emplace(tenant, tenant).first->second; }
  std::size_t change_count() const {
    std::size_t count = 0;
    for (const auto& [tenant, batch] : batches_) count += batch.changes().size();
    return count;
  }
  // Writes and forgets them.
  absl::Status WriteTo(MetaStore& meta) {
    const auto batches = std::exchange(batches_, {});
    for (const auto& [tenant, batch] : batches) KV_RETURN_IF_ERROR(meta.Write(batch));
    return absl::OkStatus();
  }

 private:
  std::map<TenantId, MetaBatch> batches_;
};

// Tells progress about once a second.
class ProgressMeter {
 public:
  explicit ProgressMeter(const Engine::OpenProgress& progress) : progress_(progress) {}
  void Count(std::string_view what) {
    ++done_;
    if (!progress_ || done_ % 4096 != 0) return;
    const absl::Time now = absl::Now();
    if (now - told_ < absl::Seconds(1)) return;
    told_ = now;
    progress_(done_, what);
  }

 private:
  const Engine::OpenProgress& progress_;
  std::uint64_t done_ = 0;
  absl::Time told_ = absl::Now();
};

}  // namespace

absl::Status Engine::Core::Open(const OpenProgress& progress) {
  const absl::Time begin = absl::Now();
  KV_RETURN_IF_ERROR(OpenStores(progress));
  recovery_.seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  {
    absl::MutexLock change(&change_mutex_);
    KeepBallast();
    CountMetaBytes();
  }
  read_pool_ = std::make_unique<WorkPool>(options_.io_threads, options_.io_queue_max);
  decode_pool_ = std::make_unique<WorkPool>(options_.decode_threads, options_.io_queue_max);
  write_pool_ = std::make_unique<WorkPool>(options_.io_threads, options_.io_queue_max);
  blocking_pool_ = std::make_unique<WorkPool>(kBlockingThreads, options_.io_queue_max);
  if (PrefetchBytes() > 0) {
    prefetcher_ =
        std::make_unique<Prefetcher>(PrefetchBytes(), clock_, tier_, *read_pool_,
                                     [this](const StoredFrame& frame) { return ReadAhead(frame); });
  }
  opened_ = true;
  // A store that was opened with a smaller limit shrinks before it serves.
  while (options_.eviction && DiskBytes() > options_.disk_limit_bytes) {
    const std::uint64_t over = DiskBytes() - options_.disk_limit_bytes;
    KV_ASSIGN_OR_RETURN(const std::uint64_t evicted, Evict(over, 0));
    KV_RETURN_IF_ERROR(SyncAndFree());
    if (evicted == 0) break;
  }
  if (options_.prefault_memory) {
    prefaulter_ = std::thread([this] {
      PrefaultFrameMemory(options_.memory_tier_bytes, [this](std::size_t bytes) {
        prefaulted_bytes_ = bytes;
        return !closing_;
      });
    });
  }
  syncer_ = std::thread([this] { RunSyncer(); });
  if (options_.recode_quality && options_.recode_in_background) {
    recoder_ = std::thread([this] { RunRecoder(); });
  }
  return absl::OkStatus();
}

absl::Status Engine::Core::OpenStores(const OpenProgress& progress) {
  KV_RETURN_IF_ERROR(PosixFileSystem().CreateFolder(options_.data_dir));
  allocate_ahead_bytes_ = std::min({kAllocateAheadBytesMax, options_.disk_limit_bytes / kAheadParts,
                                    FreeDiskBytes(options_.data_dir) / kAheadParts});
  const auto open_meta = [this]() -> absl::Status {
    KV_ASSIGN_OR_RETURN(
        auto opened, OpenRocksDbMetaStore(meta_folder(), {.write_buffer_bytes = kMetaBufferBytes}));
    meta_ = std::move(opened.store);
    recovery_.lost_batches += opened.report.lost_batches;
    recovery_.rebuilt_from_segments |= opened.report.recreated;
    for (std::string& note : opened.report.notes) recovery_.notes.push_back(std::move(note));
    return absl::OkStatus();
  };
  absl::Status opened_meta = open_meta();
  if (absl::IsResourceExhausted(opened_meta)) {
    // The disk is full, which is what the ballast is kept for.
    if (PosixFileSystem().Remove(ballast_path()).ok()) opened_meta = open_meta();
  }
  if (absl::IsResourceExhausted(opened_meta)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "data_dir: the disk is full; free some MiB on it (", opened_meta.message(), ")"));
  }
  KV_RETURN_IF_ERROR(opened_meta);
  KV_ASSIGN_OR_RETURN(payload_, OpenSegmentStore(PosixFileSystem(), payload_folder(),
                                                 {.segment_bytes = options_.segment_bytes,
                                                  .allocate_ahead_bytes = allocate_ahead_bytes_}));
  KV_ASSIGN_OR_RETURN(profiles_, ProfileStore::Open(PosixFileSystem(), profile_folder()));
  KV_RETURN_IF_ERROR(LoadIdentity());

  absl::Status loaded = LoadModels();
  if (loaded.ok() && !recovery_.rebuilt_from_segments) loaded = LoadNodes(progress);
  if (absl::IsDataLoss(loaded)) {
    // Rows that cannot be read: what the records say of themselves is as good.
    recovery_.notes.push_back(absl::StrCat("metadata is damaged (", std::string(loaded.message()),
                                           "); rebuilding it from the segments"));
    meta_.reset();
    {
      absl::MutexLock lock(&index_mutex_);
      KV_CHECK(index_.node_count() == 0);
    }
    KV_RETURN_IF_ERROR(MoveAsideRocksDbMetaStore(meta_folder()));
    KV_RETURN_IF_ERROR(open_meta());
    KV_RETURN_IF_ERROR(LoadIdentity());
    KV_RETURN_IF_ERROR(SaveModels());
    recovery_.rebuilt_from_segments = true;
    loaded = absl::OkStatus();
  }
  KV_RETURN_IF_ERROR(loaded);
  if (recovery_.rebuilt_from_segments) KV_RETURN_IF_ERROR(RebuildFromSegments(progress));
  // Rows that named payload that is gone must not outlive this start: the place may be filled
  // again.
  KV_RETURN_IF_ERROR(meta_->Sync());
  LoadPins();
  LoadSessions();

  KV_ASSIGN_OR_RETURN(PayloadRecoveryStats stats, payload_->FinishRecovery());
  recovery_.unreferenced_bytes = stats.unreferenced_bytes;
  recovery_.foreign_files = std::move(stats.foreign_files);
  for (const std::string& file : profiles_->foreign_files()) {
    recovery_.foreign_files.push_back("profiles/" + file);
  }
  recovery_.notes.insert(recovery_.notes.end(), profiles_->notes().begin(),
                         profiles_->notes().end());
  NoteMissingProfiles();
  for (std::string& note : stats.notes) recovery_.notes.push_back(std::move(note));
  return absl::OkStatus();
}

void Engine::Core::NoteMissingProfiles() {
  absl::ReaderMutexLock lock(&index_mutex_);
  for (const auto& [id, frames] : census_.profiles()) {
    if (profiles_->Find(id)) continue;
    recovery_.notes.push_back(absl::StrCat(frames, " frames name the profile ", id.ToHex(),
                                           ", which is not stored; put it again"));
  }
}

// Seed and secret are kept twice: in a file, and as a row.
absl::Status Engine::Core::LoadIdentity() {
  const std::string row_key = StoreRowKey(kIdentityRow);
  absl::StatusOr<StoreConfig> config = ReadIdentityFile(identity_path());
  const bool file_is_good = config.ok();
  const auto row = meta_->Get(MetaTable::kStore, row_key);
  const bool has_row = row.ok() && row->has_value();
  if (absl::IsFailedPrecondition(config.status()) || absl::IsUnimplemented(config.status())) {
    return absl::FailedPreconditionError("data_dir: written by a newer version of kvtrie");
  }
  if (!config.ok() && has_row) config = StoreConfig::Decode(**row);
  if (absl::IsFailedPrecondition(config.status()) || absl::IsUnimplemented(config.status())) {
    return absl::FailedPreconditionError("data_dir: written by a newer version of kvtrie");
  }
  if (!config.ok()) {
    if (!absl::IsNotFound(config.status())) {
      recovery_.notes.push_back(
          "the store's identity is lost; blocks that were stored are not found any more");
    }
    config = NewIdentity();
  }
  if (!file_is_good) {
    KV_RETURN_IF_ERROR(WriteIdentityFile(options_.data_dir, identity_path(), *config));
  }
  if (!has_row) {
    // The metadata was made anew, whatever became of the old one: it knows of no payload.
    recovery_.rebuilt_from_segments |= payload_->Usage().segment_count > 0;
    MetaBatch batch(TenantId{0});
    batch.Put(MetaTable::kStore, row_key, config->Encode());
    KV_RETURN_IF_ERROR(meta_->Write(batch));
  }
  hasher_ = std::make_unique<PathHasher>(config->path_hash_seed);
  namer_ = std::make_unique<TrieNodeNamer>(config->namespace_secret);
  // A secret of its own: the root of nobody.
  runs_ = std::make_unique<RunIndex>(hasher_->Root(TenantId{0}, ModelId{}, "runs of text"),
                                     options_.run_index_bytes);
  return absl::OkStatus();
}

absl::Status Engine::Core::LoadModels() {
  KV_RETURN_IF_ERROR(
      meta_->Scan(MetaTable::kModels, "", "", [&](std::string_view key, std::string_view value) {
        const auto row_key = ModelRowKey::Decode(key);
        const auto spec = ModelSpec::Decode(value);
        if (!row_key || !spec.ok() || spec->Digest() != row_key->model) {
          recovery_.notes.push_back("a model row is damaged; the model must be registered again");
          return true;
        }
        absl::MutexLock lock(&index_mutex_);
        const auto slot = index_.AddModel(row_key->tenant, row_key->model, spec->block_tokens);
        if (slot) {
          models_[*slot] = std::make_shared<const RegisteredModel>(*spec);
          retention_.SetModel(*slot, *spec);
        }
        return true;
      }));
  return absl::OkStatus();
}

// The rows of all models that are in memory, into an empty store.
absl::Status Engine::Core::SaveModels() {
  BatchesByTenant batches;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [slot, model] : models_) {
      const ModelRoot& root = index_.model(slot);
      batches.Of(root.tenant)
          .Put(MetaTable::kModels, ModelRowKey{root.tenant, root.model}.Encode(),
               model->spec.Encode());
    }
  }
  return batches.WriteTo(*meta_);
}

absl::Status Engine::Core::LoadNodes(const OpenProgress& progress) {
  ProgressMeter meter(progress);
  // By node ref: nodes are linked once all are there, since rows come in the order of their ids.
  std::vector<TrieNodeId> parents;
  // Of the text of each node: what the run index is made of, once all are linked.
  std::vector<std::uint64_t> cell_hashes;
  std::vector<std::size_t> first_cells;  // by node ref; of the next one: their end
  // What the rows say of frames beyond what the index keeps.
  std::vector<std::uint32_t> profile_numbers;  // by node ref; 0: none
  std::vector<ProfileId> profiles(1);
  absl::flat_hash_map<ProfileId, std::uint32_t> numbers_of_profiles;
  absl::flat_hash_map<NodeRef, RungRow> other_rungs;
  absl::flat_hash_map<NodeRef, std::vector<RungReference>> references;
  std::vector<std::string> bad_keys;
  std::uint64_t alien_rows = 0;
  const std::uint32_t now = NowSeconds();

  // Everything is read before anything is kept: a damaged table is rebuilt as a whole.
  const absl::Status scanned =
      meta_->Scan(MetaTable::kNodes, "", "", [&](std::string_view key, std::string_view value) {
        meter.Count("loading trie nodes");
        const auto row_key = NodeRowKey::Decode(key);
        if (!row_key) {
          ++alien_rows;
          return true;
        }
        const auto row = NodeRow::Decode(value);
        if (!row.ok()) {
          bad_keys.emplace_back(key);
          return true;
        }
        const NodeFrames frames = FramesOf(*row);
        absl::MutexLock lock(&index_mutex_);
        // A model whose row is lost keeps its nodes until it is registered again.
        const auto slot = index_.AddModel(row_key->tenant, row->model, 0);
        if (!slot) return true;
        const NodeRef ref = index_.InsertUnlinked(
            {.id = row_key->node,
             .model = *slot,
             .path_hash = row->path_hash,
             .provenance = row->provenance,
             .salt = row->salt,
             .extra_key = row->extra_key,
             .tokens = row->tokens,
             .frames = frames,
             .block_surprisal_bits = row->surprisal_bits,
             .last_used_seconds = static_cast<std::uint32_t>(row->created_unix_seconds),
             .expires_seconds = static_cast<std::uint32_t>(row->expires_unix_seconds),
             .priority = row->priority,
             .depth = row->depth});
        parents.resize(index_.ref_end());
        parents[ref] = row->parent;
        first_cells.resize(index_.ref_end(), cell_hashes.size());
        if (options_.run_index_bytes != 0 && row->extra_key.empty()) {
          runs_->HashCells(row->tokens, &cell_hashes);
        }
        for (const RungRow& rung : row->rungs) {
          if (LocationOf(rung) != LocationOf(frames.frame)) {
            other_rungs.emplace(ref, rung);
            continue;
          }
          if (!rung.references.empty()) references.emplace(ref, rung.references);
          if (rung.profile.empty()) continue;
          const auto [number, is_new] = numbers_of_profiles.try_emplace(
              rung.profile, static_cast<std::uint32_t>(profiles.size()));
          if (is_new) profiles.push_back(rung.profile);
          profile_numbers.resize(index_.ref_end());
          profile_numbers[ref] = number->second;
        }
        if (row->expires_unix_seconds != 0) {
          expiries_.emplace(std::max(now, static_cast<std::uint32_t>(row->expires_unix_seconds)),
                            row_key->node);
        }
        return true;
      });
  if (alien_rows > 0) {
    recovery_.notes.push_back(absl::StrCat(alien_rows, " rows have no key of a trie node"));
  }
  BatchesByTenant batches;
  std::vector<PayloadLocation> unreferenced;
  absl::flat_hash_map<NodeRef, std::vector<RungRow>> kept_rungs;  // of nodes that lost one
  {
    absl::MutexLock lock(&index_mutex_);
    if (!scanned.ok()) {
      // The rebuild starts from an empty index.
      for (NodeRef ref = index_.ref_end() - 1; ref > 0; --ref) {
        if (index_.alive(ref)) index_.Erase(ref);
      }
      expiries_ = {};
      return scanned;
    }
    const auto rungs_of = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      if (const auto kept = kept_rungs.find(ref); kept != kept_rungs.end()) return kept->second;
      std::vector<RungRow> rungs;
      const IndexNode& node = index_.node(ref);
      if (node.has_frame()) {
        rungs.push_back(
            {.rung = RungOf(node.codec()),
             .quality = node.quality(),
             .codec = node.codec(),
             .profile = ref < profile_numbers.size() ? profiles[profile_numbers[ref]] : ProfileId{},
             .segment = node.frame.segment,
             .offset_units = node.frame.offset_units,
             .record_bytes = node.frame.record_bytes});
        if (const auto found = references.find(ref); found != references.end()) {
          rungs.back().references = found->second;
        }
      }
      if (const auto other = other_rungs.find(ref); other != other_rungs.end()) {
        rungs.push_back(other->second);
      }
      return rungs;
    };
    const auto keep_only = [&](NodeRef ref, std::vector<RungRow> rungs)
                               ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_) {
                                 NodeRow left;
                                 left.provenance = index_.node(ref).on_lossy != 0
                                                       ? Provenance::kOnLossy
                                                       : Provenance::kExact;
                                 left.rungs = rungs;
                                 index_.SetFrames(ref, FramesOf(left));
                                 kept_rungs[ref] = std::move(rungs);
                               };
    std::vector<NodeRef> orphans;
    std::vector<NodeRef> frameless;
    std::vector<NodeRef> members;  // with a frame that was coded against others
    std::uint64_t lost_member_count = 0;
    for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
      if (!index_.alive(ref)) continue;
      const IndexNode& node = index_.node(ref);
      std::vector<RungRow> rungs = rungs_of(ref);
      const auto lost = std::erase_if(rungs, [this](const RungRow& rung) {
        return !payload_->MarkLive(LocationOf(rung)).ok();
      });
      for (const RungRow& rung : rungs) CountFrame(ref, rung);
      for (const RungRow& rung : rungs) {
        if (!rung.references.empty()) members.push_back(ref);
      }
      if (lost > 0) keep_only(ref, std::move(rungs));
      if (!node.has_frame()) frameless.push_back(ref);
      NodeRef parent = 0;
      if (!parents[ref].empty()) {
        parent = index_.FindById(parents[ref]);
        if (parent == 0 || index_.node(parent).model != node.model ||
            index_.node(parent).depth + 1 != node.depth) {
          orphans.push_back(ref);
          continue;
        }
      }
      index_.Link(ref, parent);
    }
    const auto drop = [&](NodeRef ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_) {
      const IndexNode& node = index_.node(ref);
      const TenantId tenant = index_.model(node.model).tenant;
      batches.Of(tenant).Delete(MetaTable::kNodes, NodeRowKey{tenant, node.id}.Encode());
      for (const RungRow& rung : rungs_of(ref)) {
        UncountFrame(ref, rung);
        unreferenced.push_back(LocationOf(rung));
      }
      index_.Erase(ref);
      ++recovery_.nodes_dropped;
    };
    std::vector<NodeRef> dropped;
    for (const NodeRef orphan : orphans) CollectSubtree(orphan, &dropped);
    for (const NodeRef ref : dropped) drop(ref);
    // What was coded against a frame that is gone is of no use.
    for (const NodeRef ref : members) {
      if (!index_.alive(ref)) continue;
      const IndexNode& node = index_.node(ref);
      std::vector<RungRow> rungs = rungs_of(ref);
      const auto bad = std::find_if(
          rungs.begin(), rungs.end(),
          [&](const RungRow& rung) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
            return std::any_of(rung.references.begin(), rung.references.end(),
                               [&](const RungReference& reference)
                                   ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                                     const NodeRef named = index_.FindById(reference.node);
                                     return named == 0 || index_.node(named).model != node.model ||
                                            !index_.node(named).quality_on(reference.rung);
                                   });
          });
      if (bad == rungs.end()) continue;
      UncountFrame(ref, *bad);
      unreferenced.push_back(LocationOf(*bad));
      rungs.erase(bad);
      keep_only(ref, std::move(rungs));
      if (!node.has_frame()) frameless.push_back(ref);
      ++lost_member_count;
    }
    if (lost_member_count > 0) {
      recovery_.notes.push_back(absl::StrCat(
          lost_member_count, " frames were coded against blocks that are gone; they are dropped"));
    }
    // A block whose payload is gone: useless at the end of a path, else it waits to be put again.
    std::erase_if(frameless, [this](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      return !index_.alive(ref);
    });
    std::sort(frameless.begin(), frameless.end(),
              [this](NodeRef a, NodeRef b) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                return index_.node(a).depth > index_.node(b).depth;
              });
    for (const NodeRef ref : frameless) {
      if (index_.node(ref).is_leaf()) drop(ref);
    }
    index_.FinishLoading();
    first_cells.resize(std::size_t{index_.ref_end()} + 1, cell_hashes.size());
    LoadRuns(cell_hashes, first_cells);
    retention_.OnLoaded();
    recovery_.nodes_loaded = index_.node_count();
    recovery_.nodes_dropped += bad_keys.size();
  }
  {
    absl::MutexLock lock(&sync_mutex_);
    for (const PayloadLocation& at : unreferenced) {
      pending_frees_.push_back(at);
      pending_free_bytes_ += at.disk_bytes();
    }
  }
  for (const std::string& key : bad_keys) {
    batches.Of(NodeRowKey::Decode(key)->tenant).Delete(MetaTable::kNodes, key);
  }
  for (const auto& [ref, kept] : kept_rungs) {
    NodeRowKey row_key;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      if (!index_.alive(ref)) continue;
      row_key = {index_.model(index_.node(ref).model).tenant, index_.node(ref).id};
    }
    auto row = ReadRow(row_key.tenant, row_key.node);
    if (!row.ok()) continue;
    std::erase_if(row->rungs, [&kept = kept](const RungRow& rung) {
      return std::none_of(kept.begin(), kept.end(), [&rung](const RungRow& one) {
        return LocationOf(one) == LocationOf(rung);
      });
    });
    batches.Of(row_key.tenant).Put(MetaTable::kNodes, row_key.Encode(), row->Encode());
  }
  return batches.WriteTo(*meta_);
}

// A node may have a record for each rung: what the first one said of it gets the rung of the
// second.
absl::Status Engine::Core::RebuildFromSegments(const OpenProgress& progress) {
  ProgressMeter meter(progress);
  absl::flat_hash_map<std::pair<TenantId, TrieNodeId>, NodeRow> rows;  // not written yet
  std::vector<std::pair<TenantId, TrieNodeId>> members;  // with a frame coded against others
  const auto write_rows = [&]() -> absl::Status {
    BatchesByTenant batches;
    for (const auto& [key, row] : rows) {
      batches.Of(key.first).Put(MetaTable::kNodes, NodeRowKey{key.first, key.second}.Encode(),
                                row.Encode());
    }
    rows.clear();
    return batches.WriteTo(*meta_);
  };
  absl::Status written;
  KV_RETURN_IF_ERROR(payload_->Scan([&](const PayloadLocation& at, std::string_view bytes) {
    meter.Count("rebuilding metadata from segments");
    auto descriptor = NodeDescriptor::Decode(bytes);
    if (!descriptor.ok() || !written.ok()) return;
    const auto [found, is_new] = rows.try_emplace({descriptor->tenant, descriptor->node});
    NodeRow& row = found->second;
    if (is_new) {
      auto stored = ReadRow(descriptor->tenant, descriptor->node);
      row = stored.ok() ? *std::move(stored) : std::move(descriptor->row);
    }
    RungRow rung{descriptor->rung, descriptor->quality, descriptor->codec, descriptor->profile,
                 at.segment,       at.offset_units,     at.record_bytes};
    if (rung.codec == CodecId::kReferenced) {
      rung.references = ReferencesOnDisk(at, row.tokens.size());
      if (rung.references.empty()) return;  // damaged: the block has to be put again
      members.emplace_back(descriptor->tenant, descriptor->node);
    }
    row.SetRung(rung);
    if (rows.size() >= kRowsPerBatch) written = write_rows();
  }));
  KV_RETURN_IF_ERROR(written);
  KV_RETURN_IF_ERROR(write_rows());
  KV_RETURN_IF_ERROR(FindRungsOfReferences(members));
  return LoadNodes(progress);
}

// What the frame of a record was coded against, on a rung that is yet to be found. Empty: it is
// damaged.
std::vector<RungReference> Engine::Core::ReferencesOnDisk(const PayloadLocation& at,
                                                          std::size_t block_tokens) {
  std::vector<RungReference> references;
  const auto stored = payload_->Read(at);
  if (!stored.ok()) return references;
  const auto view = FrameView::Parse(stored->view);
  if (!view.ok()) return references;
  const auto table = ReferencesOf(*view, block_tokens);
  if (!table.ok()) return references;
  for (const FrameReference& reference : table->references) {
    references.push_back({.node = reference.node, .rung = Rung::kCoded});
  }
  return references;
}

// A coded frame where there is one: what is coded is kept longer, and others were coded against it.
absl::Status Engine::Core::FindRungsOfReferences(
    std::span<const std::pair<TenantId, TrieNodeId>> members) {
  BatchesByTenant batches;
  for (const auto& [tenant, node] : members) {
    auto row = ReadRow(tenant, node);
    if (!row.ok()) continue;
    for (RungRow& rung : row->rungs) {
      for (RungReference& reference : rung.references) {
        const auto named = ReadRow(tenant, reference.node);
        if (named.ok() && named->FindRung(Rung::kCoded) == nullptr) reference.rung = Rung::kExact;
      }
    }
    batches.Of(tenant).Put(MetaTable::kNodes, NodeRowKey{tenant, node}.Encode(), row->Encode());
  }
  return batches.WriteTo(*meta_);
}

// Enters all nodes into the index of text runs. Salts stand in first blocks, so the few paths that
// have one are looked at first, and all other nodes in the order in which they lie in memory.
void Engine::Core::LoadRuns(std::span<const std::uint64_t> cell_hashes,
                            std::span<const std::size_t> first_cells) {
  absl::flat_hash_map<NodeRef, std::uint64_t> salted_spaces;
  std::vector<std::uint64_t> spaces;  // by model, without a salt
  for (std::size_t i = 0; i < index_.model_count(); ++i) {
    const ModelRoot& root = index_.model(static_cast<ModelSlot>(i));
    spaces.push_back(TextSpaceOf(root.tenant, root.model, {}));
    for (NodeRef first = root.first_child; first != 0; first = index_.node(first).next_sibling) {
      if (index_.node(first).has_extra == 0 || index_.salt(first).empty()) continue;
      const std::uint64_t space = TextSpaceOf(root.tenant, root.model, index_.salt(first));
      std::vector<NodeRef> nodes;
      CollectSubtree(first, &nodes);
      for (const NodeRef node : nodes) salted_spaces.emplace(node, space);
    }
  }
  for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
    if (!index_.alive(ref)) continue;
    const IndexNode& node = index_.node(ref);
    const auto salted = salted_spaces.empty() ? salted_spaces.end() : salted_spaces.find(ref);
    const std::uint64_t space = salted == salted_spaces.end() ? spaces[node.model] : salted->second;
    const std::uint32_t block_tokens = index_.model(node.model).block_tokens;
    if (block_tokens != 0 && block_tokens < RunIndex::kCellTokens) {
      runs_->Add(index_, ref, space);  // its cells reach into the blocks above
    } else {
      runs_->AddHashed(
          ref, space,
          cell_hashes.subspan(first_cells[ref], first_cells[ref + 1] - first_cells[ref]));
    }
  }
}

void Engine::Core::LoadPins() {
  const std::int64_t now = clock_.UnixSeconds();
  BatchesByTenant batches;
  const absl::Status scanned =
      meta_->Scan(MetaTable::kPins, "", "", [&](std::string_view key, std::string_view value) {
        const auto row_key = PinRowKey::Decode(key);
        if (!row_key) return true;
        const auto row = PinRow::Decode(value);
        absl::MutexLock lock(&index_mutex_);
        const NodeRef ref = row.ok() ? index_.FindById(row->node) : 0;
        if (ref == 0 || row->end_unix_seconds <= now) {
          batches.Of(row_key->tenant).Delete(MetaTable::kPins, std::string(key));
          return true;
        }
        HoldTable::Pin pin{.tenant = row_key->tenant,
                           .hold = {ref, row->node},
                           .blocks = index_.node(ref).depth,
                           .bytes = 0,
                           .end_unix_seconds = row->end_unix_seconds};
        for (NodeRef at = ref; at != 0; at = index_.parent(at)) {
          pin.bytes += StoredBytes(index_.node(at));
        }
        holds_.AddPin(row_key->pin, pin);
        return true;
      });
  if (!scanned.ok()) recovery_.notes.push_back("pins could not be read; they are dropped");
  if (!batches.WriteTo(*meta_).ok()) {
    recovery_.notes.push_back("ended pins could not be removed");
  }
}

}  // namespace kvtrie
