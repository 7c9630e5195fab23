#include "server/cache_service.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/bulk_call.h"
#include "server/fetch_stream.h"
#include "server/profile_streams.h"
#include "server/unary_call.h"
#include "server/watch_stream.h"
#include "server/wire_conversion.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

// Tokens of a request that are walked on gRPC's own few threads; more would hold up other calls.
constexpr std::size_t kInlineTokensMax = 65'536;

// One look-up on its way: queries are answered in order, in memory as far as that goes.
class LookupCall {
 public:
  LookupCall(ServiceContext& context, const v1::LookupRequest& request,
             v1::LookupResponse* response)
      : context_(context), request_(request), response_(response) {
    response_->mutable_results()->Reserve(request_.queries_size());
  }

  // Answers queries until one needs the disk. True: all are answered.
  bool RunInMemory() {
    while (next_ < request_.queries_size()) {
      if (!AnswerNext(/*may_block=*/false)) return false;
    }
    return true;
  }
  void RunBlocking() {
    while (next_ < request_.queries_size()) AnswerNext(/*may_block=*/true);
  }

 private:
  bool AnswerNext(bool may_block) {
    const v1::LookupQuery& query = request_.queries(next_);
    absl::StatusOr<LookupResult> result;
    if (absl::Status checked = CheckLookupQuery(query); !checked.ok()) {
      result = std::move(checked);
    } else {
      const RequestPath path({}, query.tokens(), query.salt(), query.extra_keys());
      LookupQuery lookup;
      lookup.path = path.view();
      lookup.min_quality = FromProto(query.min_quality());
      lookup.lease = std::chrono::milliseconds(query.lease_ms());
      lookup.want_blocks = query.want_blocks();
      if (query.allow_text_reuse()) {
        lookup.text_reuse_min_tokens = query.text_reuse_min_tokens() != 0
                                           ? query.text_reuse_min_tokens()
                                           : kReusableRunTokensDefault;
      }
      lookup.want_runs = query.want_runs();
      for (const std::string& model_id : query.model_ids()) {
        lookup.models.push_back(IdFromProto<ModelId>(model_id));
      }
      if (may_block) {
        result = context_.engine.Lookup(kBuiltInTenant, lookup);
      } else {
        auto in_memory = context_.engine.TryLookup(kBuiltInTenant, lookup);
        if (!in_memory.has_value()) return false;
        result = *std::move(in_memory);
      }
    }
    v1::LookupResult* answer = response_->add_results();
    if (result.ok()) {
      ToProto(*result, answer);
    } else {
      ToItemStatus(result.status(), answer->mutable_status());
    }
    ++next_;
    return true;
  }

  ServiceContext& context_;
  const v1::LookupRequest& request_;
  v1::LookupResponse* const response_;
  int next_ = 0;
};

std::size_t TokenCount(const v1::LookupRequest& request) {
  std::size_t bytes = 0;
  for (const v1::LookupQuery& query : request.queries()) bytes += query.tokens().size();
  return bytes / sizeof(TokenId);
}

}  // namespace

grpc::ServerUnaryReactor* CacheService::RegisterModel(grpc::CallbackServerContext* call,
                                                      const v1::RegisterModelRequest* request,
                                                      v1::RegisterModelResponse* response) {
  return RunUnary(context_, call, RpcMethod::kRegisterModel, CheckRegisterModel(*request),
                  [this, request, response]() -> absl::Status {
                    KV_ASSIGN_OR_RETURN(const ModelSpec spec, FromProto(request->spec()));
                    KV_RETURN_IF_ERROR(Within("spec.", spec.Validate()));
                    if (!request->expected_model_id().empty() &&
                        IdFromProto<ModelId>(request->expected_model_id()) != spec.Digest()) {
                      return absl::FailedPreconditionError(absl::StrCat(
                          "expected_model_id: the digest of this spec is ", spec.Digest().ToHex()));
                    }
                    KV_ASSIGN_OR_RETURN(const ModelInfo model,
                                        context_.engine.RegisterModel(kBuiltInTenant, spec));
                    response->set_model_id(std::string(model.id.view()));
                    response->set_block_tokens(model.spec.block_tokens);
                    response->set_raw_block_bytes(model.raw_block_bytes);
                    if (!model.profile.empty()) {
                      response->set_profile_id(std::string(model.profile.view()));
                    }
                    return absl::OkStatus();
                  });
}

grpc::ServerReadReactor<grpc::ByteBuffer>* CacheService::PutProfile(
    grpc::CallbackServerContext* call, grpc::ByteBuffer* response) {
  return ProfilePutStream::Start(context_, call, response);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::GetProfile(
    grpc::CallbackServerContext* call, const grpc::ByteBuffer* request) {
  return ProfileGetStream::Start(context_, call, *request);
}

grpc::ServerUnaryReactor* CacheService::ListProfiles(grpc::CallbackServerContext* call,
                                                     const v1::ListProfilesRequest*,
                                                     v1::ListProfilesResponse* response) {
  return RunUnary(context_, call, RpcMethod::kListProfiles, absl::OkStatus(), [this, response] {
    for (const StoredProfile& profile : context_.engine.ListProfiles(kBuiltInTenant)) {
      ToProto(profile, response->add_profiles());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheService::DeleteProfile(grpc::CallbackServerContext* call,
                                                      const v1::DeleteProfileRequest* request,
                                                      v1::DeleteProfileResponse*) {
  return RunUnary(
      context_, call, RpcMethod::kDeleteProfile, CheckProfileId(request->profile_id()),
      [this, request] {
        return context_.engine.DeleteProfile(IdFromProto<ProfileId>(request->profile_id()));
      });
}

grpc::ServerUnaryReactor* CacheService::Lookup(grpc::CallbackServerContext* call,
                                               const v1::LookupRequest* request,
                                               v1::LookupResponse* response) {
  auto probe = std::make_shared<RpcProbe>(context_.metrics, RpcMethod::kLookup);
  if (const absl::Status status = CheckLookup(*request, context_.limits); !status.ok()) {
    return AnswerUnary(call, *probe, status);
  }
  auto lookup = std::make_shared<LookupCall>(context_, *request, response);
  if (TokenCount(*request) <= kInlineTokensMax && lookup->RunInMemory()) {
    return AnswerUnary(call, *probe, absl::OkStatus());
  }
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const bool queued = context_.engine.RunBlocking([call, reactor, probe, lookup] {
    if (!call->IsCancelled()) lookup->RunBlocking();
    FinishUnary(reactor, *probe, absl::OkStatus());
  });
  if (!queued) FinishUnary(reactor, *probe, BusyError());
  return reactor;
}

grpc::ServerUnaryReactor* CacheService::Similar(grpc::CallbackServerContext* call,
                                                const v1::SimilarRequest* request,
                                                v1::SimilarResponse* response) {
  return RunUnary(context_, call, RpcMethod::kSimilar, CheckSimilar(*request, context_.limits),
                  [this, request, response]() -> absl::Status {
                    const RequestPath path(request->prefix());
                    SimilarRequest similar{.path = path.view()};
                    if (request->session_count() != 0) {
                      similar.session_count = request->session_count();
                    }
                    KV_ASSIGN_OR_RETURN(const SimilarResult result,
                                        context_.engine.Similar(kBuiltInTenant, similar));
                    ToProto(result, response);
                    return absl::OkStatus();
                  });
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* CacheService::Fetch(grpc::CallbackServerContext* call,
                                                                const grpc::ByteBuffer* request) {
  return FetchStream::Start(context_, call, *request);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CacheService::Put(
    grpc::CallbackServerContext* call) {
  return BulkCall::Start({context_.streams, context_.metrics}, RpcMethod::kPut, call,
                         [this](std::function<void()> on_change) {
                           return PutStream::Create(put_host_, context_.limits,
                                                    std::move(on_change));
                         });
}

grpc::ServerUnaryReactor* CacheService::Touch(grpc::CallbackServerContext* call,
                                              const v1::TouchRequest* request,
                                              v1::TouchResponse* response) {
  return RunUnary(
      context_, call, RpcMethod::kTouch,
      CheckSelection(request->selection(), SelectionScope::kPathOrWide, context_.limits),
      [this, request, response]() -> absl::Status {
        std::unique_ptr<RequestPath> path;
        KV_ASSIGN_OR_RETURN(
            const std::uint32_t touched,
            context_.engine.Touch(kBuiltInTenant, FromProto(request->selection(), &path)));
        response->set_touched_blocks(touched);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::Pin(grpc::CallbackServerContext* call,
                                            const v1::PinRequest* request,
                                            v1::PinResponse* response) {
  return RunUnary(context_, call, RpcMethod::kPin, CheckPin(*request, context_.limits),
                  [this, request, response]() -> absl::Status {
                    const std::chrono::seconds duration(request->seconds());
                    std::unique_ptr<RequestPath> path;
                    KV_ASSIGN_OR_RETURN(
                        const PinInfo pin,
                        request->pin_id().empty()
                            ? context_.engine.Pin(kBuiltInTenant,
                                                  FromProto(request->selection(), &path), duration)
                            : context_.engine.ExtendPin(
                                  kBuiltInTenant, IdFromProto<PinId>(request->pin_id()), duration));
                    response->set_pin_id(std::string(pin.id.view()));
                    response->set_pinned_blocks(pin.blocks);
                    response->set_pinned_bytes(pin.bytes);
                    response->set_end_unix_seconds(pin.end_unix_seconds);
                    return absl::OkStatus();
                  });
}

grpc::ServerUnaryReactor* CacheService::Unpin(grpc::CallbackServerContext* call,
                                              const v1::UnpinRequest* request,
                                              v1::UnpinResponse* response) {
  return RunUnary(context_, call, RpcMethod::kUnpin, CheckUnpin(*request),
                  [this, request, response]() -> absl::Status {
                    KV_ASSIGN_OR_RETURN(const bool existed,
                                        context_.engine.Unpin(
                                            kBuiltInTenant, IdFromProto<PinId>(request->pin_id())));
                    response->set_existed(existed);
                    return absl::OkStatus();
                  });
}

grpc::ServerUnaryReactor* CacheService::Delete(grpc::CallbackServerContext* call,
                                               const v1::DeleteRequest* request,
                                               v1::DeleteResponse* response) {
  return RunUnary(
      context_, call, RpcMethod::kDelete,
      CheckSelection(request->selection(), SelectionScope::kPathOrWideIfUnused, context_.limits),
      [this, request, response]() -> absl::Status {
        std::unique_ptr<RequestPath> path;
        KV_ASSIGN_OR_RETURN(
            const DeletedCount deleted,
            context_.engine.Delete(kBuiltInTenant, FromProto(request->selection(), &path)));
        response->set_deleted_blocks(deleted.blocks);
        response->set_freed_bytes(deleted.bytes);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::SetRetention(grpc::CallbackServerContext* call,
                                                     const v1::SetRetentionRequest* request,
                                                     v1::SetRetentionResponse* response) {
  return RunUnary(
      context_, call, RpcMethod::kSetRetention, CheckSetRetention(*request, context_.limits),
      [this, request, response]() -> absl::Status {
        std::unique_ptr<RequestPath> path;
        Retention retention;
        if (request->has_ttl_seconds())
          retention.ttl = std::chrono::seconds(request->ttl_seconds());
        if (request->has_priority()) retention.priority = request->priority();
        if (request->quality() != v1::QUALITY_UNSPECIFIED) {
          retention.quality = FromProto(request->quality());
        }
        KV_ASSIGN_OR_RETURN(const RetentionChange change,
                            context_.engine.SetRetention(
                                kBuiltInTenant, FromProto(request->selection(), &path), retention));
        response->set_changed_blocks(change.changed_blocks);
        response->set_unchanged_blocks(change.unchanged_blocks);
        response->set_dropped_frames(change.dropped_frames);
        response->set_freed_bytes(change.freed_bytes);
        return absl::OkStatus();
      });
}

grpc::ServerWriteReactor<v1::WatchResponse>* CacheService::Watch(grpc::CallbackServerContext* call,
                                                                 const v1::WatchRequest* request) {
  return WatchStream::Start(context_, call, *request);
}

grpc::ServerUnaryReactor* CacheService::OpenLocalLane(grpc::CallbackServerContext* call,
                                                      const v1::OpenLocalLaneRequest*,
                                                      v1::OpenLocalLaneResponse* response) {
  RpcProbe probe(context_.metrics, RpcMethod::kOpenLocalLane);
  if (lane_ == nullptr) {
    return AnswerUnary(call, probe, absl::UnavailableError("the shared-memory lane is off"));
  }
  const LocalLaneServer::Invitation invitation = lane_->Invite();
  response->set_socket_path(lane_->socket_path());
  response->set_token(invitation.token);
  response->set_token_ms(static_cast<std::uint32_t>(invitation.life.count()));
  return AnswerUnary(call, probe, absl::OkStatus());
}

}  // namespace kvtrie
