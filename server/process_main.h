#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/flag_set.h"

// What the mains of servers share. Exit codes: 0 stopped as asked; 1 the process could not start;
// 2 the settings are wrong; 3 it was asked to stop and did not end in time, so that it was ended.
namespace kvtrie {

inline constexpr int kExitCannotStart = 1;
inline constexpr int kExitBadSettings = 2;
inline constexpr int kExitDidNotEnd = 3;

// A server as its main sees it.
struct StartedProcess {
  std::map<std::string, std::string> addresses;  // by name, for the ready file
  // Drains and ends. False: a thread is left whose work nobody wants any more; the process ends
  // without it.
  std::function<bool()> stop;
  // A process that keeps nothing is ended by then, whatever hangs; zero: one that may take as long
  // as it has to.
  std::chrono::milliseconds stop_time_max{0};
};

struct ProcessSettings {
  std::span<const EffectiveSetting> settings;  // are logged
  std::string ready_file;                      // empty: none
};

// Starts a server, says so in the ready file, waits for SIGTERM or SIGINT, stops it. Gives the exit
// code.
int RunUntilStopped(const ProcessSettings& process,
                    const std::function<absl::StatusOr<StartedProcess>()>& start);

// Answers --help and --version, which need no settings. False: neither was asked for.
bool AnswerWithoutSettings(std::span<const char* const> arguments, const std::string& program,
                           const std::function<std::string()>& help);

// For --check_config.
void PrintSettings(std::span<const EffectiveSetting> settings);

std::vector<std::string> Environment();

// Debian builds Abseil with its search for lock cycles on, which costs each lock; tests keep it.
void TurnDeadlockDetectionOff();

}  // namespace kvtrie
