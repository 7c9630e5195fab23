// kvtrie-server: reads settings, starts a KvServer, waits for SIGTERM or SIGINT, stops it.

#include <iostream>
#include <memory>
#include <span>

#include "server/kv_server.h"
#include "server/log.h"
#include "server/process_main.h"
#include "server/server_config.h"

// jemalloc's settings (jemalloc(3), TUNING). A block takes memory from any free extent, however
// large, or else prefaulted memory would lie idle beside fresh pages; and freed buffers stay mapped
// for a minute, since a put that faults its pages in costs half as much again.
extern "C" {
extern const char* const malloc_conf;
const char* const malloc_conf = "lg_extent_max_active_fit:40,dirty_decay_ms:60000";
}

namespace kvtrie {
namespace {

absl::StatusOr<StartedProcess> Start(const ServerConfig& config) {
  auto started = KvServer::Start(config);
  if (!started.ok()) return started.status();
  std::shared_ptr<KvServer> server = *std::move(started);
  const BoundAddresses& addresses = server->addresses();
  return StartedProcess{.addresses = {{"listen", addresses.listen},
                                      {"admin", addresses.admin},
                                      {"metrics", addresses.metrics},
                                      {"local_socket", addresses.local_socket}},
                        .stop = [server, &config]() mutable {
                          server->Stop(config.drain_grace);
                          server.reset();
                          return true;
                        }};
}

int Main(std::span<const char* const> arguments) {
  if (AnswerWithoutSettings(arguments, "kvtrie-server", DescribeFlags)) return 0;
  const auto config = ReadServerConfig(arguments, Environment());
  if (!config.ok()) {
    std::cerr << "kvtrie-server: " << config.status().message() << "\n";
    return kExitBadSettings;
  }
  if (config->check_config) {
    PrintSettings(config->settings);
    return 0;
  }
  TurnDeadlockDetectionOff();
  StartLogging(config->log_level, config->log_json);
  return RunUntilStopped({.settings = config->settings, .ready_file = config->ready_file},
                         [&config] { return Start(*config); });
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  return kvtrie::Main({argv + 1, static_cast<std::size_t>(argc > 0 ? argc - 1 : 0)});
}
