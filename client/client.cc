#include "client/client.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "client/fetch_assembly.h"
#include "client/frame_decoding.h"
#include "client/member_decoding.h"
#include "client/model_spec_to_proto.h"
#include "client/raw_call.h"
#include "client/run_copies.h"
#include "client/status_from_grpc.h"
#include "proto/bulk_message.h"
#include "storage/base/clock.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/codec/profile_header.h"
#include "storage/kv/profile_digest.h"

namespace kvtrie {
namespace {

constexpr char kFetchMethod[] = "/kvtrie.v1.Cache/Fetch";
constexpr char kPutProfileMethod[] = "/kvtrie.v1.Cache/PutProfile";
constexpr char kGetProfileMethod[] = "/kvtrie.v1.Cache/GetProfile";
constexpr std::size_t kProfilePieceBytes = std::size_t{1} << 20;

constexpr std::size_t kFetchBlocksMax = 65'536;
constexpr std::size_t kIdlePutConnectionsMax = 64;
// After a failure of the shared-memory lane, gRPC serves for so long before the lane is tried
// again.
constexpr std::chrono::seconds kLaneOffTime{5};
// A watcher waits for events for ever; this bounds the time to notice that a server has come back.
constexpr std::chrono::milliseconds kWatchReconnectTimeout{60'000};
// A profile that was put meanwhile is used after this at the latest.
constexpr std::chrono::seconds kNewestProfileAge{30};

std::chrono::milliseconds Or(std::chrono::milliseconds timeout,
                             std::chrono::milliseconds otherwise) {
  return timeout.count() > 0 ? timeout : otherwise;
}

// What to tell of a call that ended with `status` after an attempt that ended with `before`: a
// deadline that passed while the server was away is the server's absence.
const absl::Status& Cause(const absl::Status& status, const absl::Status& before) {
  return absl::IsDeadlineExceeded(status) && !before.ok() ? before : status;
}

absl::Status CheckOptions(const ClientOptions& options) {
  if (options.targets.empty()) return absl::InvalidArgumentError("targets: none");
  for (const std::string& target : options.targets) {
    if (target.empty()) return absl::InvalidArgumentError("targets: one is empty");
  }
  if (options.bulk_channels < 1 || options.bulk_channels > 64) {
    return absl::InvalidArgumentError("bulk_channels: 1 to 64");
  }
  if (options.stream_window_bytes < (64 << 10) || options.stream_window_bytes > (64 << 20)) {
    return absl::InvalidArgumentError("stream_window_bytes: 64 KiB to 64 MiB");
  }
  if (options.unary_timeout.count() <= 0 || options.bulk_timeout.count() <= 0) {
    return absl::InvalidArgumentError("timeouts: must be positive");
  }
  if (options.coding_threads < 1 || options.coding_threads > 256) {
    return absl::InvalidArgumentError("coding_threads: 1 to 256");
  }
  if (options.coding == Coding::kWorker) KV_RETURN_IF_ERROR(options.workers.Validate());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Create(ClientOptions options) {
  KV_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<Client> client(new Client(std::move(options)));
  const ClientOptions& used = client->options_;
  const bool local = std::all_of(used.targets.begin(), used.targets.end(), IsLocalTarget);
  // The lane leads to one server; several would need a region each.
  if (used.lane == Lane::kShm || (used.lane == Lane::kAuto && local && used.targets.size() == 1)) {
    auto region = LocalRegion::Create(used.local_region_bytes);
    if (region.ok()) {
      client->region_ = *std::move(region);
      client->lane_ = std::make_unique<LocalLane>(client->channels_, client->region_);
    } else if (used.lane == Lane::kShm) {
      return absl::UnavailableError(region.status().message());
    }
  }
  return client;
}

Client::Client(ClientOptions options)
    : options_(std::move(options)),
      channels_(options_),
      retry_budget_(options_.retry, SystemClock()),
      workers_(options_.coding != Coding::kWorker
                   ? nullptr
                   : std::make_unique<const WorkerBackend>(
                         options_.workers,
                         [this](const ProfileId& id,
                                Deadline deadline) -> absl::StatusOr<WorkerBackend::ProfileBytes> {
                           KV_ASSIGN_OR_RETURN(std::vector<std::byte> bytes,
                                               GetProfile(id, deadline));
                           return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
                         })),
      codecs_(options_.codec_memory_bytes, workers_.get()),
      references_(options_.reference_cache_bytes),
      random_(std::random_device()()) {}

Client::~Client() = default;

// --- small calls ---

template <typename Request, typename Response>
absl::StatusOr<Response> Client::Call(UnaryMethod<Request, Response> method, const Request& request,
                                      std::chrono::milliseconds timeout, bool idempotent) {
  const Deadline deadline = Deadline::After(Or(timeout, options_.unary_timeout));
  std::optional<Backoff> backoff;
  stats_.calls.fetch_add(1, std::memory_order_relaxed);
  absl::Status last;
  for (int attempt = 0;; ++attempt) {
    grpc::ClientContext context;
    context.set_deadline(deadline.ToGrpc());
    context.set_wait_for_ready(MayWait(attempt));
    Response response;
    absl::Status status =
        FromGrpc((channels_.Control(attempt).*method)(&context, request, &response));
    if (status.ok()) {
      Ended(/*failed=*/false);
      return response;
    }
    if (!backoff.has_value()) backoff = NewBackoff();
    if (!idempotent || !IsRetriable(status) || !PauseBeforeRetry(*backoff, deadline)) {
      Ended(/*failed=*/true);
      return Cause(status, last);
    }
    last = std::move(status);
  }
}

template <typename Result, typename Attempt>
absl::StatusOr<Result> Client::RepeatedBulk(Deadline deadline, const Attempt& run) {
  std::optional<Backoff> backoff;
  stats_.calls.fetch_add(1, std::memory_order_relaxed);
  absl::Status last;
  for (int attempt = 0;; ++attempt) {
    absl::StatusOr<Result> result = run(deadline, attempt);
    if (result.ok()) {
      Ended(/*failed=*/false);
      return result;
    }
    if (!backoff.has_value()) backoff = NewBackoff();
    if (!IsRetriable(result.status()) || !PauseBeforeRetry(*backoff, deadline)) {
      Ended(/*failed=*/true);
      return Cause(result.status(), last);
    }
    last = result.status();
  }
}

absl::StatusOr<ModelHandle> Client::RegisterModel(const ModelSpec& spec) {
  KV_RETURN_IF_ERROR(spec.Validate());
  v1::RegisterModelRequest request;
  *request.mutable_spec() = ModelSpecToProto(spec);
  KV_ASSIGN_OR_RETURN(const v1::RegisterModelResponse response,
                      (Call<v1::RegisterModelRequest, v1::RegisterModelResponse>(
                          &v1::Cache::Stub::RegisterModel, request, {}, /*idempotent=*/true)));
  auto model = std::make_shared<const KnownModel>(spec);
  const auto id = ModelId::FromBytes(response.model_id());
  if (!id.has_value()) return absl::InternalError("the server's model id has not 16 bytes");
  if (response.raw_block_bytes() != model->geometry.raw_block_bytes()) {
    return absl::FailedPreconditionError("client and server disagree about the size of a block");
  }
  const ProfileId profile = ProfileId::FromBytes(response.profile_id()).value_or(ProfileId{});
  absl::MutexLock lock(&mutex_);
  models_[*id] = std::move(model);
  newest_profiles_[*id] = {profile, std::chrono::steady_clock::now()};
  return ModelHandle{*id, spec.block_tokens, response.raw_block_bytes(), profile};
}

// --- profiles ---

absl::StatusOr<v1::ProfileEntry> Client::PutProfile(std::span<const std::byte> profile) {
  ProfileDigest digest;
  digest.Add(profile);
  const ProfileId id = digest.Finish();
  return RepeatedBulk<v1::ProfileEntry>(Deadline::After(options_.bulk_timeout),
                                        [&](Deadline deadline, int attempt) {
                                          return PutProfileAttempt(profile, id, deadline, attempt);
                                        });
}

absl::StatusOr<v1::ProfileEntry> Client::PutProfileAttempt(std::span<const std::byte> profile,
                                                           const ProfileId& id, Deadline deadline,
                                                           int attempt) {
  RawCall call(channels_.Bulk(), kPutProfileMethod, deadline, MayWait(attempt));
  for (std::size_t at = 0; at < profile.size() || at == 0;) {
    const auto piece = profile.subspan(at, std::min(kProfilePieceBytes, profile.size() - at));
    v1::PutProfileRequest request;
    if (at == 0) {
      request.set_total_bytes(profile.size());
      request.set_expected_profile_id(std::string(id.view()));
    }
    std::vector<grpc::Slice> payload;
    if (!piece.empty()) {
      v1::Chunk* chunk = request.add_chunks();
      chunk->set_offset(at);
      chunk->set_bytes(static_cast<std::uint32_t>(piece.size()));
      chunk->set_crc32c(Crc32c(piece));
      payload.emplace_back(piece.data(), piece.size());
    }
    at += piece.size();
    const bool last = at == profile.size();
    call.Write(ComposeBulkMessage(request, payload), last);
    const auto completion = call.Next(deadline);
    if (!completion.has_value()) return absl::DeadlineExceededError("profile: not sent in time");
    // The server has ended the call before all was sent.
    if (!completion->ok) {
      const absl::Status status = call.Finish(deadline);
      return status.ok() ? absl::UnavailableError("profile: the server ended the call") : status;
    }
    if (last) break;
  }
  call.Read();
  const auto completion = call.Next(deadline);
  if (!completion.has_value()) return absl::DeadlineExceededError("profile: no answer in time");
  v1::PutProfileResponse response;
  if (completion->ok) {
    BulkPayload none;
    KV_RETURN_IF_ERROR(ParseBulkMessage(call.message(), &response, &none));
  }
  KV_RETURN_IF_ERROR(call.Finish(deadline));
  return std::move(*response.mutable_profile());
}

absl::StatusOr<std::vector<std::byte>> Client::GetProfile(const ProfileId& id) {
  return GetProfile(id, Deadline::After(options_.bulk_timeout));
}

absl::StatusOr<std::vector<std::byte>> Client::GetProfile(const ProfileId& id, Deadline deadline) {
  return RepeatedBulk<std::vector<std::byte>>(
      deadline, [&](Deadline until, int attempt) { return GetProfileAttempt(id, until, attempt); });
}

absl::StatusOr<std::vector<std::byte>> Client::GetProfileAttempt(const ProfileId& id,
                                                                 Deadline deadline, int attempt) {
  RawCall call(channels_.Bulk(), kGetProfileMethod, deadline, MayWait(attempt));
  v1::GetProfileRequest request;
  request.set_profile_id(std::string(id.view()));
  call.Write(ComposeBulkMessage(request, {}), /*last=*/true);
  call.Read();
  std::vector<std::byte> profile;
  std::uint64_t total_bytes = 0;
  v1::GetProfileResponse message;
  BulkPayload payload;
  while (true) {
    const auto completion = call.Next(deadline);
    if (!completion.has_value()) return absl::DeadlineExceededError("profile: not read in time");
    if (completion->op != RawCall::Op::kRead) continue;
    if (!completion->ok) break;
    KV_RETURN_IF_ERROR(ParseBulkMessage(call.message(), &message, &payload));
    if (message.total_bytes() != 0) total_bytes = message.total_bytes();
    if (total_bytes > kProfileBytesMax || payload.size() > total_bytes - profile.size()) {
      return absl::InternalError("profile: more bytes than it has");
    }
    for (const auto& piece : payload.pieces()) {
      profile.insert(profile.end(), piece.begin(), piece.end());
    }
    call.Read();
  }
  KV_RETURN_IF_ERROR(call.Finish(deadline));
  ProfileDigest digest;
  digest.Add(profile);
  if (digest.Finish() != id)
    return absl::DataLossError("profile: its bytes are not those of its id");
  return profile;
}

absl::StatusOr<v1::ListProfilesResponse> Client::ListProfiles() {
  return Call<v1::ListProfilesRequest, v1::ListProfilesResponse>(&v1::Cache::Stub::ListProfiles, {},
                                                                 {}, /*idempotent=*/true);
}

absl::Status Client::DeleteProfile(const ProfileId& id) {
  v1::DeleteProfileRequest request;
  request.set_profile_id(std::string(id.view()));
  return Call<v1::DeleteProfileRequest, v1::DeleteProfileResponse>(
             &v1::Cache::Stub::DeleteProfile, request, {}, /*idempotent=*/false)
      .status();
}

// --- lookups ---

absl::StatusOr<v1::LookupResult> Client::Lookup(const ModelId& model,
                                                std::span<const TokenId> tokens,
                                                const LookupOptions& options) {
  v1::LookupRequest request;
  v1::LookupQuery* query = request.add_queries();
  query->add_model_ids(std::string(model.view()));
  query->set_tokens(tokens.data(), tokens.size_bytes());
  query->set_salt(std::string(options.salt));
  query->set_min_quality(static_cast<v1::Quality>(options.min_quality));
  query->set_session_id(std::string(options.session_id));
  query->set_lease_ms(static_cast<std::uint32_t>(options.lease.count()));
  query->set_want_blocks(options.want_blocks);
  query->set_allow_text_reuse(options.allow_text_reuse);
  query->set_text_reuse_min_tokens(options.text_reuse_min_tokens);
  query->set_want_runs(options.want_runs);
  KV_ASSIGN_OR_RETURN(v1::LookupResponse response, Lookup(request, options.timeout));
  if (response.results_size() != 1) {
    return absl::InternalError("lookup: not one result for one query");
  }
  KV_RETURN_IF_ERROR(FromItem(response.results(0).status()));
  return std::move(*response.mutable_results(0));
}

absl::StatusOr<v1::LookupResponse> Client::Lookup(const v1::LookupRequest& request,
                                                  std::chrono::milliseconds timeout) {
  return Call<v1::LookupRequest, v1::LookupResponse>(&v1::Cache::Stub::Lookup, request, timeout,
                                                     /*idempotent=*/true);
}

absl::StatusOr<v1::SimilarResponse> Client::Similar(const v1::SimilarRequest& request,
                                                    std::chrono::milliseconds timeout) {
  return Call<v1::SimilarRequest, v1::SimilarResponse>(&v1::Cache::Stub::Similar, request, timeout,
                                                       /*idempotent=*/true);
}

absl::StatusOr<v1::SimilarResponse> Client::Similar(const ModelId& model,
                                                    std::span<const TokenId> tokens,
                                                    std::uint32_t session_count,
                                                    std::string_view salt) {
  v1::SimilarRequest request;
  v1::Prefix* prefix = request.mutable_prefix();
  prefix->set_model_id(std::string(model.view()));
  prefix->set_tokens(tokens.data(), tokens.size_bytes());
  prefix->set_salt(std::string(salt));
  request.set_session_count(session_count);
  return Similar(request);
}

absl::StatusOr<v1::TouchResponse> Client::Touch(const v1::TouchRequest& request) {
  return Call<v1::TouchRequest, v1::TouchResponse>(&v1::Cache::Stub::Touch, request, {},
                                                   /*idempotent=*/true);
}

absl::StatusOr<v1::PinResponse> Client::Pin(const v1::PinRequest& request) {
  return Call<v1::PinRequest, v1::PinResponse>(&v1::Cache::Stub::Pin, request, {},
                                               /*idempotent=*/!request.pin_id().empty());
}

absl::StatusOr<v1::UnpinResponse> Client::Unpin(const v1::UnpinRequest& request) {
  return Call<v1::UnpinRequest, v1::UnpinResponse>(&v1::Cache::Stub::Unpin, request, {},
                                                   /*idempotent=*/true);
}

absl::StatusOr<v1::DeleteResponse> Client::Delete(const v1::DeleteRequest& request) {
  return Call<v1::DeleteRequest, v1::DeleteResponse>(&v1::Cache::Stub::Delete, request, {},
                                                     /*idempotent=*/true);
}

absl::StatusOr<v1::SetRetentionResponse> Client::SetRetention(
    const v1::SetRetentionRequest& request) {
  return Call<v1::SetRetentionRequest, v1::SetRetentionResponse>(&v1::Cache::Stub::SetRetention,
                                                                 request, {}, /*idempotent=*/true);
}

absl::Status Client::Watch(const v1::WatchRequest& request, std::stop_token stop,
                           const std::function<bool(const v1::WatchResponse&)>& on_events) {
  v1::WatchRequest current = request;
  std::optional<Backoff> backoff;
  Deadline give_up = Deadline::After(kWatchReconnectTimeout);
  for (int attempt = 0;; ++attempt) {
    grpc::ClientContext context;
    std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
    auto reader = channels_.Control(attempt).Watch(&context, current);
    v1::WatchResponse response;
    while (reader->Read(&response)) {
      backoff.reset();
      current.set_from_sequence(response.next_sequence());
      current.set_from_epoch(response.epoch());
      if (!on_events(response)) return absl::OkStatus();
    }
    absl::Status status = FromGrpc(reader->Finish());
    if (stop.stop_requested()) return absl::OkStatus();
    if (!status.ok() && !IsRetriable(status)) return status;
    if (!backoff.has_value()) {
      backoff = NewBackoff();
      give_up = Deadline::After(kWatchReconnectTimeout);
    }
    if (!PauseBeforeRetry(*backoff, give_up)) {
      return status.ok() ? absl::UnavailableError("watch: the server keeps ending it") : status;
    }
  }
}

// --- blocks ---

absl::StatusOr<std::shared_ptr<const FrameCodec>> Client::CodecFor(const KnownModel& model,
                                                                   const ModelId& id,
                                                                   const ProfileId& profile,
                                                                   Deadline deadline) {
  return codecs_.Get(model.spec, id, profile, [&]() -> absl::StatusOr<CodecCache::ProfileBytes> {
    KV_ASSIGN_OR_RETURN(std::vector<std::byte> bytes, GetProfile(profile, deadline));
    const auto owner = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
    return CodecCache::ProfileBytes{owner, *owner};
  });
}

bool Client::DecodesHere(const KnownModel* model, std::span<const FetchTarget> targets,
                         const FetchOptions& options) const {
  return options_.coding != Coding::kServer && options.form == BlockForm::kRaw &&
         options.min_quality != Quality::kExact && model != nullptr &&
         std::all_of(targets.begin(), targets.end(), [model](const FetchTarget& target) {
           return target.tokens.size() == model->geometry.block_tokens() &&
                  target.raw.size() == model->geometry.raw_block_bytes();
         });
}

FetchReport Client::Fetch(const ModelId& model, std::span<const FetchTarget> targets,
                          const FetchOptions& options) {
  stats_.calls.fetch_add(1, std::memory_order_relaxed);
  return FetchAll(model, targets, options, /*accept_referenced=*/!options.on_layer,
                  Deadline::After(Or(options.timeout, options_.bulk_timeout)));
}

FetchReport Client::FetchAll(const ModelId& model, std::span<const FetchTarget> targets,
                             const FetchOptions& wanted, bool accept_referenced,
                             Deadline deadline) {
  const auto began = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration in_callbacks{0};
  FetchOptions options = wanted;
  if (wanted.on_layer) {
    options.on_layer = [&](std::uint32_t layer, std::span<const FetchedBlock> blocks) {
      const auto called = std::chrono::steady_clock::now();
      wanted.on_layer(layer, blocks);
      in_callbacks += std::chrono::steady_clock::now() - called;
    };
  }
  const std::shared_ptr<const KnownModel> known = Known(model);
  std::optional<FrameDecoding> decoding;
  if (DecodesHere(known.get(), targets, options)) {
    decoding.emplace(
        known->spec, targets, options,
        [&](const ProfileId& profile) { return CodecFor(*known, model, profile, deadline); },
        options_.coding_threads);
  }
  FetchAssembly assembly(
      targets, options, known == nullptr ? nullptr : &known->geometry,
      decoding.has_value() ? FetchAssembly::Into::kFrames : FetchAssembly::Into::kTargets);
  FrameDecoding* const decoder = decoding.has_value() ? &*decoding : nullptr;
  if (options.on_layer && options.form == BlockForm::kFrame) {
    assembly.FailRest(absl::InvalidArgumentError("on_layer: frames have no layers"));
  } else if (options.on_layer && known == nullptr) {
    assembly.FailRest(absl::FailedPreconditionError("the model was not registered by this client"));
  }

  // Layers come in order over gRPC only, and tokens at all.
  bool use_lane = !options.on_layer && !options.want_tokens && decoder == nullptr && UseLane();
  std::optional<Backoff> backoff;
  bool failed = false;
  absl::Status last;
  for (int attempt = 0; !assembly.done(); ++attempt) {
    const std::size_t pending_before = assembly.pending_blocks();
    const std::uint64_t damaged_before = assembly.damaged_blocks();
    absl::Status status =
        use_lane ? lane_->FetchSome(model, options, deadline, MayWait(attempt), &assembly)
                 : FetchAttempt(model, options, accept_referenced, deadline, attempt, &assembly,
                                decoder);
    if (assembly.done()) break;
    if (status.ok()) {
      if (assembly.pending_blocks() < pending_before ||
          assembly.damaged_blocks() > damaged_before) {
        continue;
      }
      status = absl::UnavailableError("fetch: the server left blocks unanswered");
    } else if (use_lane && options_.lane == Lane::kAuto && !absl::IsDeadlineExceeded(status)) {
      SuspendLane();
      use_lane = false;
      continue;
    }
    if (!backoff.has_value()) backoff = NewBackoff();
    if (!IsRetriable(status) || !PauseBeforeRetry(*backoff, deadline)) {
      failed = true;
      assembly.FailRest(Cause(status, last));
    }
    last = std::move(status);
  }

  if (decoder != nullptr) decoder->Advance(assembly, /*last=*/true);
  const auto elapsed = std::chrono::steady_clock::now() - began - in_callbacks;
  std::vector<std::size_t> fetched_again;
  if (decoder != nullptr) {
    fetched_again = DecodeMembers(model, *known, targets, decoder, deadline);
    stats_.decoded_blocks.fetch_add(decoder->decoded_blocks(), std::memory_order_relaxed);
    stats_.undecodable_blocks.fetch_add(decoder->undecodable_blocks(), std::memory_order_relaxed);
  }
  Ended(failed);
  // Pauses before retries say nothing about loading.
  if (!failed && !backoff.has_value()) {
    CountFetch(assembly, decoder, std::chrono::duration<double>(elapsed).count());
  }
  stats_.damaged_blocks.fetch_add(assembly.damaged_blocks(), std::memory_order_relaxed);
  stats_.fetched_bytes.fetch_add(assembly.accepted_bytes(), std::memory_order_relaxed);
  FetchReport report = assembly.TakeReport();
  if (use_lane) {
    stats_.local_lane_blocks.fetch_add(report.loaded_blocks, std::memory_order_relaxed);
  }
  if (fetched_again.empty()) return report;

  // The server decodes them: it has what they were coded against.
  stats_.members_fetched_again.fetch_add(fetched_again.size(), std::memory_order_relaxed);
  std::vector<FetchTarget> again;
  for (const std::size_t i : fetched_again) again.push_back(targets[i]);
  FetchReport second = FetchAll(model, again, options, /*accept_referenced=*/false, deadline);
  for (std::size_t i = 0; i < again.size(); ++i) {
    report.blocks[fetched_again[i]] = std::move(second.blocks[i]);
  }
  report.loaded_blocks -= again.size() - second.loaded_blocks;
  return report;
}

std::vector<std::size_t> Client::DecodeMembers(const ModelId& model, const KnownModel& known,
                                               std::span<const FetchTarget> targets,
                                               FrameDecoding* decoding, Deadline deadline) {
  std::vector<MemberFrame> members = decoding->TakeMembers();
  if (members.empty()) return {};
  const std::size_t count = members.size();
  const auto began = std::chrono::steady_clock::now();
  MemberDecoding member_decoding(
      known.spec, targets,
      [decoding](const ProfileId& profile) { return decoding->CodecOfProfile(profile); },
      std::move(members), options_.coding_threads);
  const std::vector<TrieNodeId> nodes = member_decoding.References();
  std::vector<std::size_t> failed;
  for (const std::size_t member :
       member_decoding.Decode(GetReferences(model, known, nodes, deadline))) {
    // What was kept of them may be of yesterday.
    for (const FrameReference& reference : member_decoding.table(member).references) {
      references_.Drop(model, reference.node);
    }
    failed.push_back(member_decoding.target(member));
  }
  stats_.decoded_blocks.fetch_add(count - failed.size(), std::memory_order_relaxed);
  // That references had to come first is part of what members cost.
  const auto now = std::chrono::steady_clock::now();
  const auto tokens = static_cast<double>(count * known.geometry.block_tokens());
  absl::MutexLock lock(&mutex_);
  load_rates_.Decoded(CodecId::kReferenced, tokens,
                      std::chrono::duration<double>(now - began).count(), now);
  return failed;
}

ReferenceFrames Client::GetReferences(const ModelId& model, const KnownModel& known,
                                      std::span<const TrieNodeId> nodes, Deadline deadline) {
  // Bounds what frames take of memory before their sizes are known.
  constexpr std::size_t kBlocksAtOnce = 64;
  ReferenceFrames frames;
  std::vector<TrieNodeId> missing;
  for (const TrieNodeId& node : std::set<TrieNodeId>(nodes.begin(), nodes.end())) {
    if (auto frame = references_.Get(model, node)) {
      frames.emplace(node, std::move(frame));
    } else {
      missing.push_back(node);
    }
  }
  stats_.reference_hits.fetch_add(frames.size(), std::memory_order_relaxed);
  stats_.reference_misses.fetch_add(missing.size(), std::memory_order_relaxed);
  const std::size_t room = known.geometry.raw_block_bytes() + kFrameHeaderBytesMax;
  FetchOptions options;
  options.min_quality = Quality::kUnrated;
  options.form = BlockForm::kFrame;
  options.want_tokens = true;
  for (std::size_t begin = 0; begin < missing.size(); begin += kBlocksAtOnce) {
    const auto part =
        std::span(missing).subspan(begin, std::min(kBlocksAtOnce, missing.size() - begin));
    std::vector<std::unique_ptr<std::byte[]>> memory;
    std::vector<FetchTarget> targets;
    for (const TrieNodeId& node : part) {
      memory.push_back(std::make_unique_for_overwrite<std::byte[]>(room));
      targets.push_back({.node = node, .raw = {memory.back().get(), room}});
    }
    FetchReport report = FetchAll(model, targets, options, /*accept_referenced=*/false, deadline);
    for (std::size_t i = 0; i < part.size(); ++i) {
      if (!report.blocks[i].loaded()) continue;
      auto frame = std::make_shared<ReferenceFrame>();
      frame->bytes.assign(memory[i].get(), memory[i].get() + report.blocks[i].bytes);
      frame->tokens = std::move(report.blocks[i].tokens);
      references_.Put(model, part[i], frame);
      frames.emplace(part[i], std::move(frame));
    }
  }
  return frames;
}

void Client::CountFetch(const FetchAssembly& assembly, const FrameDecoding* decoding,
                        double seconds) {
  const auto now = std::chrono::steady_clock::now();
  absl::MutexLock lock(&mutex_);
  if (decoding != nullptr) {
    for (const auto& [codec, time] : decoding->decode_times()) {
      load_rates_.Decoded(codec, time.tokens, time.seconds, now);
      seconds -= time.seconds;
    }
  }
  load_rates_.Fetched(assembly.accepted_bytes(), seconds, now);
}

absl::Status Client::ReportPrefill(const ModelId& model, std::uint64_t tokens,
                                   std::uint64_t context_tokens, double seconds) {
  if (tokens == 0) return absl::InvalidArgumentError("tokens: must be above 0");
  if (!(seconds > 0) || !std::isfinite(seconds)) {
    return absl::InvalidArgumentError("seconds: must be above 0 and finite");
  }
  absl::MutexLock lock(&mutex_);
  if (!models_.contains(model)) {
    return absl::FailedPreconditionError("the model was not registered by this client");
  }
  prefills_[model].Add(tokens, context_tokens, seconds);
  return absl::OkStatus();
}

absl::StatusOr<LoadPlan> Client::PlanLoad(const ModelId& model, const v1::LookupResult& found,
                                          std::uint64_t prompt_tokens, const FetchOptions& fetch) {
  const std::shared_ptr<const KnownModel> known = Known(model);
  if (known == nullptr) {
    return absl::FailedPreconditionError("the model was not registered by this client");
  }
  std::vector<const v1::BlockRun*> runs;
  std::uint64_t blocks = 0;
  for (const v1::BlockRun& run : found.runs()) {
    if (run.first_block() != blocks || run.block_count() == 0 ||
        !IsCodec(static_cast<CodecId>(run.codec()))) {
      return absl::InvalidArgumentError(
          "runs: do not follow each other, or are of an unknown codec");
    }
    blocks += run.block_count();
    runs.push_back(&run);
  }
  if (blocks != found.matched_blocks()) {
    return absl::InvalidArgumentError(
        "runs: not those of all matched blocks; look up with want_runs");
  }
  const PlannedPrompt prompt{.tokens = prompt_tokens,
                             .block_tokens = known->geometry.block_tokens(),
                             .raw_block_bytes = known->geometry.raw_block_bytes()};
  LoadCost load;
  PrefillCost prefill;
  {
    absl::MutexLock lock(&mutex_);
    load = load_rates_.cost(std::chrono::steady_clock::now());
    if (const auto fit = prefills_.find(model); fit != prefills_.end())
      prefill = fit->second.cost();
  }
  load.server_decodes = fetch.form == BlockForm::kRaw && (options_.coding == Coding::kServer ||
                                                          fetch.min_quality == Quality::kExact);
  // As Fetch asks for them: members have no layers, and readers of frames want such as stand alone.
  load.server_decodes_members = fetch.on_layer != nullptr || fetch.form == BlockForm::kFrame;
  if (fetch.form == BlockForm::kFrame) load.decode_seconds_per_token = {};
  return kvtrie::PlanLoad(runs, prompt, load, prefill);
}

absl::Status Client::FetchAttempt(const ModelId& model, const FetchOptions& options,
                                  bool accept_referenced, Deadline deadline, int attempt,
                                  FetchAssembly* assembly, FrameDecoding* decoding) {
  v1::FetchRequest request;
  request.set_model_id(std::string(model.view()));
  const auto wanted = assembly->StartAttempt(kFetchBlocksMax);
  std::string& node_ids = *request.mutable_node_ids();
  node_ids.reserve(wanted.size() * TrieNodeId::kBytes);
  for (const std::uint32_t i : wanted) node_ids.append(assembly->target(i).node.view());
  request.set_order(options.on_layer ? v1::FETCH_ORDER_LAYER_MAJOR : v1::FETCH_ORDER_BLOCK_MAJOR);
  request.set_encoding(options.form == BlockForm::kFrame || decoding != nullptr ? v1::ENCODING_FRAME
                                                                                : v1::ENCODING_RAW);
  request.set_accept_referenced(accept_referenced && decoding != nullptr);
  request.set_want_tokens(options.want_tokens);
  request.set_min_quality(static_cast<v1::Quality>(options.min_quality));
  if (!options.release_lease.empty() && wanted.size() == assembly->pending_blocks()) {
    request.set_release_lease_id(std::string(options.release_lease.view()));
  }

  RawCall call(channels_.Bulk(), kFetchMethod, deadline, MayWait(attempt));
  call.Write(ComposeBulkMessage(request, {}), /*last=*/true);
  call.Read();
  v1::FetchResponse message;
  BulkPayload payload;
  while (true) {
    const auto completion = call.Next(deadline);
    if (!completion.has_value()) {
      return absl::DeadlineExceededError("fetch: not all blocks arrived in time");
    }
    if (completion->op != RawCall::Op::kRead) continue;
    if (!completion->ok) return call.Finish(deadline);
    KV_RETURN_IF_ERROR(ParseBulkMessage(call.message(), &message, &payload));
    KV_RETURN_IF_ERROR(assembly->Accept(message, payload.pieces()));
    if (assembly->attempt_complete()) return call.Finish(deadline);
    call.Read();
    // The next message travels meanwhile.
    if (decoding != nullptr) decoding->Advance(*assembly, /*last=*/false);
  }
}

absl::StatusOr<RunsReport> Client::FetchRuns(const ModelId& model, const v1::LookupResult& found,
                                             const RunsTarget& target,
                                             const FetchRunsOptions& options) {
  const Deadline deadline = Deadline::After(Or(options.timeout, options_.bulk_timeout));
  const std::shared_ptr<const KnownModel> known = Known(model);
  if (known == nullptr) {
    return absl::FailedPreconditionError("the model was not registered by this client");
  }
  KV_ASSIGN_OR_RETURN(RunCopies copies, RunCopies::Plan(known->spec, found.reusable_runs(), target,
                                                        options.skip_tokens));
  const std::span<const RunCopies::Source> sources = copies.sources();
  // Blocks at the ends of runs have tokens that the prompt does not tell: the server decodes those,
  // in a call of their own.
  const bool decodes_here =
      options_.coding != Coding::kServer && options.min_quality != Quality::kExact;
  std::vector<std::size_t> order(sources.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto cut = std::stable_partition(order.begin(), order.end(), [&](std::size_t i) {
    return !decodes_here || !sources[i].tokens.empty();
  });
  const std::size_t block_bytes = known->geometry.raw_block_bytes();
  const std::size_t batch_max = std::max<std::size_t>(1, kRunsMemoryBytes / block_bytes);
  std::vector<std::byte> memory;
  for (auto at = order.begin(); at != order.end();) {
    const auto part_end = at < cut ? cut : order.end();
    const auto end = at + std::min(part_end - at, static_cast<std::ptrdiff_t>(batch_max));
    const std::span<const std::size_t> batch(at, end);
    memory.resize(std::max(memory.size(), batch.size() * block_bytes));
    std::vector<FetchTarget> targets;
    for (const std::size_t i : batch) {
      targets.push_back(
          {.node = sources[i].node,
           .raw = std::span(memory).subspan(targets.size() * block_bytes, block_bytes),
           .tokens = sources[i].tokens,
           .first_position = sources[i].first_position});
    }
    FetchOptions fetch;
    fetch.min_quality = options.min_quality;
    fetch.timeout = std::chrono::milliseconds(std::max(1, deadline.remaining_ms()));
    if (end == order.end()) fetch.release_lease = options.release_lease;
    const FetchReport report = Fetch(model, targets, fetch);
    for (std::size_t k = 0; k < batch.size(); ++k) {
      copies.Take(batch[k], report.blocks[k], targets[k].raw);
    }
    at = end;
  }
  return copies.TakeReport();
}

ProfileId Client::NewestProfile(const KnownModel& model, const ModelId& id) {
  {
    absl::MutexLock lock(&mutex_);
    const Newest& newest = newest_profiles_[id];
    if (std::chrono::steady_clock::now() - newest.asked < kNewestProfileAge) return newest.profile;
  }
  const auto handle = RegisterModel(model.spec);
  if (handle.ok()) return handle->profile;
  absl::MutexLock lock(&mutex_);
  return newest_profiles_[id].profile;
}

std::shared_ptr<const FrameCodec> Client::EncoderFor(const PutPath& path, Deadline deadline) {
  if (options_.coding == Coding::kServer || path.form != BlockForm::kRaw) return nullptr;
  if (path.quality == Quality::kExact && !path.pack_exact) return nullptr;
  const ModelId& id = path.path.model;
  const std::shared_ptr<const KnownModel> model = Known(id);
  if (model == nullptr) return nullptr;
  // A layout of its own is known to nobody but the engine.
  if (path.quality != Quality::kExact && !model->spec.layout_tag.empty()) return nullptr;
  const bool lossy = path.quality != Quality::kExact && path.quality != Quality::kUnrated;
  const ProfileId profile = lossy ? NewestProfile(*model, id) : ProfileId{};
  auto codec = CodecFor(*model, id, profile, deadline);
  // Without loss, then.
  if (!codec.ok()) codec = CodecFor(*model, id, ProfileId{}, deadline);
  return codec.ok() ? *std::move(codec) : nullptr;
}

std::vector<PutReport> Client::Put(std::span<const PutPath> paths,
                                   std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::After(Or(timeout, options_.bulk_timeout));
  stats_.calls.fetch_add(1, std::memory_order_relaxed);

  std::vector<std::shared_ptr<const FrameCodec>> codecs;
  for (const PutPath& path : paths) codecs.push_back(EncoderFor(path, deadline));
  const bool encodes =
      std::any_of(codecs.begin(), codecs.end(), [](const auto& codec) { return codec != nullptr; });

  // By shared memory a path travels in pieces that fit into one request; each is a put of its own.
  bool use_lane = !encodes && UseLane();
  std::vector<PutPath> pieces;
  std::vector<std::size_t> piece_counts(paths.size(), 1);
  if (use_lane) {
    for (std::size_t i = 0; i < paths.size(); ++i) {
      const PutPath& path = paths[i];
      std::size_t block_bytes = 1;
      for (const auto& block : path.blocks) block_bytes = std::max(block_bytes, block.size());
      const std::size_t step = std::max<std::size_t>(1, LocalLane::kRequestBytes / block_bytes);
      const std::size_t before = pieces.size();
      for (std::size_t at = 0; at < std::max<std::size_t>(1, path.blocks.size()); at += step) {
        PutPath piece = path;
        piece.first_block = path.first_block + static_cast<std::uint32_t>(at);
        piece.blocks = path.blocks.subspan(at, std::min(step, path.blocks.size() - at));
        pieces.push_back(piece);
      }
      piece_counts[i] = pieces.size() - before;
    }
    paths = pieces;
    codecs.resize(paths.size());
  }

  std::vector<std::shared_ptr<const KnownModel>> models;
  std::vector<std::unique_ptr<PutProgress>> puts;
  std::vector<std::unique_ptr<PutReport>> refused(paths.size());
  for (std::size_t i = 0; i < paths.size(); ++i) {
    models.push_back(Known(paths[i].path.model));
    if (models.back() == nullptr) {
      refused[i] = std::make_unique<PutReport>();
      refused[i]->blocks.resize(paths[i].blocks.size());
      for (PutBlockReport& block : refused[i]->blocks) {
        block.status = absl::FailedPreconditionError("the model was not registered by this client");
      }
      puts.push_back(nullptr);
      continue;
    }
    const auto references_of = [this, deadline, id = paths[i].path.model,
                                model = models.back()](std::span<const TrieNodeId> nodes) {
      return DecodeReferences(
          model->geometry, id, nodes, GetReferences(id, *model, nodes, deadline),
          [&](const ProfileId& profile) { return CodecFor(*model, id, profile, deadline); });
    };
    puts.push_back(std::make_unique<PutProgress>(paths[i], models.back()->geometry, codecs[i],
                                                 options_.coding_threads, references_of));
  }

  std::optional<Backoff> backoff;
  bool failed = false;
  std::vector<PutProgress*> open;
  absl::Status last;
  for (int attempt = 0;;) {
    open.clear();
    std::size_t begin = 0;
    for (const std::size_t count : piece_counts) {
      for (std::size_t i = begin; i < begin + count; ++i) {
        if (puts[i] == nullptr || puts[i]->done()) continue;
        open.push_back(puts[i].get());
        // A piece hangs on those before it, which must be stored when a stream announces it.
        if (!use_lane) break;
      }
      begin += count;
    }
    if (open.empty()) break;
    absl::Status status =
        use_lane ? PutByLane(open, deadline, attempt) : PutAttempt(open, deadline, attempt);
    if (!status.ok() && use_lane && options_.lane == Lane::kAuto &&
        !absl::IsDeadlineExceeded(status)) {
      SuspendLane();
      use_lane = false;
      ++attempt;
      continue;
    }
    if (status.ok()) {
      const bool all_done =
          std::all_of(open.begin(), open.end(), [](const PutProgress* put) { return put->done(); });
      if (all_done) continue;
      status = absl::UnavailableError("put: the server cannot take some blocks now");
    }
    if (!backoff.has_value()) backoff = NewBackoff();
    if (!IsRetriable(status) || !PauseBeforeRetry(*backoff, deadline)) {
      failed = true;
      for (const auto& put : puts) {
        if (put != nullptr && !put->done()) put->FailRest(Cause(status, last));
      }
    }
    last = std::move(status);
    ++attempt;
  }
  Ended(failed);
  for (std::size_t i = 0; i < puts.size(); ++i) {
    if (puts[i] == nullptr) continue;
    for (const TrieNodeId& node : puts[i]->refused_references()) {
      references_.Drop(paths[i].path.model, node);
    }
  }

  std::vector<PutReport> reports;
  std::size_t next = 0;
  for (const std::size_t count : piece_counts) {
    PutReport report;
    for (std::size_t i = 0; i < count; ++i, ++next) {
      PutReport piece =
          puts[next] != nullptr ? puts[next]->TakeReport() : std::move(*refused[next]);
      report.stored_blocks += piece.stored_blocks;
      report.duplicate_blocks += piece.duplicate_blocks;
      if (codecs[next] != nullptr) CountEncoded(paths[next], piece);
      std::move(piece.blocks.begin(), piece.blocks.end(), std::back_inserter(report.blocks));
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

void Client::CountEncoded(const PutPath& path, const PutReport& report) {
  for (const PutBlockReport& block : report.blocks) {
    if (absl::IsFailedPrecondition(block.status)) {
      // Its profile may have been deleted: ask again before the next put.
      absl::MutexLock lock(&mutex_);
      newest_profiles_[path.path.model].asked = {};
    }
    if (block.frame_bytes == 0) continue;
    stats_.encoded_blocks.fetch_add(1, std::memory_order_relaxed);
    if (block.quality == path.quality) continue;
    stats_.encoded_exact_blocks.fetch_add(1, std::memory_order_relaxed);
  }
}

absl::Status Client::PutByLane(std::span<PutProgress*> puts, Deadline deadline, int attempt) {
  for (PutProgress* put : puts) {
    KV_RETURN_IF_ERROR(lane_->Put(put, deadline, MayWait(attempt)));
    stats_.local_lane_blocks.fetch_add(put->path().blocks.size(), std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

absl::Status Client::PutAttempt(std::span<PutProgress*> puts, Deadline deadline, int attempt) {
  while (true) {
    std::unique_ptr<PutConnection> stream = TakePutConnection(attempt);
    const bool kept = stream->used();
    absl::Status status = stream->Run(puts, deadline);
    if (status.ok()) {
      GiveBackPutConnection(std::move(stream));
      return status;
    }
    // A connection that was lost while it lay idle says nothing about the server of now.
    if (!kept || !IsRetriable(status)) return status;
  }
}

std::unique_ptr<PutConnection> Client::TakePutConnection(int attempt) {
  while (true) {
    std::unique_ptr<PutConnection> stream;
    {
      absl::MutexLock lock(&mutex_);
      if (put_connections_.empty()) break;
      stream = std::move(put_connections_.back());
      put_connections_.pop_back();
    }
    if (stream->StillOpen()) return stream;
  }
  return std::make_unique<PutConnection>(channels_.NewConnection(), MayWait(attempt));
}

void Client::GiveBackPutConnection(std::unique_ptr<PutConnection> stream) {
  absl::MutexLock lock(&mutex_);
  if (put_connections_.size() < kIdlePutConnectionsMax)
    put_connections_.push_back(std::move(stream));
}

// --- shared by the calls ---

std::shared_ptr<const Client::KnownModel> Client::Known(const ModelId& model) {
  absl::MutexLock lock(&mutex_);
  const auto found = models_.find(model);
  return found == models_.end() ? nullptr : found->second;
}

Backoff Client::NewBackoff() {
  absl::MutexLock lock(&mutex_);
  return Backoff(options_.retry, random_());
}

bool Client::PauseBeforeRetry(Backoff& backoff, Deadline deadline) {
  const auto pause = backoff.Next();
  if (pause >= deadline.remaining() || !retry_budget_.TryTake()) return false;
  stats_.retries.fetch_add(1, std::memory_order_relaxed);
  std::this_thread::sleep_for(pause);
  return true;
}

void Client::Ended(bool failed) {
  if (failed) {
    stats_.failed_calls.fetch_add(1, std::memory_order_relaxed);
  } else {
    retry_budget_.CallSucceeded();
  }
}

bool Client::MayWait(int attempt) const { return attempt > 0 && options_.targets.size() == 1; }

bool Client::UseLane() {
  if (lane_ == nullptr) return false;
  if (options_.lane == Lane::kShm) return true;
  absl::MutexLock lock(&mutex_);
  return std::chrono::steady_clock::now() >= lane_off_until_;
}

void Client::SuspendLane() {
  absl::MutexLock lock(&mutex_);
  lane_off_until_ = std::chrono::steady_clock::now() + kLaneOffTime;
}

}  // namespace kvtrie
