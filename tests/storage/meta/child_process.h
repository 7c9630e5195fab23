#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvtrie {

// A part of a test that runs in a process of its own, so that it can be killed. It is this test
// program, started again; fork alone would not do, because the threads of RocksDB do not come
// along.
//
//   const ChildRole kWriter("writer", [](const std::string& argument, int output) { ... return 0;
//   }); TEST(...) { ChildProcess child("writer", folder); ... child.Kill(); }
class ChildRole {
 public:
  // `output` is the writing end of the pipe that ChildProcess reads. The result is the exit status.
  using Main = int (*)(const std::string& argument, int output);
  ChildRole(const char* name, Main main);
};

class ChildProcess {
 public:
  ChildProcess(const std::string& role, const std::string& argument);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // False at the end of what the child has written.
  bool Read(void* to, std::size_t bytes);
  // SIGKILL. What the child has written can still be read.
  void Kill();
  // Waits for its end; -1 when it did not exit by itself.
  int ExitStatus();

 private:
  pid_t process_ = -1;
  int input_ = -1;
};

}  // namespace kvtrie
