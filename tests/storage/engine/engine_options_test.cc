#include "storage/engine/engine_options.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

using testing::StartsWith;

EngineOptions GoodOptions() {
  EngineOptions options;
  options.data_dir = "/somewhere";
  return options;
}

TEST(EngineOptionsTest, DefaultsAreValidOnceThereIsAFolder) {
  EXPECT_TRUE(GoodOptions().Validate().ok());
  EXPECT_THAT(std::string(EngineOptions().Validate().message()), StartsWith("data_dir: "));
}

TEST(EngineOptionsTest, NamesTheFieldThatIsOutOfRange) {
  using Change = std::function<void(EngineOptions&)>;
  const std::vector<std::pair<std::string, Change>> faults = {
      {"segment_bytes", [](EngineOptions& o) { o.segment_bytes = (1u << 20) - 1; }},
      {"segment_bytes", [](EngineOptions& o) { o.segment_bytes = (std::uint64_t{1} << 30) + 1; }},
      {"disk_limit_bytes", [](EngineOptions& o) { o.disk_limit_bytes = 0; }},
      {"disk_limit_bytes", [](EngineOptions& o) { o.disk_limit_bytes = (64u << 20) - 1; }},
      {"disk_limit_bytes", [](EngineOptions& o) { o.disk_limit_bytes = 2 * o.segment_bytes - 1; }},
      {"token_cache_bytes", [](EngineOptions& o) { o.token_cache_bytes = 0; }},
      {"put_memory_bytes", [](EngineOptions& o) { o.put_memory_bytes = 0; }},
      {"index_bytes_max", [](EngineOptions& o) { o.index_bytes_max = 0; }},
      {"recode_quality", [](EngineOptions& o) { o.recode_quality = Quality::kExact; }},
      {"recode_quality", [](EngineOptions& o) { o.recode_quality = Quality::kUnrated; }},
      {"recode_cpu_percent", [](EngineOptions& o) { o.recode_cpu_percent = 0; }},
      {"recode_cpu_percent", [](EngineOptions& o) { o.recode_cpu_percent = 101; }},
      {"prefetch_percent_min", [](EngineOptions& o) { o.prefetch_percent_min = 49; }},
      {"prefetch_percent_min", [](EngineOptions& o) { o.prefetch_percent_min = 101; }},
      {"run_index_bytes", [](EngineOptions& o) { o.run_index_bytes = 1; }},
      {"io_threads", [](EngineOptions& o) { o.io_threads = 0; }},
      {"io_threads", [](EngineOptions& o) { o.io_threads = 257; }},
      {"io_queue_max", [](EngineOptions& o) { o.io_queue_max = 0; }},
      {"sync_interval", [](EngineOptions& o) { o.sync_interval = std::chrono::milliseconds(0); }},
      {"lease_max", [](EngineOptions& o) { o.lease_max = std::chrono::milliseconds(0); }},
      {"pin_max", [](EngineOptions& o) { o.pin_max = std::chrono::seconds(-1); }},
      {"pinned_percent_max", [](EngineOptions& o) { o.pinned_percent_max = 91; }},
      {"event_log_max", [](EngineOptions& o) { o.event_log_max = 0; }},
  };
  for (const auto& [field, change] : faults) {
    EngineOptions options = GoodOptions();
    change(options);
    const absl::Status status = options.Validate();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << field;
    EXPECT_THAT(std::string(status.message()), StartsWith(field + ": "));
  }
}

TEST(EngineOptionsTest, TheBoundsThemselvesAreAllowed) {
  EngineOptions options = GoodOptions();
  options.segment_bytes = std::uint64_t{1} << 20;
  options.disk_limit_bytes = std::uint64_t{64} << 20;
  options.token_cache_bytes = options.put_memory_bytes = options.index_bytes_max = 1u << 20;
  options.memory_tier_bytes = 0;
  options.io_threads = 256;
  options.io_queue_max = 1;
  options.pinned_percent_max = 90;
  options.event_log_max = 1;
  EXPECT_TRUE(options.Validate().ok()) << options.Validate();
}

}  // namespace
}  // namespace kvtrie
