#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/test_process.h"

namespace kvtrie {

// A kvtrie-server of its own over a data folder of its own, "store" in its folder, on ports of
// loopback that it finds free.
class ServerProcess : public TestProcess {
 public:
  // `flags` beside those that every test wants.
  explicit ServerProcess(std::vector<std::string> flags = {})
      : TestProcess(KVTRIE_SERVER_PROGRAM), flags_(std::move(flags)) {
    Start();
  }

  // Returns when the server serves. A second start listens where the first one did.
  void Start() {
    std::vector<std::string> flags = {
        "--data_dir", folder() + "/store",  "--listen", listen, "--admin_listen",
        admin,        "--noprefault_memory"};
    flags.insert(flags.end(), flags_.begin(), flags_.end());
    const auto ready = Launch(flags);
    listen = ready["listen"];
    admin = ready["admin"];
  }

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

  std::string listen = "127.0.0.1:0";
  std::string admin = "127.0.0.1:0";

 private:
  std::string ProcPath(const char* name) const {
    return "/proc/" + std::to_string(pid()) + "/" + name;
  }

  const std::vector<std::string> flags_;
};

}  // namespace kvtrie
