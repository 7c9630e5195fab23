#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/byte_budget.h"
#include "storage/base/clock.h"
#include "storage/base/shared_bytes.h"
#include "storage/codec/frame.h"
#include "storage/codec/section_layers.h"  // for readers of layers of a LoadedFrame
#include "storage/engine/block_codec.h"
#include "storage/engine/engine_options.h"
#include "storage/engine/engine_stats.h"
#include "storage/engine/event_log.h"
#include "storage/engine/profile_store.h"
#include "storage/engine/put_session.h"
#include "storage/engine/similar_result.h"
#include "storage/engine/text_reuse.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/path.h"
#include "storage/kv/quality.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

class MetaStore;

struct ModelInfo {
  ModelId id;
  ModelSpec spec;
  std::uint64_t raw_block_bytes = 0;
  std::uint64_t node_count = 0;
  std::uint64_t stored_bytes = 0;
  ProfileId profile;  // the newest that fits; zero: none
};

struct LookupQuery {
  std::vector<ModelId> models;  // several: tensor-parallel ranks; `path.model` is not used
  PathView path;
  Quality min_quality = Quality::kExact;
  std::chrono::milliseconds lease{0};
  bool want_blocks = false;
  // Runs of at least so many tokens that are stored under other prefixes are answered too; 0: none.
  std::uint32_t text_reuse_min_tokens = 0;
  bool want_runs = false;
};

struct MatchedBlock {
  TrieNodeId node;
  std::uint8_t rungs = 0;  // RungBit of each that is held
  // Of the frame that serves; the size of a raw one where that is the larger of two.
  std::uint64_t stored_bytes = 0;
};

// Matched blocks in a row whose frames are alike, and what having them costs (cache.proto,
// BlockRun).
struct BlockRun {
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
  CodecId codec = CodecId::kRaw;
  Quality quality = Quality::kExact;
  std::uint64_t bytes = 0;
  std::uint64_t memory_bytes = 0;
  double read_seconds = 0;
  double decode_seconds = 0;
};

struct LookupResult {
  std::uint32_t matched_blocks = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t ignored_tail_tokens = 0;
  std::vector<std::vector<MatchedBlock>> blocks;  // [model][block], if wanted
  LeaseId lease;
  std::chrono::milliseconds lease_granted{0};
  std::uint64_t fetch_bytes = 0;
  Quality quality = Quality::kExact;
  TrieNodeId group;  // session group of the match with the first model; empty = none
  // As cache.proto says. The lease holds their blocks too.
  std::vector<ReusableRun> reusable_runs;
  std::optional<TextReuseForbidden> text_reuse_forbidden;
  std::vector<BlockRun> runs;  // if wanted
};

// How a frame is to be read.
enum class ReadAs {
  kStored,  // as it is stored
  kFrame,   // the same, if it says all by itself; one that was coded against others as a raw one
  kRaw,     // a raw frame, decoded where it is stored otherwise
};

// A stored frame that a node names, found but not read.
struct StoredFrame {
  TrieNodeId node;
  Rung rung = Rung::kExact;
  Quality quality = Quality::kExact;  // at which it is served
  CodecId codec = CodecId::kRaw;
  PayloadLocation at;
  std::uint64_t raw_frame_bytes = 0;  // of this block's raw frame

  // Whether the bytes on the disk are not what is read.
  bool needs_decoding(ReadAs as) const {
    return (as == ReadAs::kRaw && codec != CodecId::kRaw) ||
           (as == ReadAs::kFrame && codec == CodecId::kReferenced);
  }
  // What it takes of memory once it is read.
  std::uint64_t loaded_bytes(ReadAs as) const {
    return needs_decoding(as) ? raw_frame_bytes : at.record_bytes;
  }
};

// A frame in memory: `view` points into `bytes`.
struct LoadedFrame {
  SharedBytes bytes;
  FrameView view;
};

// What a call works on; exactly one is set (cache.proto, Selection).
struct Selection {
  std::optional<TrieNodeId> node;
  std::optional<PathView> path;
  std::string_view session_id;
  std::optional<ModelId> model;
  bool all = false;
  std::chrono::seconds unused_for{0};
};

struct PinInfo {
  PinId id;
  TrieNodeId node;
  std::uint32_t blocks = 0;
  std::uint64_t bytes = 0;
  std::int64_t end_unix_seconds = 0;
};

struct DeletedCount {
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;
};

// What is to be set; what is absent stays as it is.
struct Retention {
  std::optional<std::chrono::seconds> ttl = {};  // from now; 0 = no end
  std::optional<std::uint32_t> priority = {};    // 0 to 15
  std::optional<Quality> quality = {};           // where a frame of it is stored, better ones go
};

struct RetentionChange {
  std::uint64_t changed_blocks = 0;
  // Better than the level that was asked for, and without another frame of it: they keep theirs.
  std::uint64_t unchanged_blocks = 0;
  std::uint64_t dropped_frames = 0;
  std::uint64_t freed_bytes = 0;
};

struct StoredProfile {
  ProfileInfo info;
  std::vector<ModelId> models;  // registered ones that it fits
  std::uint64_t frames = 0;     // that name it
};

struct NodeInfo {
  TrieNodeId id;
  TrieNodeId parent;
  ModelId model;
  std::uint32_t depth = 0;
  std::vector<StoredFrame> frames;  // the smaller first
  bool holds_two_frames = false;
  std::vector<bool> in_memory;        // per frame
  Quality quality = Quality::kExact;  // of the best
  std::uint64_t use_count = 0;
  std::int64_t last_used_unix_seconds = 0;
  std::int64_t expires_unix_seconds = 0;
  std::uint32_t priority = 0;
  double surprisal_bits = 0;
  bool surprisal_estimated = false;  // clients did not say all of it
  bool pinned = false;
  bool leased = false;
  std::uint32_t child_count = 0;
  std::uint32_t extra_key_bytes = 0;
};

// A session group (storage/group/session_groups.h), named by its cut node.
struct GroupInfo {
  TrieNodeId id;
  ModelId model;
  std::uint64_t sessions = 0;
  std::uint32_t shared_blocks = 0;  // prefix of all members
  double shared_bits = 0;
  bool shared_bits_estimated = false;  // clients did not say all of it
  TrieNodeId shared_end;               // last block of that prefix
  // Of the members' paths from their first block on: blocks above the cut node count for each
  // group.
  std::uint64_t blocks = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t saved_bytes = 0;  // if each member stored its own path, so much more would be taken
  TrieNodeId centroid_end;        // last block of the most probable path
  std::uint32_t centroid_blocks = 0;
};

struct GroupPage {
  std::vector<GroupInfo> groups;
  TrieNodeId next;  // where the next page goes on; empty: this was the last
};

// Blocks in a row that the same sessions pass.
struct GroupBranchInfo {
  std::int32_t parent = -1;  // place of the branch that it hangs on; -1: the shared prefix
  TrieNodeId first;
  TrieNodeId last;
  std::uint32_t blocks = 0;
  double surprisal_bits = 0;
  bool surprisal_estimated = false;
  std::uint64_t stored_bytes = 0;
  std::uint64_t sessions = 0;
  double probability = 1;  // that traffic takes it where it branches off
  bool on_centroid = false;
};

struct GroupDescription {
  GroupInfo group;
  std::vector<GroupBranchInfo> branches;  // parents first
  bool is_all = true;                     // there are no more branches
};

struct RecoveryReport {
  double seconds = 0;
  std::uint64_t nodes_loaded = 0;
  std::uint64_t nodes_dropped = 0;
  std::uint64_t unreferenced_bytes = 0;
  std::uint64_t lost_batches = 0;
  bool rebuilt_from_segments = false;
  std::vector<std::string> foreign_files;
  std::vector<std::string> notes;
};

struct VerifyFinding {
  TrieNodeId node;
  std::string what;
};
struct VerifyProgress {
  std::uint64_t nodes_checked = 0;
  std::uint64_t nodes_total = 0;
  std::uint64_t bytes_read = 0;
  std::vector<VerifyFinding> findings;  // since the last call
  bool done = false;
};

// The store: trie, frames, leases, eviction and recovery behind one door. Services check a request,
// call this, and translate; nothing above it knows where bytes lie.
//
// Publish order: payload written -> node and references in one batch -> index -> acknowledged. Free
// order: unlinked in one synced batch -> payload freed. A crash at any point leaves unreferenced
// payload, never a node without payload; Open finds and frees it.
//
// Errors of all calls: NotFound for what the caller named (model, node, pin); InvalidArgument for
// requests over a limit; ResourceExhausted for disk, memory and caps; Unavailable while draining or
// when the device fails; a miss is a value.
//
// Thread-safe. Calls marked "may block" wait for the disk: call them through RunBlocking. Callbacks
// run on threads of the engine (or on the calling one), without locks; they must be short.
class Engine {
 public:
  // Opens or creates the embedded store (RocksDB and segment files) in options.data_dir, and
  // recovers it. `progress` (may be empty) gets (rows done, text) about once a second. Errors:
  // InvalidArgument (options), FailedPrecondition (written by a newer version), Unavailable (folder
  // in use, not writable).
  using OpenProgress = std::function<void(std::uint64_t done, std::string_view what)>;
  // `codec` may be null: then coded frames are served as frames only.
  static absl::StatusOr<std::unique_ptr<Engine>> OpenEmbedded(
      const EngineOptions& options, Clock& clock, const OpenProgress& progress = {},
      std::shared_ptr<const BlockCodec> codec = nullptr);
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Idempotent. May block.
  absl::StatusOr<ModelInfo> RegisterModel(TenantId tenant, const ModelSpec& spec);
  absl::StatusOr<ModelInfo> GetModel(TenantId tenant, const ModelId& id) const;
  std::vector<ModelInfo> ListModels(TenantId tenant) const;

  // Longest stored prefix at `min_quality` that all models hold. nullopt: tokens of a node on the
  // way are not in memory, or other text is searched for; call Lookup, which may block.
  std::optional<absl::StatusOr<LookupResult>> TryLookup(TenantId tenant, const LookupQuery& query);
  absl::StatusOr<LookupResult> Lookup(TenantId tenant, const LookupQuery& query);
  void ReleaseLease(TenantId tenant, const LeaseId& lease);

  // The stored sessions that have most in common with a text, nearest first. May block.
  absl::StatusOr<SimilarResult> Similar(TenantId tenant, const SimilarRequest& request);

  // The smallest frame of at least `min_quality` for each block, nullopt where there is none; of
  // those that can be read as is wished, if there are any. In order. TryFindFrames gives nullopt
  // when a row has to be read: call FindFrames, which may block.
  using FoundFrames = std::vector<std::optional<StoredFrame>>;
  std::optional<absl::StatusOr<FoundFrames>> TryFindFrames(TenantId tenant, const ModelId& model,
                                                           std::span<const TrieNodeId> nodes,
                                                           Quality min_quality, ReadAs as);
  absl::StatusOr<FoundFrames> FindFrames(TenantId tenant, const ModelId& model,
                                         std::span<const TrieNodeId> nodes, Quality min_quality,
                                         ReadAs as = ReadAs::kFrame);
  // The same for blocks [first_block, first_block + block_count) of a path. May block.
  absl::StatusOr<FoundFrames> FindFramesOfPath(TenantId tenant, const PathView& path,
                                               std::uint32_t first_block, std::uint32_t block_count,
                                               Quality min_quality, ReadAs as);

  // The tokens of blocks, in order; empty where one is not stored. May block.
  std::vector<std::vector<TokenId>> TokensOfBlocks(TenantId tenant, const ModelId& model,
                                                   std::span<const TrieNodeId> nodes);

  // From memory, or nullopt.
  std::optional<LoadedFrame> TryReadFrame(const StoredFrame& frame, ReadAs as);
  // Calls back once, with NotFound when the frame was dropped meanwhile, DataLoss when its bytes
  // are bad (counted, and the frame is unlinked), FailedPrecondition when it cannot be decoded here
  // (counted; it can still be read as it is stored), Unavailable when the queue is full or the
  // device fails.
  void ReadFrame(const StoredFrame& frame, ReadAs as,
                 std::function<void(absl::StatusOr<LoadedFrame>)> on_read);
  // The same for frames of one model, with an index among them; what has to be decoded is decoded
  // together.
  using OnFrameRead = std::function<void(std::size_t, absl::StatusOr<LoadedFrame>)>;
  void ReadFrames(std::span<const StoredFrame> frames, ReadAs as, OnFrameRead on_read);

  // Begins a put. The session holds what the new blocks hang on; see put_session.h. May block.
  absl::StatusOr<std::unique_ptr<PutSession>> BeginPut(TenantId tenant, const PutAnnouncement& put);
  // Bytes of blocks that puts have begun: take from it before PutSession::StartBlock.
  ByteBudget& put_budget();

  // May block, all of them.
  absl::StatusOr<std::uint32_t> Touch(TenantId tenant, const Selection& selection);
  absl::StatusOr<PinInfo> Pin(TenantId tenant, const Selection& selection,
                              std::chrono::seconds duration);
  absl::StatusOr<PinInfo> ExtendPin(TenantId tenant, const PinId& pin,
                                    std::chrono::seconds duration);
  absl::StatusOr<bool> Unpin(TenantId tenant, const PinId& pin);
  std::vector<PinInfo> ListPins(TenantId tenant) const;
  absl::StatusOr<DeletedCount> Delete(TenantId tenant, const Selection& selection);
  absl::StatusOr<RetentionChange> SetRetention(TenantId tenant, const Selection& selection,
                                               const Retention& retention);

  // A codec profile on its way in. Dropping it leaves nothing. Used by one thread at a time; must
  // not outlive the engine. See ProfileStore::Upload for Append and Commit. May block.
  class ProfileUpload {
   public:
    virtual ~ProfileUpload() = default;
    virtual absl::Status Append(std::span<const std::byte> bytes) = 0;
    // FailedPrecondition: it has another id than was expected.
    virtual absl::StatusOr<StoredProfile> Commit() = 0;
  };
  // `expected`: its id, or zero. Makes room for it, unless it is stored already. InvalidArgument:
  // no profile is of this size. May block.
  absl::StatusOr<std::unique_ptr<ProfileUpload>> BeginProfile(TenantId tenant,
                                                              std::uint64_t total_bytes,
                                                              const ProfileId& expected);
  absl::StatusOr<std::unique_ptr<ProfileStore::Reader>> OpenProfile(const ProfileId& id);
  std::vector<StoredProfile> ListProfiles(TenantId tenant) const;  // newest first
  // FailedPrecondition: stored frames name it. May block.
  absl::Status DeleteProfile(const ProfileId& id);

  const EventLog& events() const;

  // Children of a node (or first blocks of a model), from `after` (exclusive) on, at most `count`.
  // May block.
  absl::StatusOr<std::vector<NodeInfo>> ListChildren(TenantId tenant, const ModelId& model,
                                                     const TrieNodeId& parent,
                                                     const TrieNodeId& after, std::size_t count);
  // What a selection of one path means (a node, a prefix, a session) and all above it, first block
  // first. May block.
  absl::StatusOr<std::vector<NodeInfo>> DescribePath(TenantId tenant, const Selection& selection);

  // The group that the sessions of a node belong to; nullopt: none. NotFound: there is no such
  // node.
  absl::StatusOr<std::optional<TrieNodeId>> GroupOf(TenantId tenant, const TrieNodeId& node) const;
  // Groups from `after` (exclusive; empty: from the first) on, at most `count`, in an order that
  // stands while the store is open. NotFound: the node of `after` is gone. Looks at all blocks of
  // each group.
  absl::StatusOr<GroupPage> ListGroups(TenantId tenant, const TrieNodeId& after,
                                       std::size_t count) const;
  // With at most `branches_max` (at least 1) branches, those that most sessions pass. NotFound: it
  // is no group, or no more.
  absl::StatusOr<GroupDescription> DescribeGroup(TenantId tenant, const TrieNodeId& id,
                                                 std::size_t branches_max) const;

  EngineStats Stats() const;
  const RecoveryReport& recovery() const;
  const EngineOptions& options() const;

  // The whole-structure check (see README), and unless `structure_only` a read of every frame.
  // `report` is called about once a second and at the end; returning false stops. May block for
  // long.
  absl::Status Verify(bool structure_only, bool repair,
                      const std::function<bool(const VerifyProgress&)>& report);

  // Runs `work` on a thread that may block; false: the queue is full, and `work` was dropped.
  bool RunBlocking(std::function<void()> work);

  // Refuses new puts from now on, waits for the running ones until `deadline`, syncs. True: all
  // finished.
  bool Drain(std::chrono::milliseconds deadline);

  // One round of what the maintenance thread does each second: ends of leases, pins and times to
  // live, freeing, eviction to the low mark, sync. For tests with their own clock.
  void RunMaintenance();

  // One step of what the recoding thread does: codes exact blocks of one path. The number of blocks
  // that it worked on; 0: there is nothing to do. For tests.
  std::size_t RunRecoding();

  class Core;

 private:
  explicit Engine(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace kvtrie
