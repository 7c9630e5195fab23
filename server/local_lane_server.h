#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/service_context.h"

namespace kvtrie {

struct LocalLaneOptions {
  std::string socket_path;
  std::size_t connections_max = 64;
  std::size_t region_bytes_max = std::size_t{4} << 30;
  std::chrono::milliseconds token_life{10'000};
  // A peer that sends half a message, or does not read its answer, is let go after this.
  std::chrono::milliseconds stall_limit{30'000};
};

// The shared-memory lane for clients on the same host (proto/kvtrie/v1/local_lane.proto): blocks
// are copied once, between the memory tier and a region that the client gave, and never pass a
// socket.
//
// One thread per connection, from the request to the answer, so that nothing is handed between
// threads on the way. The server maps the client's memory, never the other way round; the client
// may change it at any time, so nothing is decided by it after it was read once.
//
// The socket is reachable for this user only, and a connection must present a token of
// Cache.OpenLocalLane. Thread-safe.
class LocalLaneServer {
 public:
  // Unavailable: the path cannot be bound.
  static absl::StatusOr<std::unique_ptr<LocalLaneServer>> Listen(ServiceContext& context,
                                                                 LocalLaneOptions options);
  // Ends all connections and removes the socket.
  ~LocalLaneServer();

  LocalLaneServer(const LocalLaneServer&) = delete;
  LocalLaneServer& operator=(const LocalLaneServer&) = delete;

  struct Invitation {
    std::string token;  // valid once
    std::chrono::milliseconds life;
  };
  Invitation Invite();

  const std::string& socket_path() const { return options_.socket_path; }
  std::size_t connection_count() const;

 private:
  class Connection;
  static constexpr std::size_t kInvitationsMax = 1024;

  LocalLaneServer(ServiceContext& context, LocalLaneOptions options, int listener);
  void Accept();
  bool Redeem(const std::string& token);
  void ReapEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServiceContext& context_;
  const LocalLaneOptions options_;
  const int listener_;
  std::atomic<bool> stopping_{false};
  std::thread accept_thread_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Clock::Duration> invitations_ ABSL_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
