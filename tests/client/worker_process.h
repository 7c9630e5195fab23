#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/base/check.h"

namespace kvtrie {

// A kvtrie-worker of its own, on ports of loopback that it finds free. Ended by its pid.
class WorkerProcess {
 public:
  explicit WorkerProcess(std::string program, std::vector<std::string> flags = {})
      : program_(std::move(program)), flags_(std::move(flags)) {
    char name[] = "/tmp/kvtrie-worker-test-XXXXXX";
    KV_CHECK(mkdtemp(name) != nullptr);
    folder_ = name;
    Start();
  }
  ~WorkerProcess() {
    Kill();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // Returns when the worker serves. A second start listens where the first one did.
  void Start() {
    const std::string ready_file = folder_ + "/ready.json";
    std::filesystem::remove(ready_file);
    pid_ = fork();
    KV_CHECK(pid_ >= 0);
    if (pid_ == 0) {
      // No worker outlives its test.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      unsetenv("KVTRIE_SERVER");
      unsetenv("KVTRIE_ADMIN_SERVER");
      std::vector<std::string> arguments = {
          "kvtrie-worker", "--backend",    "cpu",      "--listen",    listen, "--http_listen",
          "127.0.0.1:0",   "--ready_file", ready_file, "--log_level", "warn"};
      arguments.insert(arguments.end(), flags_.begin(), flags_.end());
      std::vector<char*> pointers;
      for (std::string& argument : arguments) pointers.push_back(argument.data());
      pointers.push_back(nullptr);
      execv(program_.c_str(), pointers.data());
      _exit(127);
    }
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < give_up) {
      std::ifstream file(ready_file);
      const auto ready = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
      if (ready.is_object()) {
        listen = ready["listen"];
        metrics = ready["metrics"];
        return;
      }
      KV_CHECK(waitpid(pid_, nullptr, WNOHANG) == 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    KV_CHECK(false);
  }

  void Kill() { End(SIGKILL); }
  // Asks it to stop; gives its exit code.
  int Terminate() { return End(SIGTERM); }

  // Stops and continues the process: a worker that is there and does not answer.
  void Freeze() const {
    kill(pid_, SIGSTOP);
    KV_CHECK(waitpid(pid_, nullptr, WUNTRACED) == pid_);
  }
  void Thaw() const { kill(pid_, SIGCONT); }

  std::string listen = "127.0.0.1:0";
  std::string metrics;

 private:
  int End(int signal) {
    if (pid_ <= 0) return 0;
    kill(pid_, signal);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  const std::string program_;
  const std::vector<std::string> flags_;
  std::string folder_;
  pid_t pid_ = 0;
};

}  // namespace kvtrie
