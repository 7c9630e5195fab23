#include "server/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace kvtrie
