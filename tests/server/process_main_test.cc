#include "server/process_main.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

namespace kvtrie {
namespace {

class ProcessMainTest : public testing::Test {
 protected:
  ProcessMainTest() : ready_file_(testing::TempDir() + "/ready." + std::to_string(::getpid())) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
  }
  ~ProcessMainTest() override { ::unlink(ready_file_.c_str()); }

  // Ends the process as RunUntilStopped says, which is asked to stop once it is ready.
  [[noreturn]] void Run(const StartedProcess& started) const {
    ::_exit(RunUntilStopped({.settings = {}, .ready_file = ready_file_},
                            [&]() -> absl::StatusOr<StartedProcess> {
                              // From here on signals wait for whoever is to get them.
                              std::thread([this] {
                                while (!std::ifstream(ready_file_)) std::this_thread::yield();
                                ::kill(::getpid(), SIGTERM);
                              }).detach();
                              return started;
                            }));
  }

  const std::string ready_file_;
};

TEST_F(ProcessMainTest, EndsAsAsked) {
  EXPECT_EXIT(Run({.addresses = {{"listen", "here"}}, .stop = [] { return true; }}),
              testing::ExitedWithCode(0), "");
}

TEST_F(ProcessMainTest, WorkThatNobodyWantsIsNotWaitedFor) {
  EXPECT_EXIT(Run({.addresses = {},
                   .stop =
                       [] {
                         std::thread([] {
                           while (true) ::pause();
                         }).detach();
                         return false;
                       }}),
              testing::ExitedWithCode(0), "");
}

TEST_F(ProcessMainTest, WhatCannotStartSaysWhetherSettingsAreWrong) {
  const auto run = [](absl::Status status) {
    ::_exit(RunUntilStopped({}, [&]() -> absl::StatusOr<StartedProcess> { return status; }));
  };
  EXPECT_EXIT(run(absl::UnavailableError("no port")), testing::ExitedWithCode(kExitCannotStart),
              "");
  EXPECT_EXIT(run(absl::InvalidArgumentError("no such device")),
              testing::ExitedWithCode(kExitBadSettings), "");
}

TEST_F(ProcessMainTest, OneThatHangsIsEnded) {
  EXPECT_EXIT(Run({.addresses = {},
                   .stop =
                       [] {
                         while (true) ::pause();
                         return true;
                       },
                   .stop_time_max = std::chrono::milliseconds(50)}),
              testing::ExitedWithCode(kExitDidNotEnd), "");
}

}  // namespace
}  // namespace kvtrie
