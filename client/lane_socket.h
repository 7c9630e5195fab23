#pragma once

#include <google/protobuf/message_lite.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/deadline.h"

namespace kvtrie {

// Upper bound of a message on the socket of the shared-memory lane.
inline constexpr std::size_t kLaneMessageBytesMax = std::size_t{8} << 20;

// The client's end of the lane's Unix socket: messages of a u32le length and protobuf. Not
// thread-safe. Errors: Unavailable when the peer is gone, DeadlineExceeded, DataLoss for what is
// not a message. After any of them the socket is of no more use.
class LaneSocket {
 public:
  static absl::StatusOr<std::unique_ptr<LaneSocket>> Connect(const std::string& path);
  // Takes ownership of a connected stream socket.
  explicit LaneSocket(int fd) : fd_(fd) {}
  ~LaneSocket();

  LaneSocket(const LaneSocket&) = delete;
  LaneSocket& operator=(const LaneSocket&) = delete;

  // With `fd_to_pass` >= 0, its descriptor goes along.
  absl::Status Send(const google::protobuf::MessageLite& message, int fd_to_pass,
                    Deadline deadline);
  // False when the peer has gone, or has sent what nobody asked for. REQUIRES: no answer is due.
  bool StillOpen() const;
  absl::Status Receive(google::protobuf::MessageLite* message, Deadline deadline);

 private:
  absl::Status Wait(short events, Deadline deadline);

  const int fd_;
  std::string buffer_;
};

}  // namespace kvtrie
