#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/client/test_process.h"

namespace kvtrie {

// A kvtrie-worker of its own, on ports of loopback that it finds free.
class WorkerProcess : public TestProcess {
 public:
  explicit WorkerProcess(std::string program, std::vector<std::string> flags = {})
      : TestProcess(std::move(program)), flags_(std::move(flags)) {
    Start();
  }

  // Returns when the worker serves. A second start listens where the first one did.
  void Start() {
    std::vector<std::string> flags = {"--backend", "cpu", "--listen", listen};
    flags.insert(flags.end(), flags_.begin(), flags_.end());
    const auto ready = Launch(flags);
    listen = ready["listen"];
    metrics = ready["metrics"];
  }

  std::string listen = "127.0.0.1:0";
  std::string metrics;

 private:
  const std::vector<std::string> flags_;
};

}  // namespace kvtrie
