#include "client/lane_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "storage/base/byte_order.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace kvtrie {
namespace {

constexpr std::size_t kReceiveBytes = std::size_t{64} << 10;

}  // namespace

absl::StatusOr<std::unique_ptr<LaneSocket>> LaneSocket::Connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError("lane: the socket's path is too long");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::ErrnoToStatus(errno, "lane: socket");
  auto socket = std::make_unique<LaneSocket>(fd);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return absl::UnavailableError(std::string("lane: connect: ") + std::strerror(errno));
  }
  return socket;
}

LaneSocket::~LaneSocket() { close(fd_); }

absl::Status LaneSocket::Send(const google::protobuf::MessageLite& message, int fd_to_pass,
                              Deadline deadline) {
  const std::size_t bytes = message.ByteSizeLong();
  if (bytes > kLaneMessageBytesMax) {
    return absl::InvalidArgumentError("lane: the request is too large for one message");
  }
  buffer_.resize(sizeof(std::uint32_t) + bytes);
  StoreLittle(buffer_.data(), static_cast<std::uint32_t>(bytes));
  KV_CHECK(
      message.SerializeToArray(buffer_.data() + sizeof(std::uint32_t), static_cast<int>(bytes)));

  std::size_t sent = 0;
  while (sent < buffer_.size()) {
    iovec vector{buffer_.data() + sent, buffer_.size() - sent};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd_to_pass >= 0 && sent == 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &fd_to_pass, sizeof(int));
    }
    const ssize_t count = sendmsg(fd_, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      KV_RETURN_IF_ERROR(Wait(POLLOUT, deadline));
    } else if (errno != EINTR) {
      return absl::UnavailableError(std::string("lane: send: ") + std::strerror(errno));
    }
  }
  return absl::OkStatus();
}

absl::Status LaneSocket::Receive(google::protobuf::MessageLite* message, Deadline deadline) {
  // One answer is on its way at a time, so that whatever arrives belongs to it.
  std::size_t received = 0;
  std::size_t wanted = sizeof(std::uint32_t);
  buffer_.resize(std::max(buffer_.size(), kReceiveBytes));
  while (received < wanted) {
    KV_RETURN_IF_ERROR(Wait(POLLIN, deadline));
    const ssize_t got =
        recv(fd_, buffer_.data() + received, buffer_.size() - received, MSG_DONTWAIT);
    if (got > 0) {
      received += static_cast<std::size_t>(got);
    } else if (got == 0) {
      return absl::UnavailableError("lane: the server closed the connection");
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      return absl::UnavailableError(std::string("lane: receive: ") + std::strerror(errno));
    }
    if (received < sizeof(std::uint32_t)) continue;
    const auto bytes = LoadLittle<std::uint32_t>(buffer_.data());
    if (bytes > kLaneMessageBytesMax) return absl::DataLossError("lane: a message over the limit");
    wanted = sizeof(std::uint32_t) + bytes;
    if (buffer_.size() < wanted) buffer_.resize(wanted);
  }
  if (received > wanted) return absl::DataLossError("lane: more than one answer to a request");
  if (!message->ParseFromArray(buffer_.data() + sizeof(std::uint32_t),
                               static_cast<int>(wanted - sizeof(std::uint32_t)))) {
    return absl::DataLossError("lane: a message that does not parse");
  }
  return absl::OkStatus();
}

bool LaneSocket::StillOpen() const {
  pollfd entry{fd_, POLLIN, 0};
  return poll(&entry, 1, 0) == 0;
}

absl::Status LaneSocket::Wait(short events, Deadline deadline) {
  while (true) {
    pollfd entry{fd_, events, 0};
    const int ready = poll(&entry, 1, deadline.remaining_ms());
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return absl::DeadlineExceededError("lane: no answer in time");
    if (errno != EINTR)
      return absl::InternalError(std::string("lane: poll: ") + std::strerror(errno));
  }
}

}  // namespace kvtrie
