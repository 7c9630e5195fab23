#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvtrie {

// Where a server listens: "host:port", "[v6]:port" or "unix:path".
struct ListenAddress {
  std::string host;  // without brackets; empty for a Unix socket
  int port = 0;
  std::string unix_path;

  bool is_unix() const { return !unix_path.empty(); }
  // As gRPC takes it, with another port.
  std::string WithPort(int bound_port) const;
};

// InvalidArgument says what is wrong, with a hint for an IPv6 address without brackets.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

// True: all addresses that the host stands for are of this machine alone.
// InvalidArgument: the name does not resolve.
absl::StatusOr<bool> IsLoopback(const ListenAddress& address);

// Unavailable: another process listens there, which would not notice that its path is taken away.
absl::Status CheckUnixPathIsFree(const ListenAddress& address);

// "IPv4", "IPv6" or both: the families in which a connection to the address succeeds now.
std::vector<std::string> ReachableFamilies(const ListenAddress& address, int port);

}  // namespace kvtrie
