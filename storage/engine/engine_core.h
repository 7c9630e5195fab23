#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/byte_budget.h"
#include "storage/base/log_limiter.h"
#include "storage/codec/reference_table.h"
#include "storage/engine/engine.h"
#include "storage/engine/event_log.h"
#include "storage/engine/frame_census.h"
#include "storage/engine/hold_table.h"
#include "storage/engine/memory_tier.h"
#include "storage/engine/prefetcher.h"
#include "storage/engine/reference_counts.h"
#include "storage/engine/reference_digests.h"
#include "storage/engine/retention_policy.h"
#include "storage/engine/throughput_meter.h"
#include "storage/engine/work_pool.h"
#include "storage/group/session_groups.h"
#include "storage/meta/meta_store.h"
#include "storage/meta/node_row.h"
#include "storage/payload/payload_store.h"
#include "storage/trie/path_hash.h"
#include "storage/trie/run_index.h"
#include "storage/trie/session_ends.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// A frame's place as the index keeps it, in the payload store's words.
inline PayloadLocation LocationOf(const FrameRef& frame) {
  return {frame.segment, frame.offset_units, frame.record_bytes};
}

inline PayloadLocation LocationOf(const RungRow& rung) {
  return {rung.segment, rung.offset_units, rung.record_bytes};
}

// At which a frame of the row may be served.
Quality ServedQuality(const NodeRow& row, const RungRow& rung);

// What the index keeps of a row's frames: the smaller one, and of two as small the better.
NodeFrames FramesOf(const NodeRow& row);

// Counters of EngineStats that are counted as they happen.
struct EngineCounters {
  using Counter = std::atomic<std::uint64_t>;
  Counter lookups{0}, lookup_blocks{0}, lookup_hit_blocks{0};
  Counter memory_reads{0}, disk_reads{0}, disk_read_bytes{0}, missed_reads{0}, corrupt_frames{0},
      read_errors{0};
  Counter put_blocks{0}, stored_blocks{0}, duplicate_blocks{0}, failed_blocks{0}, stored_bytes{0},
      raw_bytes{0};
  Counter evicted_blocks{0}, evicted_frames{0}, evicted_bytes{0}, expired_blocks{0},
      deleted_blocks{0}, refused_full{0};
  Counter decoded_blocks{0}, undecoded_blocks{0}, decode_errors{0}, undecodable_frames{0};
  std::atomic<std::int64_t> decode_nanoseconds{0};
  Counter similar_queries{0}, similar_cut_short{0};
  Counter text_reuse_lookups{0}, text_reuse_forbidden{0}, text_reuse_offered_tokens{0};
  Counter token_cache_misses{0}, syncs{0}, sync_errors{0};
  Counter detached_blocks{0}, lost_members{0};
  Counter recoded_blocks{0}, recoded_raw_bytes{0}, recoded_bytes{0}, recode_failed_blocks{0},
      refined_blocks{0}, recoded_again_blocks{0};
  std::atomic<std::int64_t> recode_nanoseconds{0};
};

// A model that was registered.
struct RegisteredModel {
  explicit RegisteredModel(const ModelSpec& from);

  ModelSpec spec;
  KvGeometry geometry;
  CodecKey codec_key;
  std::uint64_t raw_frame_bytes;

  // Whether frames of the model may name this profile.
  bool Fits(const ProfileHeader& profile) const {
    return profile.codec_key == codec_key && spec.layout_tag.empty();
  }
};

class PutSessionHandle;
class TriePutSession;

// The engine's parts and how they work together. Cut by theme over engine_*.cc:
//   engine.cc           models, the facade
//   engine_lookup.cc    walks and lookups
//   engine_paths.cc     what is done to a path: touch, pins, retention
//   engine_describe.cc  what nodes and the store are like
//   engine_groups.cc    session groups, and where named sessions end
//   engine_prefetch.cc  what matched blocks cost to have; reading ahead
//   engine_read.cc      finding, reading and decoding frames
//   engine_put.cc       puts: sessions and writing
//   engine_publish.cc   puts: rows and index
//   engine_profiles.cc  codec profiles
//   engine_space.cc     what fits: limits, room, what keeps the store from serving
//   engine_eviction.cc  choosing what goes
//   engine_removal.cc   unlinking: deletes, ends of time, damage
//   engine_recode.cc    coded frames in the background
//   engine_references.cc  frames that were coded against others
//   engine_text_reuse.cc  the same text under other prefixes, for lookups
//   engine_sync.cc      syncing, freeing, maintenance
//   engine_recovery.cc  opening
//   engine_verify.cc    the whole-structure check
//
// Locks, in the order in which they are taken:
//   recode_mutex_   one thread recodes at a time
//   room_mutex_     one thread makes room at a time
//   syncing_mutex_  one sync at a time
//   change_mutex_   held by whoever changes stored rows, over the write to the meta store
//   index_mutex_    the trie in memory, models and holds; short, held over I/O by Verify alone
//   sync_mutex_     what waits for the next sync
// publish_mutex_ (the queue of finished blocks) is taken with none of them.
class Engine::Core {
 public:
  Core(const EngineOptions& options, Clock& clock, std::shared_ptr<const BlockCodec> codec);
  ~Core();

  absl::Status Open(const OpenProgress& progress);

  // --- engine.cc ---
  absl::StatusOr<ModelInfo> RegisterModel(TenantId tenant, const ModelSpec& spec);
  absl::StatusOr<ModelInfo> GetModel(TenantId tenant, const ModelId& id);
  std::vector<ModelInfo> ListModels(TenantId tenant);

  // --- engine_lookup.cc ---
  // nullopt only when `may_block` is false.
  std::optional<absl::StatusOr<LookupResult>> Lookup(TenantId tenant, const LookupQuery& query,
                                                     bool may_block);
  void ReleaseLease(TenantId tenant, const LeaseId& lease);

  // --- engine_paths.cc ---
  absl::StatusOr<std::uint32_t> Touch(TenantId tenant, const Selection& selection);
  absl::StatusOr<PinInfo> Pin(TenantId tenant, const Selection& selection,
                              std::chrono::seconds duration);
  absl::StatusOr<PinInfo> ExtendPin(TenantId tenant, const PinId& pin,
                                    std::chrono::seconds duration);
  absl::StatusOr<bool> Unpin(TenantId tenant, const PinId& pin);
  std::vector<PinInfo> ListPins(TenantId tenant);
  absl::StatusOr<RetentionChange> SetRetention(TenantId tenant, const Selection& selection,
                                               const Retention& retention);

  // --- engine_describe.cc ---
  absl::StatusOr<std::vector<NodeInfo>> ListChildren(TenantId tenant, const ModelId& model,
                                                     const TrieNodeId& parent,
                                                     const TrieNodeId& after, std::size_t count);
  absl::StatusOr<std::vector<NodeInfo>> DescribePath(TenantId tenant, const Selection& selection);
  EngineStats Stats();

  // --- engine_groups.cc ---
  absl::StatusOr<std::optional<TrieNodeId>> GroupOf(TenantId tenant, const TrieNodeId& node);
  absl::StatusOr<GroupPage> ListGroups(TenantId tenant, const TrieNodeId& after, std::size_t count);
  absl::StatusOr<GroupDescription> DescribeGroup(TenantId tenant, const TrieNodeId& id,
                                                 std::size_t branches_max);

  // --- engine_read.cc ---
  using FoundFrames = Engine::FoundFrames;
  // nullopt only when `may_block` is false.
  std::optional<absl::StatusOr<FoundFrames>> FindFrames(TenantId tenant, const ModelId& model,
                                                        std::span<const TrieNodeId> nodes,
                                                        Quality min_quality, ReadAs as,
                                                        bool may_block);
  absl::StatusOr<FoundFrames> FindFramesOfPath(TenantId tenant, const PathView& path,
                                               std::uint32_t first_block, std::uint32_t block_count,
                                               Quality min_quality, ReadAs as);
  std::vector<std::vector<TokenId>> TokensOfBlocks(TenantId tenant, const ModelId& model,
                                                   std::span<const TrieNodeId> nodes);
  std::optional<LoadedFrame> TryReadFrame(const StoredFrame& frame, ReadAs as);
  void ReadFrames(std::span<const StoredFrame> frames, ReadAs as, OnFrameRead on_read);

  // --- engine_similar.cc ---
  absl::StatusOr<SimilarResult> Similar(TenantId tenant, const SimilarRequest& request);

  // --- engine_profiles.cc ---
  absl::StatusOr<std::unique_ptr<ProfileUpload>> BeginProfile(TenantId tenant,
                                                              std::uint64_t total_bytes,
                                                              const ProfileId& expected);
  void DescribeProfile(TenantId tenant, StoredProfile* profile);
  std::vector<StoredProfile> ListProfiles(TenantId tenant);
  absl::Status DeleteProfile(const ProfileId& id);

  // --- engine_put.cc ---
  absl::StatusOr<std::unique_ptr<PutSession>> BeginPut(TenantId tenant, const PutAnnouncement& put);
  bool Drain(std::chrono::milliseconds deadline);

  // --- engine_removal.cc ---
  absl::StatusOr<DeletedCount> Delete(TenantId tenant, const Selection& selection);

  // --- engine_sync.cc ---
  void RunMaintenance();

  // --- engine_recode.cc ---
  std::size_t RecodeSome();

  // --- engine_verify.cc ---
  absl::Status Verify(bool structure_only, bool repair,
                      const std::function<bool(const VerifyProgress&)>& report);

  const EngineOptions options_;
  Clock& clock_;
  EventLog events_;
  ByteBudget put_budget_;
  RecoveryReport recovery_;
  std::unique_ptr<WorkPool> blocking_pool_;
  std::unique_ptr<ProfileStore> profiles_;  // constant after Open

 private:
  friend class TriePutSession;
  friend class PutSessionHandle;
  friend class ProfileUploadHandle;

  // A block whose record is written, or a wish to give one up (`record_bytes` 0 and a failed
  // status).
  struct PublishItem {
    std::shared_ptr<TriePutSession> session;
    std::uint32_t block = 0;
    absl::Status failure;  // not OK: the block did not come
    RungRow rung;          // with its location in `at`
    Quality frame_quality = Quality::kExact;
    PayloadLocation at;
    SharedBytes frame;
    PutSession::DoneCallback on_done;
  };

  // What a finished item calls back with.
  struct Outcome {
    PutSession::DoneCallback on_done;
    absl::StatusOr<PutBlockResult> result;
    bool durable = false;
  };

  // A node whose row is being written, with a frame that is in no index yet.
  struct PendingNode {
    std::shared_ptr<TriePutSession> session;
    std::uint32_t block = 0;
    TrieNodeId id;
    NodeRow row;
    PublishItem* item = nullptr;
    NodeRef existing = 0;          // the node is there and gets a frame
    bool is_upgrade = false;       // one more, or a better one: the rest of the row stays
    std::vector<RungRow> dropped;  // that make way for it
  };

  enum class RemovalReason { kEvicted, kExpired, kDeleted, kCorrupt };

  std::uint32_t NowSeconds() const { return static_cast<std::uint32_t>(clock_.UnixSeconds()); }

  // engine.cc
  absl::StatusOr<ModelSlot> FindRegistered(TenantId tenant, const ModelId& model) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // What a reader gets of a node that serves this quality. Where only the larger of two frames
  // will do, its exact size is in a row, and that of a raw one is told.
  struct ServedSize {
    std::uint64_t bytes = 0;
    Quality quality = Quality::kExact;
  };
  ServedSize ServedBy(const IndexNode& node, Quality min_quality) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  ModelInfo DescribeModel(ModelSlot slot) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // What the frames of a node take on disk; an estimate where there are two.
  std::uint64_t StoredBytes(const IndexNode& node) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  std::uint64_t RawFrameBytes(ModelSlot slot) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);

  // engine_lookup.cc
  // The walk of a registered model, with unverified blocks compared with their rows. nullopt: that
  // is needed, and `may_block` is false.
  struct Walked {
    std::vector<std::pair<NodeRef, TrieNodeId>> nodes;
    std::size_t exact_blocks = 0;  // of them, those before the first on lossy KV
    std::uint32_t block_count = 0;
    std::uint32_t ignored_tail_tokens = 0;
  };
  std::optional<Walked> Walk(ModelSlot slot, TenantId tenant, const PathView& path,
                             std::uint32_t block_tokens, Quality min_quality, bool may_block);
  // How many of the unverified blocks at the front are what the path says.
  std::size_t CompareWithRows(const std::vector<std::pair<NodeRef, TrieNodeId>>& nodes,
                              const std::vector<std::uint32_t>& unverified, TenantId tenant,
                              const HashedPath& path);

  // engine_prefetch.cc
  // Of one model, in order: the frame that serves each matched block. A frame whose place only a
  // row knows has none.
  using ServingFrames = std::vector<StoredFrame>;
  std::vector<bool> InMemory(const ServingFrames& frames) const;
  std::vector<BlockRun> RunsOf(std::span<const ServingFrames> models,
                               const std::vector<std::vector<bool>>& in_memory) const;
  // Has the frames of a lookup that are not in memory read, and those that are likely to be asked
  // for next. `tail`: tokens behind the blocks of the query; nullopt: not all of these are stored,
  // so that others follow.
  void Prefetch(const LookupQuery& query, std::span<const ServingFrames> models,
                const std::vector<std::vector<bool>>& in_memory,
                std::optional<std::span<const TokenId>> tail);
  // Frames of blocks that are likely to follow a node, and do not contradict the tokens that do.
  std::vector<StoredFrame> LikelyNextFrames(const TrieNodeId& last, std::span<const TokenId> tail,
                                            Quality min_quality);
  std::optional<SharedBytes> ReadAhead(const StoredFrame& frame);
  std::uint64_t PrefetchBytes() const {
    return std::min(options_.prefetch_bytes, options_.memory_tier_bytes / 2);
  }

  // engine_similar.cc
  // As in RunQuery.
  std::uint64_t TextSpaceOf(TenantId tenant, const ModelId& model, std::string_view salt) const {
    return hasher_->Root(tenant, model, salt);
  }
  // Searches the index, in rounds between which tokens are read that are in no memory, at most
  // RunIndex::kUnreadMax at a time. `search` gives the nodes that lack them; it is done when there
  // are none, or in its last round: what is not read by then is not compared, and so not found. The
  // index is held while it runs.
  static constexpr int kSearchReadsMax = 3;
  using SearchRound = std::function<std::span<const NodeRef>(bool is_last)>;
  void SearchInRounds(TenantId tenant, int reads_max, const SearchRound& search);
  void CacheTokensOf(TenantId tenant, std::span<const std::pair<NodeRef, TrieNodeId>> nodes);

  // engine_text_reuse.cc
  // A run of stored text, and what its nodes were when it was found.
  struct FoundText {
    TextRun run;
    std::vector<TrieNodeId> ids;
  };
  // The longest runs of a lookup's text behind `first_token`, by first_token.
  std::vector<FoundText> FindReusableText(TenantId tenant, ModelSlot slot, const LookupQuery& query,
                                          const Walked& walked, std::uint32_t first_token);
  void LeaveOutFirstToken(TextRun* run) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  bool MayBeReused(NodeRef ref, Quality min_quality) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // Those that are still there; their last nodes, which hold all, go into `holds`.
  void AddReusableRuns(std::span<const FoundText> found, Quality min_quality, LookupResult* result,
                       std::vector<HoldTable::Hold>* holds)
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);

  // engine_groups.cc
  // Named sessions and where their rows are about to say that they end; empty: nowhere.
  using NamedEnds = std::map<std::pair<TenantId, std::string>, TrieNodeId>;
  struct SessionMove {
    TenantId tenant;
    std::string session;
    TrieNodeId from;  // empty: the session is new
    TrieNodeId to;
  };
  // Where no end is known in memory, reads the rows as they are: call it before they are written.
  std::vector<SessionMove> FindMoves(const NamedEnds& ends)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // Call it after they were written.
  void MoveSessions(const std::vector<SessionMove>& moves)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_);
  // The group of the first `matched` nodes of a path; empty: none.
  TrieNodeId GroupOfPath(const std::vector<std::pair<NodeRef, TrieNodeId>>& nodes,
                         std::size_t matched) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  void LoadSessions();

  // engine_paths.cc
  // The nodes that a selection of a single path means, deepest last. Empty: nothing is stored.
  absl::StatusOr<std::vector<std::pair<NodeRef, TrieNodeId>>> SelectPath(
      TenantId tenant, const Selection& selection);
  static absl::Status NothingSelected() {
    return absl::NotFoundError("selection: nothing of it is stored");
  }
  // When what gets `ttl` now is to end; 0 = never. Ends that a row cannot hold are as good as never
  // coming.
  std::uint32_t ExpiryOf(std::chrono::seconds ttl) const;
  absl::Status SetRetentionOf(TenantId tenant,
                              std::span<const std::pair<NodeRef, TrieNodeId>> nodes,
                              const Retention& retention, RetentionChange* change);

  // engine_describe.cc
  NodeInfo Describe(NodeRef ref) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  absl::Status CollectChildren(TenantId tenant, const ModelId& model, const TrieNodeId& parent,
                               const TrieNodeId& after, std::size_t count,
                               std::vector<NodeInfo>* infos);
  // Completes descriptions of nodes that hold two frames.
  void DescribeOtherFrames(TenantId tenant, std::vector<NodeInfo>* infos);

  // engine_read.cc
  // DataLoss: it is not there, or damaged.
  absl::StatusOr<NodeRow> ReadRow(TenantId tenant, const TrieNodeId& node);
  bool IsReadable(CodecId codec, ReadAs as) const {
    return codec_ != nullptr || codec == CodecId::kRaw || as == ReadAs::kStored ||
           (as == ReadAs::kFrame && codec != CodecId::kReferenced);
  }
  // The smallest frame of the row that is good enough, of those that can be read if there are any;
  // null: none is.
  const RungRow* Choose(const NodeRow& row, Quality min_quality, ReadAs as) const;
  StoredFrame FrameInIndex(const IndexNode& node) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  static StoredFrame FrameInRow(const TrieNodeId& node, const NodeRow& row, const RungRow& rung,
                                std::uint64_t raw_frame_bytes);
  // The frame as it is stored, from memory; nullopt: it is not there.
  std::optional<LoadedFrame> FromMemory(const StoredFrame& frame);
  // The frame as it lies on disk; DataLoss when it is not what the node names.
  absl::StatusOr<LoadedFrame> LoadFrame(const StoredFrame& frame);
  // The tokens of a node of this model. NotFound: it is gone.
  absl::StatusOr<std::vector<TokenId>> TokensOf(const TrieNodeId& node, const ModelId& model);
  // Raw frames of frames of one model, none of which is raw.
  std::vector<absl::StatusOr<LoadedFrame>> DecodeFrames(std::span<const StoredFrame> stored,
                                                        std::span<const LoadedFrame> loaded);
  void ReadDecoded(std::span<const StoredFrame> frames, const OnFrameRead& on_read);
  // Raw KV, on the calling thread.
  std::vector<absl::StatusOr<LoadedFrame>> ReadRawNow(std::span<const StoredFrame> frames);
  // LoadFrame for a reader: counted, and a frame that is bad is dropped.
  absl::StatusOr<LoadedFrame> ReadFromDisk(const StoredFrame& frame);
  // Whether the node still names this frame.
  bool IsCurrent(const StoredFrame& frame);

  // engine_put.cc
  void WriteBlocks(std::shared_ptr<TriePutSession> session,
                   std::vector<PutSession::FinishedBlock> blocks);
  void GiveUpBlock(std::shared_ptr<TriePutSession> session, std::uint32_t block);
  // A block on its way to the disk.
  struct RecordToWrite {
    PayloadRecord* record;
    PublishItem* item;
  };
  // Completes the record of a block; a failure is in the item.
  PublishItem SealBlock(std::shared_ptr<TriePutSession> session,
                        PutSession::FinishedBlock& finished);
  // Writes records behind each other, and says in the items where each is or why it is not.
  void WriteRecords(std::span<const RecordToWrite> group);
  // That the profile of the item's frame, if it has one, is here and is for it.
  absl::Status CheckProfile(const PublishItem& item) const;

  // engine_publish.cc
  void Enqueue(std::vector<PublishItem> items);
  // Returns what has to wait for what this group has published: it is the next group.
  std::vector<PublishItem> PublishGroup(std::vector<PublishItem> group,
                                        std::vector<Outcome>* outcomes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // What becomes of a frame for a node that is there already.
  enum class Arrival { kNew, kUpgrade, kDuplicate };
  Arrival ArrivalOf(const IndexNode& node, const PublishItem& item) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  absl::Status PrepareNode(const PublishItem& item, NodeRef existing, Arrival arrival,
                           PendingNode* node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  void AddToIndex(const std::vector<PendingNode>& pending, const std::vector<SessionMove>& moves)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  void Conclude(std::vector<Outcome> outcomes);

  // engine_space.cc
  // For so many bytes of records, of so many nodes that may be new.
  absl::Status MakeRoom(std::uint64_t bytes, std::uint64_t nodes);
  std::uint64_t SurplusNodes(std::uint64_t coming) const;
  bool FitsTheDisk(std::uint64_t bytes) const;
  std::uint64_t DiskBytes() const;
  absl::Status WriteMeta(const MetaBatch& batch);
  // What keeps the store from serving in full; bits of degraded_.
  enum class Degradation : unsigned {
    kDiskFull,
    kDiskUnwritable,
    kMetaDiskFull,
    kMetaUnwritable,
    kNotSynced,
    kDiskShared,
  };
  void SetDegraded(Degradation what, bool is_so);
  std::vector<std::string> DegradedReasons() const;
  std::uint64_t BallastBytes() const;
  void KeepBallast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // False: it was gone already.
  bool DropBallast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  void CountMetaBytes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);

  // What a put names a stored path by.
  struct StoredPath {
    TenantId tenant;
    ModelId model;
    std::shared_ptr<const RegisteredModel> registered;
    std::string salt;
    std::vector<std::pair<std::uint32_t, std::string>> extra_keys;  // by block
    std::vector<TrieNodeId> nodes;                                  // from the first block on

    std::vector<ExtraKey> ExtraKeys() const;  // views
  };

  // engine_references.cc
  // A frame came into a node's row, or left it.
  void CountFrame(NodeRef ref, const RungRow& rung) ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_);
  void UncountFrame(NodeRef ref, const RungRow& rung) ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_);
  // That what others were coded against is not among what makes way; they are coded anew then.
  absl::Status CheckNotNeeded(const PublishItem& item, const PendingNode& node)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // A sealed frame of a put that was coded against others, and what it says of them.
  struct MemberToCheck {
    PublishItem* item;
    const ReferenceTable* table;
  };
  // That frames were coded against what the session was offered: its tokens, at its place, and the
  // KV that is stored of it; `failure` of the items says what is not so. Decodes references.
  void CheckCodedAgainst(const TriePutSession& session, std::span<const MemberToCheck> members);
  // That what the item's frame was coded against is still that, and may be.
  absl::Status CheckReferences(const PublishItem& item)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // Where the frame of a node on a rung lies; none: there is none.
  PayloadLocation LocationOn(const TrieNodeId& node, Rung rung);
  std::vector<StoredFrame> FramesToReference(const TrieNodeId& node);
  // Raw KV that frames were coded against; what cannot be had is not in it.
  struct DecodedReference {
    std::vector<TokenId> tokens;
    LoadedFrame raw;
  };
  using DecodedReferences = std::map<std::pair<TrieNodeId, KvDigest>, DecodedReference>;
  DecodedReferences DecodeReferences(const ModelId& model, std::span<const FrameReference> wanted);
  // `may_refine`: blocks that stand in several places may become references.
  CodingPlan PlanCoding(const StoredPath& path, std::span<const TokenId> tokens,
                        std::uint32_t first_block, const ProfileId& profile, Quality level,
                        bool may_refine = true);
  // Plans how the missing blocks of a put are best coded, and holds what they may be coded against.
  void OfferReferences(TriePutSession* session);
  // Runs of a path, from a block on, that stand elsewhere too, in nodes that `usable` allows: of
  // text that stands in several places all of them, or one. `take` is called with the index held.
  void SearchRuns(
      const StoredPath& path, std::span<const TokenId> tokens, std::uint32_t first_block,
      bool all_places, const std::function<bool(NodeRef)>& usable,
      const std::function<void(std::span<const TextRun>, std::span<const NodeRef>)>& take);
  std::map<std::uint32_t, BlockReferences> FindReferences(const StoredPath& path,
                                                          std::span<const TokenId> tokens,
                                                          std::uint32_t first_block,
                                                          Quality quality);
  // The blocks from first_block on that stand in so many other places, by more than half, and the
  // blocks there.
  struct RepeatedText {
    std::set<std::uint32_t> blocks;
    std::vector<TrieNodeId> elsewhere;
  };
  RepeatedText FindRepeated(const StoredPath& path, std::span<const TokenId> tokens,
                            std::uint32_t first_block, std::uint32_t places_min);
  // Cuts a run where blocks end, on either side.
  void AddRun(const TextRun& run, std::span<const NodeRef> own_path, std::uint32_t block_tokens,
              std::map<std::uint32_t, BlockReferences>* references) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  bool MayBeReference(NodeRef ref, Quality quality) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // Their coded frames, decoded; those that cannot be are not in it.
  struct LoadedReference {
    std::vector<TokenId> tokens;
    LoadedFrame raw;
    PayloadLocation at;  // of the frame that it was
    std::uint32_t first_position = 0;
    Quality quality = Quality::kUnrated;
  };
  std::map<TrieNodeId, LoadedReference> LoadReferences(
      const ModelId& model, const std::map<std::uint32_t, BlockReferences>& wanted);
  // Members of these nodes that are not among them.
  std::vector<TrieNodeId> MembersOutside(std::span<const NodeRef> refs) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // Codes a member anew, without what it was coded against. If that fails it keeps what it has.
  void Detach(const TrieNodeId& member);
  absl::Status TryDetach(const TrieNodeId& member);
  // The finest level that a model's newest profile has, or the one that a frame was coded with.
  struct FinestLevel {
    ProfileId profile;
    Quality quality = Quality::kUnrated;
  };
  FinestLevel FinestLevelFor(const RegisteredModel& model, const ProfileId& own_profile) const;
  // Some of those that wait for it.
  void DetachQueued();
  // The frame that was coded against others; of a node that is no member none.
  std::optional<StoredFrame> MemberFrame(const TrieNodeId& member);
  // Drops what members were coded to: its references are about to go.
  absl::Status DropMemberFrames(std::span<const TrieNodeId> members)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);

  // engine_eviction.cc
  // Frees `bytes` of the disk, or takes `nodes` nodes out of the index; the other is 0. How many
  // bytes that has freed, and 0 only where nothing could be taken.
  absl::StatusOr<std::uint64_t> Evict(std::uint64_t bytes, std::uint64_t nodes);
  std::vector<NodeRef> ChooseTwoFrameNodes(std::uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // Drops the larger frame of each node that has two.
  absl::Status DropOtherFrames(const std::vector<NodeRef>& refs, std::uint64_t* freed_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  std::vector<NodeRef> ChooseVictims(std::uint64_t bytes, std::uint64_t nodes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // What is held, and all above it.
  absl::flat_hash_set<NodeRef> HeldPaths() const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);

  // engine_removal.cc
  // Nodes per batch when many are changed: bounds how long others wait for their turn.
  static constexpr std::size_t kRemovalsPerBatch = 1024;
  // Removes nodes, children before parents. `refs` must be closed downwards by then.
  absl::Status Unlink(const std::vector<NodeRef>& refs, RemovalReason reason, DeletedCount* count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // The frames of a node; what the index knows of them where the row cannot be read.
  std::vector<RungRow> RungsOf(NodeRef ref) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  // Frames that no row names any more: freed after the next sync.
  void FreeLater(const std::vector<PayloadLocation>& locations);
  absl::Status WriteRemoval(const MetaBatch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  void CollectSubtree(NodeRef root, std::vector<NodeRef>* children_first) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  absl::StatusOr<std::vector<std::pair<NodeRef, TrieNodeId>>> NamedPath(TenantId tenant,
                                                                        const PathView& path);
  absl::StatusOr<absl::flat_hash_set<TrieNodeId>> EndsOfOtherSessions(
      TenantId tenant, std::string_view session_id,
      const std::vector<std::pair<NodeRef, TrieNodeId>>& path);
  std::vector<NodeRef> SelectedNodes(TenantId tenant, const Selection& selection,
                                     const std::vector<std::pair<NodeRef, TrieNodeId>>& path,
                                     const absl::flat_hash_set<TrieNodeId>& other_ends) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // Counts, logs and unlinks a frame that failed its check with `why`.
  void OnDamagedFrame(const StoredFrame& frame, const absl::Status& why);
  void DropDamagedFrame(const StoredFrame& frame);
  absl::Status DropFrame(const StoredFrame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
  void ExpireNodes();
  void DropEndedPins();
  void SweepSessions();

  // engine_sync.cc
  absl::Status SyncAndFree();
  // Gives back space of what is durably unlinked; of much of it, some.
  void FreeSome();
  void RunSyncer();

  // engine_recode.cc
  struct RecodeTask;
  // REQUIRES: its model is registered.
  StoredPath PathTo(NodeRef last) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  std::optional<RecodeTask> FindRecodeTask() ABSL_EXCLUSIVE_LOCKS_REQUIRED(recode_mutex_);
  // The same of blocks that were coded alone, and might be coded against others now.
  std::optional<RecodeTask> FindRecodeAgainTask() ABSL_EXCLUSIVE_LOCKS_REQUIRED(recode_mutex_);
  // Nothing of a path but its model and what the walk to it needs; the frames are to be added.
  RecodeTask TaskFor(NodeRef first, NodeRef last) const ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  // The model's newest profile, if it has the level; nullopt: nothing of the model is recoded.
  std::optional<ProfileId> ProfileToRecodeWith(ModelSlot slot) const
      ABSL_SHARED_LOCKS_REQUIRED(index_mutex_);
  std::size_t RecodeNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(recode_mutex_);
  absl::Status Recode(const RecodeTask& task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(recode_mutex_);
  absl::StatusOr<std::vector<TokenId>> TokensOfPath(const StoredPath& path);
  absl::StatusOr<std::map<std::uint32_t, EncodedFrame>> EncodeBlocks(
      const RecodeTask& task, std::span<const TokenId> tokens,
      std::span<const absl::StatusOr<LoadedFrame>> raw, const CodingPlan& plan, Quality level,
      std::vector<OfferedReference>* used);
  struct AddedFrames {
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  absl::Status AddFrames(const StoredPath& path, std::span<const TokenId> tokens,
                         const std::map<std::uint32_t, EncodedFrame>& frames, PutAnnouncement put,
                         AddedFrames* added);
  // Somebody waits for the disk or for decoding.
  bool IsBusy() const;
  void RunRecoder();

  // engine_recovery.cc
  absl::Status OpenStores(const OpenProgress& progress);
  absl::Status LoadModels();
  absl::Status SaveModels();
  absl::Status LoadNodes(const OpenProgress& progress);
  absl::Status RebuildFromSegments(const OpenProgress& progress);
  std::vector<RungReference> ReferencesOnDisk(const PayloadLocation& at, std::size_t block_tokens);
  absl::Status FindRungsOfReferences(std::span<const std::pair<TenantId, TrieNodeId>> members);
  absl::Status LoadIdentity();
  void LoadPins();
  void LoadRuns(std::span<const std::uint64_t> cell_hashes,
                std::span<const std::size_t> first_cells)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(index_mutex_);
  void NoteMissingProfiles();
  std::string meta_folder() const { return options_.data_dir + "/meta"; }
  std::string payload_folder() const { return options_.data_dir + "/payload"; }
  std::string profile_folder() const { return options_.data_dir + "/profiles"; }
  std::string identity_path() const { return options_.data_dir + "/identity"; }
  std::string ballast_path() const { return options_.data_dir + "/ballast"; }

  const std::shared_ptr<const BlockCodec> codec_;  // null: there is none
  std::unique_ptr<MetaStore> meta_;
  std::unique_ptr<PayloadStore> payload_;
  std::unique_ptr<PathHasher> hasher_;
  std::unique_ptr<TrieNodeNamer> namer_;
  MemoryTier tier_;
  EngineCounters counters_;
  ThroughputMeters read_meters_{clock_};    // bytes of records, from the disk
  ThroughputMeters decode_meters_{clock_};  // bytes of raw frames
  LogLimiter damage_lines_{std::chrono::seconds(1)};
  bool opened_ = false;                     // constant after Open
  std::uint64_t allocate_ahead_bytes_ = 0;  // constant after Open
  std::atomic<bool> draining_{false};
  std::atomic<std::uint64_t> open_puts_{0};

  absl::Mutex change_mutex_ ABSL_ACQUIRED_AFTER(syncing_mutex_) ABSL_ACQUIRED_BEFORE(index_mutex_);

  mutable absl::Mutex index_mutex_;
  TrieIndex index_ ABSL_GUARDED_BY(index_mutex_);
  std::unique_ptr<RunIndex> runs_ ABSL_PT_GUARDED_BY(index_mutex_);  // constant after LoadIdentity
  SessionEnds session_ends_ ABSL_GUARDED_BY(index_mutex_);
  SessionGroups groups_ ABSL_GUARDED_BY(index_mutex_);
  // Changed under change_mutex_ as well, but for Uses and ComputeMeasured.
  RetentionPolicy retention_ ABSL_GUARDED_BY(index_mutex_){index_};
  absl::flat_hash_map<ModelSlot, std::shared_ptr<const RegisteredModel>> models_
      ABSL_GUARDED_BY(index_mutex_);
  FrameCensus census_ ABSL_GUARDED_BY(index_mutex_);
  ReferenceCounts references_ ABSL_GUARDED_BY(index_mutex_);
  // Being deleted: nothing new is coded against them.
  absl::flat_hash_set<TrieNodeId> leaving_ ABSL_GUARDED_BY(index_mutex_);
  ReferenceDigests reference_digests_;
  HoldTable holds_ ABSL_GUARDED_BY(index_mutex_);
  using Expiry = std::pair<std::uint32_t, TrieNodeId>;
  std::priority_queue<Expiry, std::vector<Expiry>, std::greater<>> expiries_
      ABSL_GUARDED_BY(index_mutex_);

  absl::Mutex publish_mutex_;
  std::deque<PublishItem> publish_queue_ ABSL_GUARDED_BY(publish_mutex_);
  bool publishing_ ABSL_GUARDED_BY(publish_mutex_) = false;

  absl::Mutex room_mutex_;                              // one thread makes room at a time
  std::atomic<std::uint64_t> reserved_bytes_{0};        // of appends under way
  std::atomic<std::uint64_t> profile_bytes_coming_{0};  // announced, of profiles under way
  std::atomic<std::uint64_t> meta_disk_bytes_{0};
  std::atomic<unsigned> degraded_{0};
  std::atomic<bool> dirty_{false};  // something was written since the last sync

  mutable absl::Mutex sync_mutex_;
  std::vector<Outcome> durable_waiters_ ABSL_GUARDED_BY(sync_mutex_);
  std::vector<PayloadLocation> pending_frees_ ABSL_GUARDED_BY(sync_mutex_);
  std::vector<PayloadLocation> to_free_ ABSL_GUARDED_BY(sync_mutex_);  // durably unlinked
  std::uint64_t pending_free_bytes_ ABSL_GUARDED_BY(sync_mutex_) = 0;  // of both
  bool ending_ ABSL_GUARDED_BY(sync_mutex_) = false;
  absl::Mutex syncing_mutex_;  // one sync at a time

  // Members whose references are in the way of something.
  std::set<TrieNodeId> to_detach_ ABSL_GUARDED_BY(change_mutex_);
  std::uint64_t frame_random_ ABSL_GUARDED_BY(change_mutex_) = 1;
  NodeRef two_frame_hand_ ABSL_GUARDED_BY(change_mutex_) = 1;  // where the search for them goes on
  bool ballast_there_ ABSL_GUARDED_BY(change_mutex_) = false;

  // The sweep of session rows: where it goes on, and whether another one is due.
  std::string session_cursor_ ABSL_GUARDED_BY(change_mutex_);
  bool sweep_sessions_ ABSL_GUARDED_BY(change_mutex_) = true;

  std::unique_ptr<WorkPool> read_pool_;
  std::unique_ptr<Prefetcher> prefetcher_;  // null: nothing is read ahead
  std::unique_ptr<WorkPool> write_pool_;
  std::unique_ptr<WorkPool> decode_pool_;  // reads what it decodes
  absl::Mutex recode_mutex_ ABSL_ACQUIRED_BEFORE(change_mutex_, index_mutex_);
  NodeRef recode_hand_ ABSL_GUARDED_BY(recode_mutex_) = 1;  // where the search goes on
  // Blocks of which some text has got a reference that is finer, in order of paths.
  std::deque<TrieNodeId> recode_again_ ABSL_GUARDED_BY(recode_mutex_);
  std::atomic<std::uint64_t> recode_again_waiting_{0};  // its size
  absl::Mutex recode_ending_mutex_;
  bool recode_ending_ ABSL_GUARDED_BY(recode_ending_mutex_) = false;

  std::thread syncer_;
  std::thread recoder_;
  std::thread prefaulter_;
  std::atomic<std::uint64_t> prefaulted_bytes_{0};
  std::atomic<bool> closing_{false};
};

}  // namespace kvtrie
