#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client_options.h"
#include "kvtrie/v1/admin.grpc.pb.h"

namespace kvtrie {

struct AdminClientOptions {
  std::string target = "127.0.0.1:50052";  // the admin port of one server
  // Null: plain text.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::chrono::milliseconds timeout{10'000};
  // Verify reads all that is stored.
  std::chrono::milliseconds verify_timeout{24 * 3600 * 1000};
};

// What an operator asks of one server (admin.proto is the reference). Nothing is repeated by
// itself: an operator wants to know that a server does not answer. Thread-safe.
class AdminClient {
 public:
  explicit AdminClient(AdminClientOptions options);

  absl::StatusOr<v1::GetStatusResponse> GetStatus();
  absl::StatusOr<v1::ListModelsResponse> ListModels();
  absl::StatusOr<v1::ListNodesResponse> ListNodes(const v1::ListNodesRequest& request);
  absl::StatusOr<v1::DescribeNodeResponse> DescribeNode(const v1::DescribeNodeRequest& request);
  absl::StatusOr<v1::ListGroupsResponse> ListGroups(const v1::ListGroupsRequest& request);
  absl::StatusOr<v1::DescribeGroupResponse> DescribeGroup(const v1::DescribeGroupRequest& request);
  absl::StatusOr<v1::GetGroupResponse> GetGroup(const v1::GetGroupRequest& request);
  absl::StatusOr<v1::GetUsageResponse> GetUsage();
  absl::StatusOr<v1::ListPinsResponse> ListPins();
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request);
  absl::StatusOr<v1::GetConfigResponse> GetConfig();

  // OK when the server has said that it is done.
  absl::Status Verify(const v1::VerifyRequest& request,
                      const std::function<void(const v1::VerifyResponse&)>& on_progress);

 private:
  template <typename Request, typename Response>
  using UnaryMethod = grpc::Status (v1::Admin::Stub::*)(grpc::ClientContext*, const Request&,
                                                        Response*);
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(UnaryMethod<Request, Response> method, const Request& request,
                                std::chrono::milliseconds timeout);

  const AdminClientOptions options_;
  const std::unique_ptr<v1::Admin::Stub> stub_;
};

}  // namespace kvtrie
