#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "server/rpc_metrics.h"
#include "server/service_context.h"
#include "server/status_translation.h"

namespace kvtrie {

// Ends a unary call and counts it.
inline grpc::ServerUnaryReactor* FinishUnary(grpc::CallbackServerContext* call, RpcProbe& probe,
                                             const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  probe.Finish(static_cast<int>(status.code()));
  reactor->Finish(ToGrpc(status));
  return reactor;
}

// Answers at once when `checked` is an error, and else with what `work` says on a thread of the
// engine.
inline grpc::ServerUnaryReactor* RunUnary(ServiceContext& context,
                                          grpc::CallbackServerContext* call, RpcMethod method,
                                          const absl::Status& checked,
                                          std::function<absl::Status()> work) {
  auto probe = std::make_shared<RpcProbe>(context.metrics, method);
  if (!checked.ok()) return FinishUnary(call, *probe, checked);
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const bool queued = context.engine.RunBlocking([call, probe, work = std::move(work)] {
    // Nobody waits for the answer any more.
    const absl::Status status = call->IsCancelled() ? absl::CancelledError("cancelled") : work();
    FinishUnary(call, *probe, status);
  });
  if (!queued) FinishUnary(call, *probe, BusyError());
  return reactor;
}

}  // namespace kvtrie
