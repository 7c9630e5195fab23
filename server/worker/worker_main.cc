// kvtrie-worker: reads settings, chooses a device, starts a KvWorker, waits for SIGTERM or SIGINT,
// stops it.

#include <iostream>
#include <memory>
#include <span>

#include "gpu/backends.h"
#include "server/log.h"
#include "server/process_main.h"
#include "server/status_translation.h"
#include "server/worker/kv_worker.h"
#include "server/worker/worker_config.h"

// As those of kvtrie-server: freed blocks stay mapped for a minute (jemalloc(3), TUNING).
extern "C" {
extern const char* const malloc_conf;
const char* const malloc_conf = "lg_extent_max_active_fit:40,dirty_decay_ms:60000";
}

namespace kvtrie {
namespace {

// What ends last are threads that code; one whose device hangs never does.
constexpr std::chrono::milliseconds kEndTime{2'000};
// A fit that was cancelled sees it at once, unless it is in the middle of a large matrix.
constexpr std::chrono::milliseconds kFitEndTime{500};

absl::StatusOr<StartedProcess> Start(const WorkerConfig& config) {
  auto backend = gpu::MakeBackend(config.backend);
  if (!backend.ok()) return Within("--backend: ", backend.status());
  auto started = KvWorker::Start(config, *std::move(backend));
  if (!started.ok()) return started.status();
  std::shared_ptr<KvWorker> worker = *std::move(started);
  const WorkerAddresses& addresses = worker->addresses();
  return StartedProcess{.addresses = {{"listen", addresses.listen}, {"metrics", addresses.metrics}},
                        .stop =
                            [worker, &config]() mutable {
                              worker->Stop(config.drain_grace);
                              if (!worker->AwaitFit(kFitEndTime)) return false;
                              worker.reset();
                              return true;
                            },
                        .stop_time_max = config.drain_grace + kEndTime};
}

int Main(std::span<const char* const> arguments) {
  if (AnswerWithoutSettings(arguments, "kvtrie-worker", DescribeWorkerFlags)) return 0;
  const auto config = ReadWorkerConfig(arguments, Environment());
  if (!config.ok()) {
    std::cerr << "kvtrie-worker: " << config.status().message() << "\n";
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
