#include "server/worker/worker_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
       ToMetrics(WorkerGauges{.backend = "cpu"}, queue, {})) {
    EXPECT_TRUE(names.insert(family.name).second) << family.name;
    EXPECT_THAT(family.name, StartsWith("kvtrie_worker_"));
    EXPECT_FALSE(family.help.empty());
    const bool is_total = family.name.size() > 6 && family.name.ends_with("_total");
    EXPECT_EQ(is_total, family.type == prometheus::MetricType::Counter) << family.name;
    if (family.name == "kvtrie_worker_blocks_total") {
      EXPECT_EQ(family.metric[0].counter.value, 5);
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
  bool found = false;
  for (const auto& [name, value] : CountersByName({}, queue, {})) {
    EXPECT_TRUE(name.ends_with("_total")) << name;
    if (name == "kvtrie_worker_refused_total") found = value == 3;
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace kvtrie
