#pragma once

#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstddef>

namespace kvtrie {

// What a gRPC server lets its peers do; each of gRPC's own defaults has bitten somebody.
struct ConnectionLimits {
  std::size_t message_bytes_max = std::size_t{8} << 20;
  std::size_t streams_per_connection_max = 256;
  std::chrono::milliseconds connection_age_max{0};  // 0: for ever
};

void SetConnectionLimits(const ConnectionLimits& limits, grpc::ServerBuilder* builder);

}  // namespace kvtrie
