#include "client/ctl/process_cpu.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace kvtrie {
namespace {

// No process has this id.
constexpr pid_t kPidsMax = 1 << 22;

TEST(ProcessCpuTest, WorkIsCounted) {
  const double before = OwnCpuSeconds();
  volatile unsigned value = 1;
  while (OwnCpuSeconds() - before < 0.01) value = value * 3 + 1;
  EXPECT_GE(*CpuSecondsOf(getpid()), 0.01);
}

TEST(ProcessCpuTest, ProcessThatIsNotThereHasNone) {
  EXPECT_FALSE(CpuSecondsOf(kPidsMax).has_value());
}

TEST(ListeningProcessTest, FindsThisProcessByItsPort) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string target = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  EXPECT_EQ(ListeningProcess(target), getpid());
  close(listener);
  EXPECT_FALSE(ListeningProcess(target).has_value());
}

TEST(ListeningProcessTest, OtherHostsAndNonsenseHaveNone) {
  for (const char* target : {"10.0.0.1:80", "127.0.0.1:x", "127.0.0.1:", "unix:/nonexistent"}) {
    EXPECT_FALSE(ListeningProcess(target).has_value()) << target;
  }
}

}  // namespace
}  // namespace kvtrie
