#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/base/check.h"

namespace kvtrie {

// A kvtrie-server of its own over a data folder of its own, on ports of loopback that it finds
// free. Ended by its pid.
class ServerProcess {
 public:
  // `flags` beside those that every test wants.
  explicit ServerProcess(std::vector<std::string> flags = {}) : flags_(std::move(flags)) {
    char name[] = "/tmp/kvtrie-client-test-XXXXXX";
    KV_CHECK(mkdtemp(name) != nullptr);
    folder_ = name;
    Start();
  }
  ~ServerProcess() {
    Kill();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // Returns when the server serves. A second start listens where the first one did.
  void Start() {
    const std::string ready_file = folder_ + "/ready.json";
    std::filesystem::remove(ready_file);
    pid_ = fork();
    KV_CHECK(pid_ >= 0);
    if (pid_ == 0) {
      // No server outlives its test.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Meant for the CLI.
      unsetenv("KVTRIE_SERVER");
      unsetenv("KVTRIE_ADMIN_SERVER");
      const std::string data = folder_ + "/store";
      std::vector<std::string> arguments = {
          "kvtrie-server", "--data_dir",         data,       "--listen",
          listen,          "--admin_listen",     admin,      "--http_listen",
          "127.0.0.1:0",   "--ready_file",       ready_file, "--log_level",
          "warn",          "--noprefault_memory"};
      arguments.insert(arguments.end(), flags_.begin(), flags_.end());
      std::vector<char*> pointers;
      for (std::string& argument : arguments) pointers.push_back(argument.data());
      pointers.push_back(nullptr);
      execv(KVTRIE_SERVER_PROGRAM, pointers.data());
      _exit(127);
    }
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < give_up) {
      std::ifstream file(ready_file);
      const auto ready = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
      if (ready.is_object()) {
        listen = ready["listen"];
        admin = ready["admin"];
        return;
      }
      KV_CHECK(waitpid(pid_, nullptr, WNOHANG) == 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    KV_CHECK(false);
  }

  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

  // Stops and continues the process: a server that is there and does not answer.
  void Freeze() const {
    kill(pid_, SIGSTOP);
    // Threads go on for a moment.
    KV_CHECK(waitpid(pid_, nullptr, WUNTRACED) == pid_);
  }
  void Thaw() const { kill(pid_, SIGCONT); }

  std::uint64_t resident_bytes() const {
    std::uint64_t size_pages = 0;
    std::uint64_t resident_pages = 0;
    std::ifstream(ProcPath("statm")) >> size_pages >> resident_pages;
    return resident_pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  }
  std::size_t open_file_count() const {
    const auto files = std::filesystem::directory_iterator(ProcPath("fd"));
    return static_cast<std::size_t>(std::distance(begin(files), end(files)));
  }

  const std::string& folder() const { return folder_; }  // the store is in "store"

  std::string listen = "127.0.0.1:0";
  std::string admin = "127.0.0.1:0";

 private:
  const std::vector<std::string> flags_;
  std::string ProcPath(const char* name) const {
    return "/proc/" + std::to_string(pid_) + "/" + name;
  }

  std::string folder_;
  pid_t pid_ = 0;
};

}  // namespace kvtrie
