#include "server/worker/worker_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/flags/reflection.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<WorkerConfig> Read(std::vector<const char*> arguments) {
  absl::FlagSaver saver;
  return ReadWorkerConfig(arguments, {});
}

std::string Fault(std::vector<const char*> arguments) {
  return std::string(Read(std::move(arguments)).status().message());
}

TEST(WorkerConfigTest, DefaultsServeThisMachineAlone) {
  const auto config = Read({});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->backend, "auto");
  EXPECT_EQ(config->listen.host, "127.0.0.1");
  EXPECT_GE(config->queue.threads, 1);
  EXPECT_FALSE(config->settings.empty());
}

TEST(WorkerConfigTest, FlagsMapToSettings) {
  const auto config = Read({"--backend=cpu", "--coding_threads=3", "--memory_bytes=256MiB",
                            "--item_bytes_max", "16MiB", "--item_timeout_max=2s"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->backend, "cpu");
  EXPECT_EQ(config->queue.threads, 3);
  EXPECT_EQ(config->memory_bytes, std::size_t{256} << 20);
  EXPECT_EQ(config->limits.item_bytes_max, std::size_t{16} << 20);
  EXPECT_EQ(config->limits.item_timeout_max, std::chrono::seconds(2));
}

TEST(WorkerConfigTest, FaultsNameTheSettingAndTheCure) {
  EXPECT_THAT(Fault({"--backend=tpu"}), HasSubstr("--backend: \"tpu\" is not one of"));
  EXPECT_THAT(Fault({"--listen=0.0.0.0:1"}), HasSubstr("--allow_remote"));
  EXPECT_THAT(Fault({"--item_bytes_max=1GiB"}), HasSubstr("--item_bytes_max"));
  EXPECT_EQ(Read({"--memory_bytes=16MiB"})->limits.item_bytes_max, std::size_t{2} << 20);
  EXPECT_THAT(Fault({"--http_listen=127.0.0.1:50061"}), HasSubstr("same address as --listen"));
  EXPECT_THAT(Fault({"--coding_thread=1"}), HasSubstr("did you mean --coding_threads"));
}

TEST(WorkerConfigTest, HelpNamesEverySetting) {
  const std::string help = DescribeWorkerFlags();
  for (const char* flag : {"--backend", "--listen", "--batch_tokens", "--fit_bytes_max"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
}

}  // namespace
}  // namespace kvtrie
