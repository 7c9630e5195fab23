// kvtrie-server: reads settings, starts a KvServer, waits for SIGTERM or SIGINT, stops it.
//
// Exit codes: 0 stopped as asked; 1 the server could not start; 2 the settings are wrong.

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/kv_server.h"
#include "server/log.h"
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

constexpr int kExitCannotStart = 1;
constexpr int kExitBadSettings = 2;

std::vector<std::string> Environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

// Each connection and each segment file takes a descriptor. A core dump would hold the KV of users.
void SetProcessLimits() {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &files) != 0) spdlog::warn("cannot raise RLIMIT_NOFILE");
  }
  const rlimit no_core{0, 0};
  if (::setrlimit(RLIMIT_CORE, &no_core) != 0) spdlog::warn("cannot turn core dumps off");
}

absl::Status WriteReadyFile(const std::string& path, const BoundAddresses& addresses) {
  const nlohmann::json ready = {{"listen", addresses.listen},
                                {"admin", addresses.admin},
                                {"metrics", addresses.metrics},
                                {"local_socket", addresses.local_socket},
                                {"pid", ::getpid()}};
  // Whoever waits for the file must not see half of it.
  const std::string temporary = absl::StrCat(path, ".", ::getpid(), ".tmp");
  std::ofstream file(temporary, std::ios::trunc);
  file << ready.dump() << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("--ready_file: cannot write ", path));
  }
  return absl::OkStatus();
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

int Serve(const ServerConfig& config) {
  for (const EffectiveSetting& setting : config.settings) {
    if (setting.source != "default") {
      spdlog::info("setting --{}={} ({})", setting.name, setting.value, setting.source);
    } else {
      spdlog::debug("setting --{}={} (default)", setting.name, setting.value);
    }
  }
  SetProcessLimits();

  // All threads inherit the mask, so that only the one below sees the signals.
  const sigset_t stop_signals = StopSignals();
  ::pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  absl::Mutex mutex;
  bool started = false;
  bool asked_to_stop = false;
  std::thread([&, stop_signals] {
    int signal = 0;
    ::sigwait(&stop_signals, &signal);
    absl::MutexLock lock(&mutex);
    if (!started) {
      // Recovery cannot be interrupted, and need not be: the store survives the end of the process
      // at any point.
      spdlog::info("asked to stop while starting");
      spdlog::shutdown();
      ::_exit(0);
    }
    asked_to_stop = true;
  }).detach();

  auto server = KvServer::Start(config);
  if (!server.ok()) {
    spdlog::error("cannot start: {}", std::string(server.status().message()));
    ::_exit(server.status().code() == absl::StatusCode::kInvalidArgument ? kExitBadSettings
                                                                         : kExitCannotStart);
  }
  if (!config.ready_file.empty()) {
    const absl::Status written = WriteReadyFile(config.ready_file, (*server)->addresses());
    if (!written.ok()) {
      spdlog::error("{}", std::string(written.message()));
      return kExitCannotStart;
    }
  }
  {
    absl::MutexLock lock(&mutex);
    started = true;
    mutex.Await(absl::Condition(&asked_to_stop));
  }
  if (!config.ready_file.empty()) ::unlink(config.ready_file.c_str());
  (*server)->Stop(config.drain_grace);
  server->reset();
  spdlog::info("ended");
  return 0;
}

// Debian builds Abseil with its search for lock cycles on, which costs each lock; tests keep it.
void TurnDeadlockDetectionOff() {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

int Main(std::span<const char* const> arguments) {
  for (const std::string argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::cout << DescribeFlags();
      return 0;
    }
    if (argument == "--version") {
      std::cout << "kvtrie-server " << KVTRIE_VERSION << "\n";
      return 0;
    }
  }
  const auto config = ReadServerConfig(arguments, Environment());
  if (!config.ok()) {
    std::cerr << "kvtrie-server: " << config.status().message() << "\n";
    return kExitBadSettings;
  }
  if (config->check_config) {
    for (const EffectiveSetting& setting : config->settings) {
      std::cout << "--" << setting.name << "=" << setting.value << "  # " << setting.source << "\n";
    }
    return 0;
  }
  TurnDeadlockDetectionOff();
  StartLogging(config->log_level, config->log_json);
  return Serve(*config);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  return kvtrie::Main({argv + 1, static_cast<std::size_t>(argc > 0 ? argc - 1 : 0)});
}
