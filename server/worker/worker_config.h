#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/connection_limits.h"
#include "server/flag_set.h"
#include "server/listen_address.h"
#include "server/worker/codec_checks.h"
#include "server/worker/codec_queue.h"

namespace kvtrie {

// Everything that can be set of a worker, read once and never changed. Flags map to it one to one;
// their help says what each is for.
struct WorkerConfig {
  ListenAddress listen;
  ListenAddress http_listen;
  bool allow_remote = false;
  std::string backend = "auto";
  std::string ready_file;  // empty: none
  bool check_config = false;
  std::string log_level = "info";
  bool log_json = false;

  CodecQueueOptions queue;  // batch_tokens of 0: as the backend wants it
  CodecLimits limits;
  std::size_t memory_bytes = std::size_t{1} << 30;
  std::size_t codec_memory_bytes = std::size_t{1} << 30;
  std::size_t profile_memory_bytes = std::size_t{256} << 20;
  std::size_t grpc_memory_bytes = std::size_t{512} << 20;
  ConnectionLimits connections;
  std::size_t streams_max = 1024;
  std::chrono::milliseconds stream_stall_limit{30'000};
  std::chrono::milliseconds stuck_limit{30'000};
  std::chrono::milliseconds drain_grace{20'000};

  std::vector<EffectiveSetting> settings;
};

// InvalidArgument: as FlagSet::Read and SettingChecks say it.
absl::StatusOr<WorkerConfig> ReadWorkerConfig(std::span<const char* const> arguments,
                                              std::span<const std::string> environment);

// All settings with type, default and help, for --help.
std::string DescribeWorkerFlags();

}  // namespace kvtrie
