#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "client/deadline.h"

namespace kvtrie {

// One streaming call whose messages are raw bytes. The thread that uses it polls the call's own
// completion queue, and so reads the socket itself: a message changes no thread on its way to the
// caller's memory.
//
// At most one Read and one Write are in flight. Not thread-safe. Destruction cancels what still
// runs.
class RawCall {
 public:
  enum class Op { kRead, kWrite, kFinish };
  struct Completion {
    Op op;
    bool ok;  // false: the stream has ended; Finish() has the reason
  };

  // Without `deadline` the call lives until it is destroyed or the server ends it. With
  // `wait_for_ready` it waits for a connection instead of failing when there is none.
  RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
          std::optional<Deadline> deadline, bool wait_for_ready);
  ~RawCall();

  RawCall(const RawCall&) = delete;
  RawCall& operator=(const RawCall&) = delete;

  // The first write opens the call, in one piece with its headers. `last` closes the sending side.
  void Write(const grpc::ByteBuffer& message, bool last);
  void Read();
  // What the last completed Read brought.
  const grpc::ByteBuffer& message() const { return message_; }
  void ForgetMessage() { message_.Clear(); }

  // The next completion, or nullopt at the deadline.
  std::optional<Completion> Next(Deadline deadline);

  // The call's status. Cancels it if the server has not ended it by the deadline.
  // REQUIRES: no Read in flight, or one that has failed.
  absl::Status Finish(Deadline deadline);

  void Cancel() { context_.TryCancel(); }

 private:
  static void* Tag(Op op) { return reinterpret_cast<void*>(static_cast<std::intptr_t>(op) + 1); }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer message_;
  grpc::Status status_;
  int ops_in_flight_ = 0;
  bool started_ = false;
};

}  // namespace kvtrie
