#include "server/listen_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kvtrie {
namespace {

struct FreeAddressInfo {
  void operator()(addrinfo* info) const { ::freeaddrinfo(info); }
};
using AddressInfo = std::unique_ptr<addrinfo, FreeAddressInfo>;

AddressInfo Resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return nullptr;
  }
  return AddressInfo(found);
}

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) != 0;
}

bool CanConnect(const addrinfo& address) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool connected = ::connect(fd, address.ai_addr, address.ai_addrlen) == 0;
  ::close(fd);
  return connected;
}

}  // namespace

std::string ListenAddress::WithPort(int bound_port) const {
  if (is_unix()) return absl::StrCat("unix:", unix_path);
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", bound_port)
                                      : absl::StrCat(host, ":", bound_port);
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  ListenAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    if (rest.empty()) return absl::InvalidArgumentError("unix: needs a path");
    address.unix_path = std::string(rest);
    return address;
  }

  absl::string_view port;
  if (absl::ConsumePrefix(&rest, "[")) {
    const std::size_t bracket = rest.find("]:");
    if (bracket == absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat("\"", text, "\": write [IPv6 address]:port"));
    }
    address.host = std::string(rest.substr(0, bracket));
    port = rest.substr(bracket + 2);
    in6_addr ignored;
    const std::string literal = address.host.substr(0, address.host.find('%'));
    if (::inet_pton(AF_INET6, literal.c_str(), &ignored) != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", text, "\": no IPv6 address between the brackets"));
    }
  } else {
    const std::size_t colon = rest.rfind(':');
    if (colon == absl::string_view::npos || colon == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", text, "\": write host:port, [IPv6 address]:port or unix:path"));
    }
    address.host = std::string(rest.substr(0, colon));
    port = rest.substr(colon + 1);
    if (absl::StrContains(address.host, ':')) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", text, "\": an IPv6 address needs brackets; did you mean [",
                       address.host, "]:", port, "?"));
    }
  }
  if (!absl::SimpleAtoi(port, &address.port) || address.port < 0 || address.port > 65'535) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\": \"", port, "\" is not a port; 0 (any) to 65535"));
  }
  return address;
}

absl::StatusOr<bool> IsLoopback(const ListenAddress& address) {
  if (address.is_unix()) return true;
  const AddressInfo found = Resolve(address.host, address.port);
  if (found == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address.host, "\" does not resolve"));
  }
  for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
    if (!IsLoopback(*a->ai_addr)) return false;
  }
  return true;
}

absl::Status CheckUnixPathIsFree(const ListenAddress& address) {
  if (!address.is_unix()) return absl::OkStatus();
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  if (address.unix_path.size() >= sizeof path.sun_path) return absl::OkStatus();  // binding tells
  std::copy(address.unix_path.begin(), address.unix_path.end(), path.sun_path);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return absl::OkStatus();
  const bool is_taken =
      ::connect(socket, reinterpret_cast<const sockaddr*>(&path), sizeof path) == 0;
  ::close(socket);
  if (!is_taken) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      address.WithPort(0), " is in use: another process listens there; stop it first"));
}

std::vector<std::string> ReachableFamilies(const ListenAddress& address, int port) {
  if (address.is_unix()) return {"Unix"};
  // A wildcard listens in both families where the machine has both.
  const bool wildcard = address.host == "::" || address.host == "0.0.0.0";
  const std::vector<std::string> hosts =
      wildcard ? std::vector<std::string>{"127.0.0.1", "::1"} : std::vector{address.host};
  std::vector<std::string> families;
  for (const std::string& host : hosts) {
    const AddressInfo found = Resolve(host, port);
    for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
      const std::string family = a->ai_family == AF_INET6 ? "IPv6" : "IPv4";
      if (std::find(families.begin(), families.end(), family) == families.end() && CanConnect(*a)) {
        families.push_back(family);
      }
    }
  }
  return families;
}

}  // namespace kvtrie
