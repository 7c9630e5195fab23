#include "server/http_endpoint.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/text_serializer.h"
#include "storage/base/check.h"

namespace kvtrie {
namespace {

constexpr std::size_t kConnectionsMax = 64;
constexpr std::size_t kHeadBytesMax = 8192;
constexpr std::chrono::seconds kConnectionTimeMax{5};
constexpr int kPollMilliseconds = 1000;

std::string Answer(int code, absl::string_view code_text, absl::string_view content_type,
                   const std::string& body, bool with_body) {
  return absl::StrCat("HTTP/1.1 ", code, " ", code_text, "\r\nContent-Type: ", content_type,
                      "\r\nContent-Length: ", body.size(),
                      "\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
                      with_body ? body : std::string());
}

int BoundPort(int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  return address.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// A listening socket, or -1.
int ListenOn(const addrinfo& address) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1;
  const int off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // [::] stands for both families.
  if (address.ai_family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(fd, address.ai_addr, address.ai_addrlen) == 0 && ::listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  ::close(fd);
  return -1;
}

// All that the address stands for; with port 0 only the first, since others would get other ports.
std::vector<int> ListenOnAll(const ListenAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  std::vector<int> listeners;
  if (::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) !=
      0) {
    return listeners;
  }
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    if (address.port == 0 && !listeners.empty()) break;
    if (const int fd = ListenOn(*a); fd >= 0) listeners.push_back(fd);
  }
  ::freeaddrinfo(found);
  return listeners;
}

}  // namespace

std::string AnswerHttp(std::string_view request_head, const HttpHandlers& handlers) {
  const std::string_view line = request_head.substr(0, request_head.find("\r\n"));
  const std::size_t method_end = line.find(' ');
  const std::size_t target_end =
      method_end == std::string_view::npos ? method_end : line.find(' ', method_end + 1);
  if (target_end == std::string_view::npos) {
    return Answer(400, "Bad Request", "text/plain", "not HTTP\n", true);
  }
  const std::string_view method = line.substr(0, method_end);
  std::string_view path = line.substr(method_end + 1, target_end - method_end - 1);
  path = path.substr(0, path.find('?'));
  const bool with_body = method != "HEAD";
  if (method != "GET" && method != "HEAD") {
    return Answer(405, "Method Not Allowed", "text/plain", "GET only\n", true);
  }
  if (path == "/metrics") {
    return Answer(200, "OK", "text/plain; version=0.0.4; charset=utf-8",
                  prometheus::TextSerializer().Serialize(handlers.metrics()), with_body);
  }
  if (path == "/livez" || path == "/readyz") {
    const ProbeAnswer probe = path == "/livez" ? handlers.live() : handlers.ready();
    return probe.ok
               ? Answer(200, "OK", "text/plain", probe.text + "\n", with_body)
               : Answer(503, "Service Unavailable", "text/plain", probe.text + "\n", with_body);
  }
  return Answer(404, "Not Found", "text/plain", "/metrics, /livez, /readyz\n", with_body);
}

struct HttpEndpoint::Connection {
  int fd;
  std::chrono::steady_clock::time_point end;
  std::string head;
  std::string answer;  // empty: the head is not complete
  std::size_t sent_bytes = 0;
};

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(const ListenAddress& address,
                                                                  HttpHandlers handlers) {
  std::vector<int> listeners = ListenOnAll(address);
  if (listeners.empty()) {
    return absl::UnavailableError(absl::StrCat("--http_listen: cannot listen on ",
                                               address.WithPort(address.port), ": ",
                                               std::strerror(errno)));
  }
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  KV_CHECK(wake_fd >= 0);
  const int port = BoundPort(listeners.front());
  return std::unique_ptr<HttpEndpoint>(
      new HttpEndpoint(std::move(listeners), wake_fd, port, std::move(handlers)));
}

HttpEndpoint::HttpEndpoint(std::vector<int> listeners, int wake_fd, int port, HttpHandlers handlers)
    : listeners_(std::move(listeners)),
      wake_fd_(wake_fd),
      port_(port),
      handlers_(std::move(handlers)),
      thread_([this] { Run(); }) {}

HttpEndpoint::~HttpEndpoint() {
  stopping_ = true;
  const std::uint64_t one = 1;
  // A failure costs one period of poll.
  [[maybe_unused]] const ssize_t woken = ::write(wake_fd_, &one, sizeof one);
  thread_.join();
  for (const Connection& connection : connections_) ::close(connection.fd);
  for (const int listener : listeners_) ::close(listener);
  ::close(wake_fd_);
}

void HttpEndpoint::Run() {
  while (!stopping_) {
    std::vector<pollfd> polled = {{wake_fd_, POLLIN, 0}};
    for (const int listener : listeners_) polled.push_back({listener, POLLIN, 0});
    for (const Connection& connection : connections_) {
      const int events = connection.answer.empty() ? POLLIN : POLLOUT;
      polled.push_back({connection.fd, static_cast<short>(events), 0});
    }
    ::poll(polled.data(), polled.size(), kPollMilliseconds);

    const auto now = std::chrono::steady_clock::now();
    std::size_t at = 1 + listeners_.size();
    for (auto connection = connections_.begin(); connection != connections_.end(); ++at) {
      const bool alive = connection->end > now && (polled[at].revents == 0 || Advance(*connection));
      if (!alive) ::close(connection->fd);
      connection = alive ? std::next(connection) : connections_.erase(connection);
    }
    for (std::size_t i = 0; i < listeners_.size(); ++i) {
      if ((polled[1 + i].revents & POLLIN) != 0) Accept(listeners_[i]);
    }
  }
}

// Takes one connection. The oldest makes way for it where there are too many: a probe must not wait
// for peers that say nothing.
void HttpEndpoint::Accept(int listener) {
  const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return;
  if (connections_.size() == kConnectionsMax) {
    ::close(connections_.front().fd);
    connections_.pop_front();
  }
  connections_.push_back({.fd = fd,
                          .end = std::chrono::steady_clock::now() + kConnectionTimeMax,
                          .head = {},
                          .answer = {}});
}

bool HttpEndpoint::Advance(Connection& connection) {
  if (connection.answer.empty()) {
    char buffer[4096];
    const ssize_t count = ::recv(connection.fd, buffer, sizeof buffer, 0);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    if (count == 0) return false;
    connection.head.append(buffer, static_cast<std::size_t>(count));
    if (connection.head.size() > kHeadBytesMax) return false;
    if (connection.head.find("\r\n\r\n") == std::string::npos) return true;
    connection.answer = AnswerHttp(connection.head, handlers_);
  }
  const ssize_t count = ::send(connection.fd, connection.answer.data() + connection.sent_bytes,
                               connection.answer.size() - connection.sent_bytes, MSG_NOSIGNAL);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  connection.sent_bytes += static_cast<std::size_t>(count);
  return connection.sent_bytes < connection.answer.size();
}

}  // namespace kvtrie
