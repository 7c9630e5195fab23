#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stop_token>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/channel_pool.h"
#include "client/client_options.h"
#include "client/client_stats.h"
#include "client/fetch_types.h"
#include "client/load_plan.h"
#include "client/load_rates.h"
#include "client/local_lane.h"
#include "client/local_region.h"
#include "client/put_connection.h"
#include "client/put_types.h"
#include "client/reference_cache.h"
#include "client/reference_decoding.h"
#include "client/retry.h"
#include "client/reuse_types.h"
#include "client/worker_backend.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/codec/codec_cache.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

class FetchAssembly;
class FrameDecoding;

struct ModelHandle {
  ModelId id;
  std::uint32_t block_tokens = 0;
  std::uint64_t raw_block_bytes = 0;
  ProfileId profile;  // the newest codec profile that the server has for it; zero: none
};

struct LookupOptions {
  Quality min_quality = Quality::kExact;
  std::string_view salt{};
  std::string_view session_id{};
  std::chrono::milliseconds lease{0};
  // Fill the result's blocks; without them the answer is a count.
  bool want_blocks = true;
  // Name text that is stored under other prefixes too, in runs of at least so many tokens (0: the
  // server's default), for FetchRuns. Such KV is approximate.
  bool allow_text_reuse = false;
  std::uint32_t text_reuse_min_tokens = 0;
  // Fill the result's runs, for PlanLoad.
  bool want_runs = false;
  std::chrono::milliseconds timeout{0};
};

// How an inference engine talks to kvtrie-server: finds, reads and writes KV blocks (cache.proto is
// the reference of each call and its errors).
//
// Every call ends by its deadline. Calls that may be repeated are, on Unavailable, with growing
// pauses and a budget that all calls share. Connections are made on first use and again after a
// loss; the client itself never has to be made anew.
//
// Thread-safe. The thread that calls does the work, the reading of sockets included.
class Client {
 public:
  // InvalidArgument: an option is out of range. Unavailable: Lane::kShm and no region can be had.
  static absl::StatusOr<std::unique_ptr<Client>> Create(ClientOptions options);
  ~Client();

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  absl::StatusOr<ModelHandle> RegisterModel(const ModelSpec& spec);

  // Stores a codec profile; idempotent.
  absl::StatusOr<v1::ProfileEntry> PutProfile(std::span<const std::byte> profile);
  // DataLoss: the bytes that came are not those of the id.
  absl::StatusOr<std::vector<std::byte>> GetProfile(const ProfileId& id);
  absl::StatusOr<v1::ListProfilesResponse> ListProfiles();
  absl::Status DeleteProfile(const ProfileId& id);

  // Longest stored prefix. A miss is OK with matched_blocks = 0.
  absl::StatusOr<v1::LookupResult> Lookup(const ModelId& model, std::span<const TokenId> tokens,
                                          const LookupOptions& options = {});
  // Many at once; each result has its own status.
  absl::StatusOr<v1::LookupResponse> Lookup(const v1::LookupRequest& request,
                                            std::chrono::milliseconds timeout = {});

  // The stored sessions that have most in common with a text, nearest first.
  absl::StatusOr<v1::SimilarResponse> Similar(const v1::SimilarRequest& request,
                                              std::chrono::milliseconds timeout = {});
  absl::StatusOr<v1::SimilarResponse> Similar(const ModelId& model, std::span<const TokenId> tokens,
                                              std::uint32_t session_count,
                                              std::string_view salt = {});

  // Reads blocks into the caller's memory, which is not touched after the return. What is not
  // loaded is a miss, with the reason in its status; it never fails as a whole. Frames that are
  // decoded here come over gRPC, whatever ClientOptions::lane says. Blocks that were coded against
  // others are decoded here too, with frames of these that are fetched beside them and kept for the
  // next time (ClientOptions::reference_cache_bytes); with FetchOptions::on_layer by the server.
  FetchReport Fetch(const ModelId& model, std::span<const FetchTarget> targets,
                    const FetchOptions& options = {});

  // Puts KV of the same text under other prefixes (LookupResult::reusable_runs) into a prompt's
  // memory, with K at its new positions. That is approximate: RunsReport says of each token whether
  // it was reused, and what is put of it, or was computed on it, has PutPath::first_reused_block.
  // What does not come is left to the caller to compute; it never fails as a whole but for
  // InvalidArgument (names the field) and FailedPrecondition (the model was not registered by this
  // client, or its KV cannot be moved). Sources lie in at most kRunsMemoryBytes, or one block, at a
  // time.
  static constexpr std::size_t kRunsMemoryBytes = std::size_t{64} << 20;
  absl::StatusOr<RunsReport> FetchRuns(const ModelId& model, const v1::LookupResult& found,
                                       const RunsTarget& target,
                                       const FetchRunsOptions& options = {});
  // What the engine measured: computing `tokens` tokens of a prompt behind `context_tokens` others
  // took so long. PlanLoad weighs loading against it; a report now and then, of prompts long and
  // short, keeps it true. InvalidArgument names what is out of range.
  absl::Status ReportPrefill(const ModelId& model, std::uint64_t tokens,
                             std::uint64_t context_tokens, double seconds);
  // How many leading blocks of a lookup with want_runs to load, and compute the rest of the prompt
  // of `prompt_tokens` tokens, to have all of it soonest. `fetch` is what they would be fetched
  // with. From what the server says of the blocks, what this client's fetches and their decoding
  // took so far, and ReportPrefill; before there is such a report all are loaded.
  // FailedPrecondition: the model was not registered by this client. InvalidArgument: the result
  // has no runs of its blocks.
  absl::StatusOr<LoadPlan> PlanLoad(const ModelId& model, const v1::LookupResult& found,
                                    std::uint64_t prompt_tokens, const FetchOptions& fetch = {});

  // Writes blocks, all paths at once on one stream. After a loss of the connection, what was not
  // acknowledged is offered again. A call with blocks to encode goes over gRPC. REQUIRES: models
  // were registered through this client.
  std::vector<PutReport> Put(std::span<const PutPath> paths,
                             std::chrono::milliseconds timeout = {});

  absl::StatusOr<v1::TouchResponse> Touch(const v1::TouchRequest& request);
  // Not repeated on Unavailable unless it extends a pin: a pin whose answer was lost ends by
  // itself.
  absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request);
  absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest& request);
  absl::StatusOr<v1::DeleteResponse> Delete(const v1::DeleteRequest& request);
  absl::StatusOr<v1::SetRetentionResponse> SetRetention(const v1::SetRetentionRequest& request);

  // Follows events until `on_events` returns false or `stop` is requested (OK), or the server
  // cannot be reached any more. Survives reconnects. When the server has started anew, events may
  // have been missed: the watcher then gets a CLEARED event with `gap` first.
  absl::Status Watch(const v1::WatchRequest& request, std::stop_token stop,
                     const std::function<bool(const v1::WatchResponse&)>& on_events);

  // Memory that blocks can be fetched into, or put from, without a copy by this process when shared
  // memory is in use. Null with Lane::kGrpc and with servers on other hosts.
  const std::shared_ptr<LocalRegion>& local_region() const { return region_; }

  const ClientStats& stats() const { return stats_; }
  // Of Coding::kWorker; all 0 without.
  WorkerBackendStats worker_stats() const {
    return workers_ == nullptr ? WorkerBackendStats{} : workers_->Stats();
  }

 private:
  explicit Client(ClientOptions options);

  template <typename Request, typename Response>
  using UnaryMethod = grpc::Status (v1::Cache::Stub::*)(grpc::ClientContext*, const Request&,
                                                        Response*);
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(UnaryMethod<Request, Response> method, const Request& request,
                                std::chrono::milliseconds timeout, bool idempotent);

  // Runs attempts until one succeeds or none is left.
  template <typename Result, typename Attempt>
  absl::StatusOr<Result> RepeatedBulk(Deadline deadline, const Attempt& run);
  absl::StatusOr<v1::ProfileEntry> PutProfileAttempt(std::span<const std::byte> profile,
                                                     const ProfileId& id, Deadline deadline,
                                                     int attempt);
  absl::StatusOr<std::vector<std::byte>> GetProfileAttempt(const ProfileId& id, Deadline deadline,
                                                           int attempt);

  absl::StatusOr<std::vector<std::byte>> GetProfile(const ProfileId& id, Deadline deadline);

  struct KnownModel {
    explicit KnownModel(const ModelSpec& from) : spec(from), geometry(from) {}
    ModelSpec spec;
    KvGeometry geometry;
  };
  // Null: it was not registered by this client.
  std::shared_ptr<const KnownModel> Known(const ModelId& model);

  // Whether frames are fetched and decoded here.
  bool DecodesHere(const KnownModel* model, std::span<const FetchTarget> targets,
                   const FetchOptions& options) const;
  absl::StatusOr<std::shared_ptr<const FrameCodec>> CodecFor(const KnownModel& model,
                                                             const ModelId& id,
                                                             const ProfileId& profile,
                                                             Deadline deadline);
  // What encodes blocks of a path; null: they travel as they are.
  std::shared_ptr<const FrameCodec> EncoderFor(const PutPath& path, Deadline deadline);
  // The newest profile of a model, as of some seconds ago at the most; zero: there is none.
  ProfileId NewestProfile(const KnownModel& model, const ModelId& id);
  Backoff NewBackoff();
  // Waits before the next attempt. False: there is none, for lack of time or budget.
  bool PauseBeforeRetry(Backoff& backoff, Deadline deadline);

  // Counts the end of a call.
  void Ended(bool failed);

  // A second attempt waits for the connection to come back, unless another target may be asked
  // instead.
  bool MayWait(int attempt) const;

  bool UseLane();
  void SuspendLane();

  // `accept_referenced`: blocks that were coded against others may come so.
  FetchReport FetchAll(const ModelId& model, std::span<const FetchTarget> targets,
                       const FetchOptions& options, bool accept_referenced, Deadline deadline);
  absl::Status FetchAttempt(const ModelId& model, const FetchOptions& options,
                            bool accept_referenced, Deadline deadline, int attempt,
                            FetchAssembly* assembly, FrameDecoding* decoding);
  // Decodes blocks of a fetch that came coded against others. Gives the targets of those for which
  // that failed.
  std::vector<std::size_t> DecodeMembers(const ModelId& model, const KnownModel& known,
                                         std::span<const FetchTarget> targets,
                                         FrameDecoding* decoding, Deadline deadline);
  // What can be had of frames that others were coded against, from memory or the server.
  ReferenceFrames GetReferences(const ModelId& model, const KnownModel& known,
                                std::span<const TrieNodeId> nodes, Deadline deadline);
  void CountFetch(const FetchAssembly& assembly, const FrameDecoding* decoding, double seconds);
  void CountEncoded(const PutPath& path, const PutReport& report);
  // Puts that are not done after it failed; their last status is returned.
  absl::Status PutAttempt(std::span<PutProgress*> puts, Deadline deadline, int attempt);
  absl::Status PutByLane(std::span<PutProgress*> puts, Deadline deadline, int attempt);
  std::unique_ptr<PutConnection> TakePutConnection(int attempt);
  void GiveBackPutConnection(std::unique_ptr<PutConnection> stream);

  const ClientOptions options_;
  ChannelPool channels_;
  RetryBudget retry_budget_;
  const std::unique_ptr<const WorkerBackend> workers_;  // null: this process codes
  CodecCache codecs_;
  ReferenceCache references_;
  ClientStats stats_;
  std::shared_ptr<LocalRegion> region_;
  std::unique_ptr<LocalLane> lane_;

  absl::Mutex mutex_;
  absl::flat_hash_map<ModelId, std::shared_ptr<const KnownModel>> models_ ABSL_GUARDED_BY(mutex_);
  struct Newest {
    ProfileId profile;
    std::chrono::steady_clock::time_point asked;
  };
  absl::flat_hash_map<ModelId, Newest> newest_profiles_ ABSL_GUARDED_BY(mutex_);
  LoadRates load_rates_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<ModelId, PrefillFit> prefills_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<PutConnection>> put_connections_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point lane_off_until_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
