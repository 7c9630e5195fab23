#include "client/local_lane.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

TEST(IsLocalTargetTest, LoopbackAndUnixSocketsAre) {
  for (const char* target : {"127.0.0.1:1", "ipv4:127.0.0.1:1", "dns:///localhost:7", "localhost:7",
                             "[::1]:7", "ipv6:[::1]:7", "unix:/run/kvtrie.sock"}) {
    EXPECT_TRUE(IsLocalTarget(target)) << target;
  }
  for (const char* target :
       {"10.0.0.1:1", "kvtrie.example:7", "1127.0.0.1:1", "localhost.example:1"}) {
    EXPECT_FALSE(IsLocalTarget(target)) << target;
  }
}

}  // namespace
}  // namespace kvtrie
