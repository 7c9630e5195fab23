#include "server/admin_service.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics.h"
#include "server/put_stream.h"
#include "server/unary_call.h"
#include "server/wire_conversion.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::size_t kPageSizeDefault = 100;

// One Verify call. It takes long, so it has a thread of its own; a report waits until the one
// before it was taken, so that a slow reader slows it down and nothing gathers.
class VerifyCall final : public grpc::ServerWriteReactor<v1::VerifyResponse> {
 public:
  VerifyCall(ServiceContext& context, const v1::VerifyRequest& request,
             std::atomic<bool>* verifying)
      : context_(context),
        request_(request),
        verifying_(verifying),
        probe_(context.metrics, RpcMethod::kAdmin) {
    std::thread([this] { Run(); }).detach();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    broken_ = broken_ || !ok;
  }
  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
  }
  void OnDone() override { delete this; }

 private:
  void Run() {
    const absl::Status status =
        context_.engine.Verify(request_.structure_only(), request_.repair(),
                               [this](const VerifyProgress& progress) { return Report(progress); });
    AwaitWritten();
    probe_.Finish(static_cast<int>(status.code()));
    // Whoever sees the end of this call may begin the next.
    verifying_->store(false);
    Finish(ToGrpc(status));
  }

  bool Report(const VerifyProgress& progress) {
    if (!AwaitWritten()) return false;
    response_.Clear();
    response_.set_nodes_checked(progress.nodes_checked);
    response_.set_nodes_total(progress.nodes_total);
    response_.set_bytes_read(progress.bytes_read);
    response_.set_done(progress.done);
    for (const VerifyFinding& found : progress.findings) {
      v1::Finding* finding = response_.add_findings();
      finding->set_node_id(std::string(found.node.view()));
      finding->set_what(found.what);
    }
    {
      absl::MutexLock lock(&mutex_);
      writing_ = true;
    }
    StartWrite(&response_);
    return true;
  }

  bool Settled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !writing_ || broken_; }
  bool AwaitWritten() {
    absl::MutexLock lock(&mutex_, absl::Condition(this, &VerifyCall::Settled));
    return !broken_;
  }

  ServiceContext& context_;
  const v1::VerifyRequest request_;
  std::atomic<bool>* const verifying_;
  RpcProbe probe_;
  v1::VerifyResponse response_;
  absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
};

class RefusedStream final : public grpc::ServerWriteReactor<v1::VerifyResponse> {
 public:
  explicit RefusedStream(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerUnaryReactor* AdminService::GetStatus(grpc::CallbackServerContext* call,
                                                  const v1::GetStatusRequest*,
                                                  v1::GetStatusResponse* response) {
  RpcProbe probe(context_.metrics, RpcMethod::kAdmin);
  const EngineStats stats = context_.engine.Stats();
  response->set_version(KVTRIE_VERSION);
  auto [state, reasons] = hooks_.state();
  response->set_state(std::move(state));
  for (std::string& reason : reasons) response->add_reasons(std::move(reason));
  response->set_uptime_seconds(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - started_)
          .count()));
  response->set_model_count(stats.model_count);
  response->set_node_count(stats.node_count);
  response->set_stored_bytes(stats.live_bytes);
  response->set_disk_bytes(stats.disk_bytes);
  response->set_disk_limit_bytes(stats.disk_limit_bytes);
  response->set_memory_tier_bytes(stats.memory_tier_bytes);
  response->set_memory_tier_limit_bytes(stats.memory_tier_limit_bytes);
  response->set_index_bytes(stats.index_bytes);
  response->set_token_cache_bytes(stats.token_cache_bytes);
  response->set_lease_count(stats.lease_count);
  response->set_pinned_bytes(stats.pinned_bytes);
  response->set_open_put_bytes(stats.put_memory_bytes);
  for (const CodecUsage& usage : stats.codecs) {
    if (usage.frames == 0) continue;
    v1::CodecUsage* codec = response->add_codecs();
    codec->set_codec(ToProto(usage.codec));
    codec->set_frames(usage.frames);
    codec->set_stored_bytes(usage.bytes);
  }
  response->set_profile_count(stats.profile_count);
  response->set_profile_bytes(stats.profile_bytes);
  ToProto(context_.engine.recovery(), response->mutable_recovery());
  for (const auto& [name, value] : CountersByName(stats)) {
    (*response->mutable_counters())[name] = value;
  }
  return AnswerUnary(call, probe, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::ListModels(grpc::CallbackServerContext* call,
                                                   const v1::ListModelsRequest*,
                                                   v1::ListModelsResponse* response) {
  return RunUnary(context_, call, RpcMethod::kAdmin, absl::OkStatus(), [this, response] {
    for (const ModelInfo& model : context_.engine.ListModels(kBuiltInTenant)) {
      ToProto(model, response->add_models());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListNodes(grpc::CallbackServerContext* call,
                                                  const v1::ListNodesRequest* request,
                                                  v1::ListNodesResponse* response) {
  return RunUnary(context_, call, RpcMethod::kAdmin, CheckListNodes(*request),
                  [this, request, response]() -> absl::Status {
                    const std::size_t page_size =
                        request->page_size() == 0 ? kPageSizeDefault : request->page_size();
                    KV_ASSIGN_OR_RETURN(
                        const std::vector<NodeInfo> nodes,
                        context_.engine.ListChildren(
                            kBuiltInTenant, IdFromProto<ModelId>(request->model_id()),
                            IdFromProto<TrieNodeId>(request->parent_id()),
                            IdFromProto<TrieNodeId>(request->page_token()), page_size));
                    for (const NodeInfo& node : nodes) ToProto(node, response->add_nodes());
                    if (nodes.size() == page_size) {
                      response->set_next_page_token(std::string(nodes.back().id.view()));
                    }
                    return absl::OkStatus();
                  });
}

grpc::ServerUnaryReactor* AdminService::DescribeNode(grpc::CallbackServerContext* call,
                                                     const v1::DescribeNodeRequest* request,
                                                     v1::DescribeNodeResponse* response) {
  return RunUnary(context_, call, RpcMethod::kAdmin, CheckDescribeNode(*request, context_.limits),
                  [this, request, response]() -> absl::Status {
                    const RequestPath path(request->prefix());
                    Selection selection;
                    if (request->has_prefix()) {
                      selection.path = path.view();
                    } else {
                      selection.node = IdFromProto<TrieNodeId>(request->node_id());
                    }
                    KV_ASSIGN_OR_RETURN(const std::vector<NodeInfo> nodes,
                                        context_.engine.DescribePath(kBuiltInTenant, selection));
                    if (nodes.empty())
                      return absl::NotFoundError("node_id, prefix: removed meanwhile");
                    for (std::size_t i = 0; i + 1 < nodes.size(); ++i) {
                      ToProto(nodes[i], response->add_path());
                    }
                    ToProto(nodes.back(), response->mutable_node());
                    return absl::OkStatus();
                  });
}

grpc::ServerUnaryReactor* AdminService::ListGroups(grpc::CallbackServerContext* call,
                                                   const v1::ListGroupsRequest* request,
                                                   v1::ListGroupsResponse* response) {
  return RunUnary(
      context_, call, RpcMethod::kAdmin, CheckListGroups(*request),
      [this, request, response]() -> absl::Status {
        const std::size_t page_size =
            request->page_size() == 0 ? kPageSizeDefault : request->page_size();
        KV_ASSIGN_OR_RETURN(
            const GroupPage page,
            context_.engine.ListGroups(kBuiltInTenant,
                                       IdFromProto<TrieNodeId>(request->page_token()), page_size));
        for (const GroupInfo& group : page.groups) {
          ToProto(group, response->add_groups());
        }
        if (!page.next.empty()) {
          response->set_next_page_token(std::string(page.next.view()));
        }
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminService::DescribeGroup(grpc::CallbackServerContext* call,
                                                      const v1::DescribeGroupRequest* request,
                                                      v1::DescribeGroupResponse* response) {
  return RunUnary(
      context_, call, RpcMethod::kAdmin, CheckDescribeGroup(*request),
      [this, request, response]() -> absl::Status {
        KV_ASSIGN_OR_RETURN(
            const GroupDescription described,
            context_.engine.DescribeGroup(
                kBuiltInTenant, IdFromProto<TrieNodeId>(request->group_id()),
                request->branches_max() == 0 ? kPageSizeDefault : request->branches_max()));
        ToProto(described.group, response->mutable_group());
        for (const GroupBranchInfo& branch : described.branches) {
          ToProto(branch, response->add_branches());
        }
        response->set_more(!described.is_all);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminService::GetGroup(grpc::CallbackServerContext* call,
                                                 const v1::GetGroupRequest* request,
                                                 v1::GetGroupResponse* response) {
  return RunUnary(
      context_, call, RpcMethod::kAdmin, CheckGetGroup(*request),
      [this, request, response]() -> absl::Status {
        KV_ASSIGN_OR_RETURN(
            const std::optional<TrieNodeId> group,
            context_.engine.GroupOf(kBuiltInTenant, IdFromProto<TrieNodeId>(request->node_id())));
        if (group) response->set_group_id(std::string(group->view()));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminService::GetUsage(grpc::CallbackServerContext* call,
                                                 const v1::GetUsageRequest*,
                                                 v1::GetUsageResponse* response) {
  return RunUnary(context_, call, RpcMethod::kAdmin, absl::OkStatus(), [this, response] {
    for (const ModelInfo& model : context_.engine.ListModels(kBuiltInTenant)) {
      ToProto(model, response->add_models());
    }
    const EngineStats stats = context_.engine.Stats();
    response->set_stored_bytes(stats.live_bytes);
    response->set_raw_bytes(stats.raw_live_bytes);
    response->set_disk_bytes(stats.disk_bytes);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListPins(grpc::CallbackServerContext* call,
                                                 const v1::ListPinsRequest*,
                                                 v1::ListPinsResponse* response) {
  return RunUnary(context_, call, RpcMethod::kAdmin, absl::OkStatus(), [this, response] {
    for (const PinInfo& pin : context_.engine.ListPins(kBuiltInTenant)) {
      ToProto(pin, response->add_pins());
    }
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<v1::VerifyResponse>* AdminService::Verify(
    grpc::CallbackServerContext*, const v1::VerifyRequest* request) {
  if (verifying_.exchange(true)) {
    return new RefusedStream(
        absl::ResourceExhaustedError("a verification is running; wait for its end"));
  }
  return new VerifyCall(context_, *request, &verifying_);
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* call,
                                              const v1::DrainRequest* request,
                                              v1::DrainResponse* response) {
  // Waits for puts, which need the engine's threads; so it must not hold one of them.
  auto probe = std::make_shared<RpcProbe>(context_.metrics, RpcMethod::kAdmin);
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::chrono::milliseconds deadline =
      request->deadline_ms() == 0 ? config_.drain_grace
                                  : std::chrono::milliseconds(request->deadline_ms());
  std::thread([this, reactor, response, probe, deadline] {
    response->set_clean(hooks_.drain(deadline));
    FinishUnary(reactor, *probe, absl::OkStatus());
  }).detach();
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::GetConfig(grpc::CallbackServerContext* call,
                                                  const v1::GetConfigRequest*,
                                                  v1::GetConfigResponse* response) {
  RpcProbe probe(context_.metrics, RpcMethod::kAdmin);
  const auto add = [response](const std::string& name, const std::string& value,
                              const std::string& source, const std::string& help) {
    v1::Setting* setting = response->add_settings();
    setting->set_name(name);
    setting->set_value(value);
    setting->set_source(source);
    setting->set_help(help);
  };
  for (const EffectiveSetting& setting : config_.settings) {
    add(setting.name, setting.value, setting.source, setting.help);
  }
  const auto limit = [&add](const char* name, std::uint64_t value, const char* help) {
    add(name, absl::StrCat(value), "limit", help);
  };
  limit("block_bytes_max", kRawBlockBytesMax, "Raw KV of one block.");
  limit("block_tokens_max", kBlockTokensMax, "Tokens of one block.");
  limit("layers_max", kLayersMax, "Layers of one model.");
  limit("prefix_tokens_max", kPathTokensMax, "Tokens of one prefix.");
  limit("salt_bytes_max", kSaltBytesMax, "Salt of a prefix.");
  limit("session_id_bytes_max", kSessionIdBytesMax, "Session id.");
  limit("extra_key_bytes_max", kExtraKeyBytesMax, "Extra key of one block.");
  limit("extra_keys_max", kExtraKeysMax, "Extra keys of one prefix.");
  limit("models_per_query_max", kModelsPerQueryMax, "Models of one Lookup query.");
  limit("fetch_blocks_max", kFetchBlocksMax, "Blocks of one Fetch.");
  limit("profile_bytes_max", kProfileBytesMax, "Bytes of one codec profile.");
  limit("chunk_bytes_max", kChunkBytesMax, "Bytes of one chunk.");
  limit("open_puts_max", PutStream::kOpenPutsMax, "Open puts of one stream.");
  limit("top_k_max", kTopKMax, "Probabilities per token.");
  limit("priority_max", kPriorityMax, "Priority of a block.");
  limit("page_size_max", kPageSizeMax, "Entries of one page.");
  return AnswerUnary(call, probe, absl::OkStatus());
}

}  // namespace kvtrie
