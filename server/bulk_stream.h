#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvtrie {

// The protocol of a two-way stream of bulk messages (bulk_message.h), without its transport.
//
// The transport hands in one message at a time, when wants_message() says so, and after each call
// and each change that it is told of asks what there is to send and whether the stream has ended.
//
// Thread-safe. Whoever holds the stream calls Cancel before letting go of it.
class BulkStream {
 public:
  virtual ~BulkStream() = default;

  // REQUIRES: wants_message(), and CloseInput was not called. Gives the bytes of its payload.
  // InvalidArgument: it is no such message.
  virtual absl::StatusOr<std::size_t> ReceiveMessage(const grpc::ByteBuffer& message) = 0;
  // The peer will send no more.
  virtual void CloseInput() = 0;
  // The transport broke.
  virtual void Cancel() = 0;

  // From time to time. True: something has changed.
  virtual bool Tick() { return false; }

  // The next message to send, and the bytes of its payload; nothing: there is none yet.
  virtual std::optional<std::size_t> TakeMessage(grpc::ByteBuffer* message) = 0;

  virtual bool wants_message() const = 0;
  // It is the peer's turn: without a message of theirs nothing goes on.
  virtual bool owes_progress() const = 0;
  // Nothing is under way: it may end when the server drains.
  virtual bool idle() const = 0;
  // The input was closed, and all has been answered and taken.
  virtual bool finished() const = 0;
  // Not OK: the peer broke the protocol; the stream ends with this.
  virtual absl::Status status() const = 0;
};

}  // namespace kvtrie
