#include "server/rpc_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "prometheus/text_serializer.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

TEST(RpcMetricsTest, CountsByMethodAndCode) {
  RpcMetrics metrics;
  {
    RpcProbe ok(metrics, RpcMethod::kLookup);
    EXPECT_EQ(metrics.in_flight(), 1);
    ok.Finish(0);
    ok.Finish(3);  // only the first counts
    RpcProbe dropped(metrics, RpcMethod::kLookup);
  }
  EXPECT_EQ(metrics.in_flight(), 0);
  metrics.Finished(RpcMethod::kPut, 99, std::chrono::seconds(10));
  metrics.Sent(7);
  const std::string text = prometheus::TextSerializer().Serialize(metrics.Collect());
  EXPECT_THAT(text, HasSubstr("kvtrie_rpc_total{method=\"Lookup\",code=\"OK\"} 1"));
  EXPECT_THAT(text, HasSubstr("kvtrie_rpc_total{method=\"Lookup\",code=\"CANCELLED\"} 1"));
  EXPECT_THAT(text, HasSubstr("kvtrie_rpc_total{method=\"Put\",code=\"UNKNOWN\"} 1"));
  EXPECT_THAT(text, HasSubstr("kvtrie_rpc_seconds_bucket{method=\"Put\",le=\"5\"} 0"));
  EXPECT_THAT(text, HasSubstr("kvtrie_rpc_seconds_bucket{method=\"Put\",le=\"+Inf\"} 1"));
  EXPECT_THAT(text, HasSubstr("kvtrie_sent_bytes_total 7"));
}

}  // namespace
}  // namespace kvtrie
