#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "client/client_options.h"
#include "kvtrie/v1/cache.grpc.pb.h"

namespace kvtrie {

// The connections of one client: per target one for small calls, so that they do not queue behind
// blocks, and several for bulk calls. Thread-safe.
class ChannelPool {
 public:
  explicit ChannelPool(const ClientOptions& options);

  // For small calls; `attempt` moves on to the next target.
  v1::Cache::Stub& Control(int attempt);
  // The next connection, going round.
  const std::shared_ptr<grpc::Channel>& Bulk();
  // A connection that the caller alone has, and may throw away.
  std::shared_ptr<grpc::Channel> NewConnection();

  const std::string& target(int attempt) const;

 private:
  std::shared_ptr<grpc::Channel> Connect(const std::string& target, int max_receive_bytes) const;

  const ClientOptions options_;
  std::vector<std::unique_ptr<v1::Cache::Stub>> control_;  // per target
  std::vector<std::shared_ptr<grpc::Channel>> bulk_;
  std::atomic<std::size_t> next_bulk_{0};
  std::atomic<std::size_t> next_target_{0};
};

}  // namespace kvtrie
