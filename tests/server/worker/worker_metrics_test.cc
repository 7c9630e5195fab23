#include "server/worker/worker_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace kvtrie {
namespace {

using ::testing::StartsWith;

TEST(WorkerMetricsTest, NamesAreUniqueAndCountersSaySo) {
  CodecQueueStats queue;
  queue.jobs_total = 5;
  std::set<std::string> names;
  for (const prometheus::MetricFamily& family :
       ToMetrics(WorkerGauges{.backend = "cpu", .shelf = {.upload_bytes = 6}}, queue, {})) {
    EXPECT_TRUE(names.insert(family.name).second) << family.name;
    EXPECT_THAT(family.name, StartsWith("kvtrie_worker_"));
    EXPECT_FALSE(family.help.empty());
    const bool is_total = family.name.size() > 6 && family.name.ends_with("_total");
    EXPECT_EQ(is_total, family.type == prometheus::MetricType::Counter) << family.name;
    if (family.name == "kvtrie_worker_blocks_total") {
      EXPECT_EQ(family.metric[0].counter.value, 5);
    }
    if (family.name == "kvtrie_worker_upload_bytes") {
      EXPECT_EQ(family.metric[0].gauge.value, 6);
    }
    if (family.name == "kvtrie_worker_backend_info") {
      EXPECT_EQ(family.metric[0].label[0].value, "cpu");
    }
  }
  EXPECT_GT(names.size(), 10u);
}

TEST(WorkerMetricsTest, CountersHaveTheNamesOfMetrics) {
  CodecQueueStats queue;
  queue.refused_total = 3;
  const WorkerGauges gauges{.backend = "cpu", .shelf = {.evicted_total = 4}};
  std::map<std::string, std::uint64_t> counters;
  for (const auto& [name, value] : CountersByName(gauges, queue, {})) {
    EXPECT_TRUE(name.ends_with("_total")) << name;
    counters[name] = value;
  }
  EXPECT_EQ(counters["kvtrie_worker_refused_total"], 3u);
  EXPECT_EQ(counters["kvtrie_worker_evicted_profiles_total"], 4u);
}

}  // namespace
}  // namespace kvtrie
