#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "prometheus/text_serializer.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

TEST(MetricsTest, EveryStatIsExportedOnce) {
  // Each field gets a value of its own.
  EngineStats stats;
  auto* fields = reinterpret_cast<std::uint64_t*>(&stats);
  constexpr std::size_t kFieldCount = offsetof(EngineStats, degraded) / sizeof(std::uint64_t);
  for (std::size_t i = 0; i < kFieldCount; ++i) fields[i] = 1000 + i;
  std::multiset<std::uint64_t> exported;
  for (const auto& family : ToMetrics(stats)) {
    for (const auto& metric : family.metric) {
      const double value = family.type == prometheus::MetricType::Counter ? metric.counter.value
                                                                          : metric.gauge.value;
      exported.insert(static_cast<std::uint64_t>(value));
    }
  }
  for (std::size_t i = 0; i < kFieldCount; ++i) {
    EXPECT_EQ(exported.count(1000 + i), 1u) << "field " << i << " of EngineStats";
  }
}

TEST(MetricsTest, NamesFollowTheRule) {
  const std::regex name("kvtrie(_[a-z]+)+");
  for (const auto& families : {ToMetrics(EngineStats()), ToMetrics(ServerGauges())}) {
    for (const auto& family : families) {
      EXPECT_TRUE(std::regex_match(family.name, name)) << family.name;
      EXPECT_EQ(family.name.ends_with("_total"), family.type == prometheus::MetricType::Counter)
          << family.name;
      EXPECT_FALSE(family.help.empty());
    }
  }
}

TEST(MetricsTest, FramesAreToldByRungAndCodec) {
  EngineStats stats;
  stats.codecs = {{CodecId::kRaw, 3, 300}, {CodecId::kResidual, 5, 50}};
  const std::string text = prometheus::TextSerializer().Serialize(ToMetrics(stats));
  EXPECT_THAT(text, HasSubstr("kvtrie_frames{rung=\"exact\",codec=\"raw\"} 3"));
  EXPECT_THAT(text, HasSubstr("kvtrie_frames{rung=\"coded\",codec=\"residual\"} 5"));
  EXPECT_THAT(text, HasSubstr("kvtrie_frame_bytes{rung=\"coded\",codec=\"residual\"} 50"));
}

TEST(MetricsTest, DegradedIsAGauge) {
  EngineStats stats;
  stats.degraded = {"disk full"};
  EXPECT_THAT(prometheus::TextSerializer().Serialize(ToMetrics(stats)),
              HasSubstr("kvtrie_degraded 1"));
}

}  // namespace
}  // namespace kvtrie
