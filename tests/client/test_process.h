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

// A program of ours as a process with a folder of its own. Ended by its pid.
class TestProcess {
 public:
  ~TestProcess() {
    Kill();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  TestProcess(const TestProcess&) = delete;
  TestProcess& operator=(const TestProcess&) = delete;

  void Kill() { End(SIGKILL); }
  // Asks it to stop; gives its exit code.
  int Terminate() { return End(SIGTERM); }

  // Stops and continues the process: one that is there and does not answer.
  void Freeze() const {
    kill(pid_, SIGSTOP);
    // Threads go on for a moment.
    KV_CHECK(waitpid(pid_, nullptr, WUNTRACED) == pid_);
  }
  void Thaw() const { kill(pid_, SIGCONT); }

  const std::string& folder() const { return folder_; }

 protected:
  explicit TestProcess(std::string program) : program_(std::move(program)) {
    char name[] = "/tmp/kvtrie-client-test-XXXXXX";
    KV_CHECK(mkdtemp(name) != nullptr);
    folder_ = name;
  }

  // Returns when it serves; gives what it says of itself then.
  nlohmann::json Launch(const std::vector<std::string>& flags) {
    const std::string ready_file = folder_ + "/ready.json";
    std::filesystem::remove(ready_file);
    pid_ = fork();
    KV_CHECK(pid_ >= 0);
    if (pid_ == 0) {
      // None outlives its test.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Meant for the CLI.
      unsetenv("KVTRIE_SERVER");
      unsetenv("KVTRIE_ADMIN_SERVER");
      std::vector<std::string> arguments = {program_,       "--http_listen", "127.0.0.1:0",
                                            "--ready_file", ready_file,      "--log_level",
                                            "warn"};
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      std::vector<char*> pointers;
      for (std::string& argument : arguments) pointers.push_back(argument.data());
      pointers.push_back(nullptr);
      execv(program_.c_str(), pointers.data());
      _exit(127);
    }
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < give_up) {
      std::ifstream file(ready_file);
      auto ready = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
      if (ready.is_object()) return ready;
      KV_CHECK(waitpid(pid_, nullptr, WNOHANG) == 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    KV_CHECK(false);
  }

  pid_t pid() const { return pid_; }

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
  std::string folder_;
  pid_t pid_ = 0;
};

}  // namespace kvtrie
