#include "server/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

TEST(ListenAddressTest, TakesTheThreeForms) {
  EXPECT_EQ(ParseListenAddress("127.0.0.1:80")->port, 80);
  EXPECT_EQ(ParseListenAddress("[::1]:0")->host, "::1");
  EXPECT_EQ(ParseListenAddress("unix:/run/x")->unix_path, "/run/x");
  EXPECT_EQ(ParseListenAddress("localhost:1")->WithPort(2), "localhost:2");
  EXPECT_EQ(ParseListenAddress("[::1]:0")->WithPort(7), "[::1]:7");
  EXPECT_EQ(ParseListenAddress("unix:/run/x")->WithPort(7), "unix:/run/x");
}

TEST(ListenAddressTest, RefusesTheRest) {
  for (const char* bad : {"", "host", ":80", "host:", "host:x", "host:65536", "host:-1", "[::1]",
                          "[nonsense]:80", "unix:"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseListenAddress(bad).status())) << bad;
  }
}

TEST(ListenAddressTest, IPv6WithoutBracketsGetsAHint) {
  EXPECT_THAT(std::string(ParseListenAddress("::1:50051").status().message()),
              HasSubstr("[::1]:50051"));
}

TEST(ListenAddressTest, KnowsWhatStaysOnThisMachine) {
  EXPECT_TRUE(*IsLoopback(*ParseListenAddress("127.8.9.1:1")));
  EXPECT_TRUE(*IsLoopback(*ParseListenAddress("[::1]:1")));
  EXPECT_TRUE(*IsLoopback(*ParseListenAddress("unix:/x")));
  EXPECT_FALSE(*IsLoopback(*ParseListenAddress("0.0.0.0:1")));
  EXPECT_FALSE(*IsLoopback(*ParseListenAddress("[::]:1")));
  EXPECT_FALSE(*IsLoopback(*ParseListenAddress("192.0.2.1:1")));
}

TEST(ListenAddressTest, APathWhereAnotherOneListensIsNotFree) {
  const std::string path = testing::TempDir() + "/listen." + std::to_string(::getpid());
  const auto address = ParseListenAddress("unix:" + path);
  EXPECT_TRUE(CheckUnixPathIsFree(*address).ok());
  EXPECT_TRUE(CheckUnixPathIsFree(*ParseListenAddress("127.0.0.1:1")).ok());
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un where{};
  where.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), where.sun_path);
  ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&where), sizeof where), 0);
  ASSERT_EQ(::listen(socket, 1), 0);
  EXPECT_TRUE(absl::IsUnavailable(CheckUnixPathIsFree(*address)));
  ::close(socket);
  // What one that was killed leaves there keeps nobody away.
  EXPECT_TRUE(CheckUnixPathIsFree(*address).ok());
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace kvtrie
