#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "kvtrie/v1/admin.grpc.pb.h"
#include "server/server_config.h"
#include "server/service_context.h"

namespace kvtrie {

// What the Admin service asks of the server around it.
struct AdminHooks {
  // "serving", "draining", "read-only" and why.
  std::function<std::pair<std::string, std::vector<std::string>>()> state;
  // Health first, then the store. True: all that ran has finished.
  std::function<bool(std::chrono::milliseconds deadline)> drain;
};

// What an operator asks. On its own port, so that it can be kept from clients, and still answers
// when they fill the other one.
class AdminService final : public v1::Admin::CallbackService {
 public:
  AdminService(ServiceContext& context, const ServerConfig& config, AdminHooks hooks)
      : context_(context),
        config_(config),
        hooks_(std::move(hooks)),
        started_(std::chrono::steady_clock::now()) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* call,
                                      const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* call,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* ListNodes(grpc::CallbackServerContext* call,
                                      const v1::ListNodesRequest* request,
                                      v1::ListNodesResponse* response) override;
  grpc::ServerUnaryReactor* DescribeNode(grpc::CallbackServerContext* call,
                                         const v1::DescribeNodeRequest* request,
                                         v1::DescribeNodeResponse* response) override;
  grpc::ServerUnaryReactor* ListGroups(grpc::CallbackServerContext* call,
                                       const v1::ListGroupsRequest* request,
                                       v1::ListGroupsResponse* response) override;
  grpc::ServerUnaryReactor* DescribeGroup(grpc::CallbackServerContext* call,
                                          const v1::DescribeGroupRequest* request,
                                          v1::DescribeGroupResponse* response) override;
  grpc::ServerUnaryReactor* GetGroup(grpc::CallbackServerContext* call,
                                     const v1::GetGroupRequest* request,
                                     v1::GetGroupResponse* response) override;
  grpc::ServerUnaryReactor* GetUsage(grpc::CallbackServerContext* call,
                                     const v1::GetUsageRequest* request,
                                     v1::GetUsageResponse* response) override;
  grpc::ServerUnaryReactor* ListPins(grpc::CallbackServerContext* call,
                                     const v1::ListPinsRequest* request,
                                     v1::ListPinsResponse* response) override;
  grpc::ServerWriteReactor<v1::VerifyResponse>* Verify(grpc::CallbackServerContext* call,
                                                       const v1::VerifyRequest* request) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* call,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* GetConfig(grpc::CallbackServerContext* call,
                                      const v1::GetConfigRequest* request,
                                      v1::GetConfigResponse* response) override;

 private:
  ServiceContext& context_;
  const ServerConfig& config_;
  const AdminHooks hooks_;
  const std::chrono::steady_clock::time_point started_;
  std::atomic<bool> verifying_{false};
};

}  // namespace kvtrie
