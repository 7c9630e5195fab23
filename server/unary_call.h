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

// Ends a unary call and counts it. (DefaultReactor makes a new one with each call, so it is called
// once.)
inline void FinishUnary(grpc::ServerUnaryReactor* reactor, RpcProbe& probe,
                        const absl::Status& status) {
  probe.Finish(static_cast<int>(status.code()));
  reactor->Finish(ToGrpc(status));
}

// A call that is answered where it arrives.
inline grpc::ServerUnaryReactor* AnswerUnary(grpc::CallbackServerContext* call, RpcProbe& probe,
                                             const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  FinishUnary(reactor, probe, status);
  return reactor;
}

// Answers at once when `checked` is an error, and else with what `work` says on a thread of the
// engine.
inline grpc::ServerUnaryReactor* RunUnary(ServiceContext& context,
                                          grpc::CallbackServerContext* call, RpcMethod method,
                                          const absl::Status& checked,
                                          std::function<absl::Status()> work) {
  auto probe = std::make_shared<RpcProbe>(context.metrics, method);
  if (!checked.ok()) return AnswerUnary(call, *probe, checked);
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const bool queued = context.engine.RunBlocking([call, reactor, probe, work = std::move(work)] {
    // Nobody waits for the answer any more.
    FinishUnary(reactor, *probe, call->IsCancelled() ? absl::CancelledError("cancelled") : work());
  });
  if (!queued) FinishUnary(reactor, *probe, BusyError());
  return reactor;
}

}  // namespace kvtrie
