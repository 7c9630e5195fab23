#include "client/admin_client.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <utility>

#include "client/deadline.h"
#include "client/status_from_grpc.h"

namespace kvtrie {
namespace {

// A page of 10,000 nodes.
constexpr int kReceiveBytesMax = 64 << 20;
// Drain answers only when the server is done; the call waits a little longer than it was told to.
constexpr std::chrono::milliseconds kDrainSlack{5000};

std::unique_ptr<v1::Admin::Stub> Connect(const AdminClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kReceiveBytesMax);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  return v1::Admin::NewStub(grpc::CreateCustomChannel(
      options.target,
      options.credentials ? options.credentials : grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace

AdminClient::AdminClient(AdminClientOptions options)
    : options_(std::move(options)), stub_(Connect(options_)) {}

template <typename Request, typename Response>
absl::StatusOr<Response> AdminClient::Call(UnaryMethod<Request, Response> method,
                                           const Request& request,
                                           std::chrono::milliseconds timeout) {
  grpc::ClientContext context;
  context.set_deadline(Deadline::After(timeout).ToGrpc());
  Response response;
  if (absl::Status status = FromGrpc((stub_.get()->*method)(&context, request, &response));
      !status.ok()) {
    return status;
  }
  return response;
}

absl::StatusOr<v1::GetStatusResponse> AdminClient::GetStatus() {
  return Call<v1::GetStatusRequest, v1::GetStatusResponse>(&v1::Admin::Stub::GetStatus, {},
                                                           options_.timeout);
}

absl::StatusOr<v1::ListModelsResponse> AdminClient::ListModels() {
  return Call<v1::ListModelsRequest, v1::ListModelsResponse>(&v1::Admin::Stub::ListModels, {},
                                                             options_.timeout);
}

absl::StatusOr<v1::ListNodesResponse> AdminClient::ListNodes(const v1::ListNodesRequest& request) {
  return Call<v1::ListNodesRequest, v1::ListNodesResponse>(&v1::Admin::Stub::ListNodes, request,
                                                           options_.timeout);
}

absl::StatusOr<v1::DescribeNodeResponse> AdminClient::DescribeNode(
    const v1::DescribeNodeRequest& request) {
  return Call<v1::DescribeNodeRequest, v1::DescribeNodeResponse>(&v1::Admin::Stub::DescribeNode,
                                                                 request, options_.timeout);
}

absl::StatusOr<v1::ListGroupsResponse> AdminClient::ListGroups(
    const v1::ListGroupsRequest& request) {
  return Call<v1::ListGroupsRequest, v1::ListGroupsResponse>(&v1::Admin::Stub::ListGroups, request,
                                                             options_.timeout);
}

absl::StatusOr<v1::DescribeGroupResponse> AdminClient::DescribeGroup(
    const v1::DescribeGroupRequest& request) {
  return Call<v1::DescribeGroupRequest, v1::DescribeGroupResponse>(&v1::Admin::Stub::DescribeGroup,
                                                                   request, options_.timeout);
}

absl::StatusOr<v1::GetGroupResponse> AdminClient::GetGroup(const v1::GetGroupRequest& request) {
  return Call<v1::GetGroupRequest, v1::GetGroupResponse>(&v1::Admin::Stub::GetGroup, request,
                                                         options_.timeout);
}

absl::StatusOr<v1::GetUsageResponse> AdminClient::GetUsage() {
  return Call<v1::GetUsageRequest, v1::GetUsageResponse>(&v1::Admin::Stub::GetUsage, {},
                                                         options_.timeout);
}

absl::StatusOr<v1::ListPinsResponse> AdminClient::ListPins() {
  return Call<v1::ListPinsRequest, v1::ListPinsResponse>(&v1::Admin::Stub::ListPins, {},
                                                         options_.timeout);
}

absl::StatusOr<v1::DrainResponse> AdminClient::Drain(const v1::DrainRequest& request) {
  return Call<v1::DrainRequest, v1::DrainResponse>(
      &v1::Admin::Stub::Drain, request,
      std::chrono::milliseconds(request.deadline_ms()) + kDrainSlack);
}

absl::StatusOr<v1::GetConfigResponse> AdminClient::GetConfig() {
  return Call<v1::GetConfigRequest, v1::GetConfigResponse>(&v1::Admin::Stub::GetConfig, {},
                                                           options_.timeout);
}

absl::Status AdminClient::Verify(
    const v1::VerifyRequest& request,
    const std::function<void(const v1::VerifyResponse&)>& on_progress) {
  grpc::ClientContext context;
  context.set_deadline(Deadline::After(options_.verify_timeout).ToGrpc());
  auto reader = stub_->Verify(&context, request);
  v1::VerifyResponse response;
  bool done = false;
  while (reader->Read(&response)) {
    done = done || response.done();
    on_progress(response);
  }
  if (absl::Status status = FromGrpc(reader->Finish()); !status.ok()) return status;
  return done ? absl::OkStatus() : absl::UnavailableError("verify: it ended before it was done");
}

}  // namespace kvtrie
