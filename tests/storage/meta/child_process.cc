#include "tests/storage/meta/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <vector>

#include "gtest/gtest.h"

extern char** environ;

namespace kvtrie {
namespace {

constexpr const char* kRoleVariable = "KV_TEST_CHILD_ROLE";
constexpr const char* kArgumentVariable = "KV_TEST_CHILD_ARGUMENT";
constexpr int kOutput = 3;

std::map<std::string, ChildRole::Main>& Roles() {
  static std::map<std::string, ChildRole::Main> roles;
  return roles;
}

// Runs the role instead of the tests.
class RoleEnvironment final : public ::testing::Environment {
 public:
  void SetUp() override {
    const char* role = std::getenv(kRoleVariable);
    if (role == nullptr) return;
    const auto main = Roles().find(role);
    std::_Exit(main == Roles().end() ? 127 : main->second(std::getenv(kArgumentVariable), kOutput));
  }
};

}  // namespace

ChildRole::ChildRole(const char* name, Main main) {
  if (Roles().empty()) ::testing::AddGlobalTestEnvironment(new RoleEnvironment);
  Roles()[name] = main;
}

ChildProcess::ChildProcess(const std::string& role, const std::string& argument) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  input_ = ends[0];
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], kOutput);
  const std::string role_setting = std::string(kRoleVariable) + "=" + role;
  const std::string argument_setting = std::string(kArgumentVariable) + "=" + argument;
  std::vector<char*> environment = {const_cast<char*>(role_setting.c_str()),
                                    const_cast<char*>(argument_setting.c_str())};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  char program[] = "/proc/self/exe";
  char* arguments[] = {program, nullptr};
  EXPECT_EQ(::posix_spawn(&process_, program, &actions, nullptr, arguments, environment.data()), 0);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
}

ChildProcess::~ChildProcess() {
  if (process_ > 0) {
    Kill();
    ExitStatus();
  }
  ::close(input_);
}

bool ChildProcess::Read(void* to, std::size_t bytes) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t count = ::read(input_, at, bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    at += count;
    bytes -= static_cast<std::size_t>(count);
  }
  return true;
}

void ChildProcess::Kill() { ::kill(process_, SIGKILL); }

int ChildProcess::ExitStatus() {
  int status = 0;
  while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace kvtrie
