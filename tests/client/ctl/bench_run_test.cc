// What needs a server is tried in client_server_test.
#include "client/ctl/bench_run.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

BenchOptions Options() {
  BenchOptions options;
  options.op = "get";
  options.client.targets = {"unix:/nonexistent/kvtrie.sock"};
  options.client.lane = Lane::kGrpc;
  options.client.unary_timeout = std::chrono::milliseconds(100);
  return options;
}

TEST(RunBenchTest, ServerThatIsNotThereIsUnavailable) {
  EXPECT_TRUE(absl::IsUnavailable(RunBench(Options()).status()));
}

TEST(RunBenchTest, BlockSizeThatNoModelHasIsRefused) {
  BenchOptions options = Options();
  options.block_bytes = 100;
  EXPECT_TRUE(absl::IsInvalidArgument(RunBench(options).status()));
}

}  // namespace
}  // namespace kvtrie
