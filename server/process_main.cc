#include "server/process_main.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/log.h"

namespace kvtrie {
namespace {

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

absl::Status WriteReadyFile(const std::string& path,
                            const std::map<std::string, std::string>& addresses) {
  nlohmann::json ready = addresses;
  ready["pid"] = ::getpid();
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

}  // namespace

int RunUntilStopped(const ProcessSettings& process,
                    const std::function<absl::StatusOr<StartedProcess>()>& start) {
  for (const EffectiveSetting& setting : process.settings) {
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

  const auto server = start();
  if (!server.ok()) {
    spdlog::error("cannot start: {}", std::string(server.status().message()));
    ::_exit(server.status().code() == absl::StatusCode::kInvalidArgument ? kExitBadSettings
                                                                         : kExitCannotStart);
  }
  {
    // Before anybody can know of it.
    absl::MutexLock lock(&mutex);
    started = true;
  }
  if (!process.ready_file.empty()) {
    const absl::Status written = WriteReadyFile(process.ready_file, server->addresses);
    if (!written.ok()) {
      spdlog::error("{}", std::string(written.message()));
      return kExitCannotStart;
    }
  }
  {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&asked_to_stop));
  }
  if (!process.ready_file.empty()) ::unlink(process.ready_file.c_str());
  if (server->stop_time_max.count() > 0) {
    std::thread([time = server->stop_time_max] {
      std::this_thread::sleep_for(time);
      spdlog::error("something hangs: ended after {} ms", time.count());
      spdlog::shutdown();
      ::_exit(kExitDidNotEnd);
    }).detach();
  }
  if (!server->stop()) {
    spdlog::info("ended, with work that nobody wants");
    spdlog::shutdown();
    ::_exit(0);
  }
  spdlog::info("ended");
  return 0;
}

bool AnswerWithoutSettings(std::span<const char* const> arguments, const std::string& program,
                           const std::function<std::string()>& help) {
  for (const std::string argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::cout << help();
      return true;
    }
    if (argument == "--version") {
      std::cout << program << " " << KVTRIE_VERSION << "\n";
      return true;
    }
  }
  return false;
}

void PrintSettings(std::span<const EffectiveSetting> settings) {
  for (const EffectiveSetting& setting : settings) {
    std::cout << "--" << setting.name << "=" << setting.value << "  # " << setting.source << "\n";
  }
}

std::vector<std::string> Environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

void TurnDeadlockDetectionOff() {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

}  // namespace kvtrie
