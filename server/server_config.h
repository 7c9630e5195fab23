#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/worker_options.h"
#include "server/flag_set.h"
#include "server/listen_address.h"
#include "server/request_checks.h"
#include "storage/engine/engine_options.h"

namespace kvtrie {

// Everything that can be set, read once and never changed. Flags map to it one to one; their help
// says what each is for.
struct ServerConfig {
  // What the server does.
  EngineOptions engine;
  ListenAddress listen;
  ListenAddress admin_listen;
  ListenAddress http_listen;
  std::string local_socket;  // empty: no shared-memory lane
  bool allow_remote = false;
  WorkerOptions workers;   // no targets: none
  std::string ready_file;  // empty: none
  bool check_config = false;
  std::string log_level = "info";
  bool log_json = false;

  // Limits, and how fast it does it.
  RequestLimits request_limits;
  std::chrono::milliseconds stream_stall_limit{30'000};
  std::chrono::milliseconds drain_grace{20'000};
  std::chrono::milliseconds connection_age_max{0};  // 0: for ever
  std::chrono::milliseconds stuck_limit{30'000};
  std::size_t streams_per_connection_max = 256;
  std::size_t streams_max = 1024;
  std::size_t stream_memory_bytes = std::size_t{256} << 20;
  std::size_t read_ahead_bytes = std::size_t{4} << 20;
  std::size_t grpc_memory_bytes = std::size_t{512} << 20;
  std::size_t message_bytes_max = std::size_t{8} << 20;
  std::size_t lane_connections_max = 64;
  std::size_t lane_region_bytes_max = std::size_t{4} << 30;

  std::vector<EffectiveSetting> settings;
};

// Reads arguments (without the program's name), the flag file that they name, and the environment.
// InvalidArgument says where the fault stands (file and line, or command line), which setting it
// is, and what would be right.
absl::StatusOr<ServerConfig> ReadServerConfig(std::span<const char* const> arguments,
                                              std::span<const std::string> environment);

// All settings with type, default and help, for --help.
std::string DescribeFlags();

}  // namespace kvtrie
