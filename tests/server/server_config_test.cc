#include "server/server_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/flags/reflection.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<ServerConfig> Read(std::vector<const char*> arguments) {
  const absl::FlagSaver saver;  // flags are the process's; tests must not see each other's
  return ReadServerConfig(arguments, {});
}

std::string Refusal(std::vector<const char*> arguments) {
  const auto config = Read(std::move(arguments));
  EXPECT_TRUE(absl::IsInvalidArgument(config.status())) << config.status();
  return std::string(config.status().message());
}

class FlagFile {
 public:
  explicit FlagFile(const std::string& text) {
    path_ = std::filesystem::temp_directory_path() / ("kvtrie-flags-" + std::to_string(::getpid()));
    std::ofstream(path_) << text;
    argument_ = "--flagfile=" + path_;
  }
  ~FlagFile() { std::remove(path_.c_str()); }
  const char* argument() const { return argument_.c_str(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string argument_;
};

TEST(ServerConfigTest, DefaultsAreThoseOfTheEngineAndLoopback) {
  const auto config = Read({"--data_dir=/d"});
  ASSERT_TRUE(config.ok()) << config.status();
  const EngineOptions defaults;
  EXPECT_EQ(config->engine.disk_limit_bytes, defaults.disk_limit_bytes);
  EXPECT_EQ(config->engine.memory_tier_bytes, defaults.memory_tier_bytes);
  EXPECT_EQ(config->engine.io_threads, defaults.io_threads);
  EXPECT_EQ(config->engine.sync_interval, defaults.sync_interval);
  EXPECT_EQ(config->engine.pin_max, defaults.pin_max);
  EXPECT_EQ(config->engine.event_log_max, defaults.event_log_max);
  EXPECT_EQ(config->engine.group_threshold_bits, defaults.group_threshold_bits);
  EXPECT_EQ(config->listen.WithPort(config->listen.port), "127.0.0.1:50051");
  EXPECT_EQ(config->local_socket, "/d/local.sock");
}

TEST(ServerConfigTest, SizesAndDurationsHaveUnits) {
  const auto config =
      Read({"--data_dir=/d", "--memory_tier_bytes=512MiB", "--disk_limit_bytes=10GiB",
            "--put_memory_bytes=268435456", "--sync_interval=500ms", "--drain_grace=10s"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->engine.memory_tier_bytes, std::uint64_t{512} << 20);
  EXPECT_EQ(config->engine.disk_limit_bytes, std::uint64_t{10} << 30);
  EXPECT_EQ(config->engine.put_memory_bytes, std::uint64_t{256} << 20);
  EXPECT_EQ(config->engine.sync_interval, std::chrono::milliseconds(500));
  EXPECT_EQ(config->drain_grace, std::chrono::seconds(10));
}

TEST(ServerConfigTest, WorkersGetAtMostFiveMinutes) {
  const std::string refusal =
      Refusal({"--data_dir=/d", "--workers=w:1", "--worker_timeout=300001ms"});
  EXPECT_THAT(refusal, HasSubstr("--worker_timeout"));
  EXPECT_THAT(refusal, HasSubstr("5m"));
  EXPECT_TRUE(Read({"--data_dir=/d", "--workers=w:1", "--worker_timeout=5m"}).ok());
}

TEST(ServerConfigTest, CommandLineBeatsTheFileAndSourcesAreKept) {
  const FlagFile file("--data_dir=/file\n--io_threads=2\n");
  const auto config = Read({file.argument(), "--io_threads=3"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->engine.data_dir, "/file");
  EXPECT_EQ(config->engine.io_threads, 3u);
  for (const EffectiveSetting& setting : config->settings) {
    EXPECT_FALSE(setting.help.empty()) << setting.name;
    if (setting.name == "data_dir") {
      EXPECT_EQ(setting.source, "flagfile");
    } else if (setting.name == "io_threads") {
      EXPECT_EQ(setting.source, "flag");
      EXPECT_EQ(setting.value, "3");
    } else {
      EXPECT_EQ(setting.source, "default") << setting.name;
    }
  }
}

TEST(ServerConfigTest, BooleansHaveThreeForms) {
  EXPECT_TRUE(Read({"--data_dir=/d"})->engine.eviction);
  EXPECT_FALSE(Read({"--data_dir=/d", "--noeviction"})->engine.eviction);
  EXPECT_FALSE(Read({"--data_dir=/d", "--eviction=false"})->engine.eviction);
  EXPECT_TRUE(Read({"--data_dir=/d", "--eviction"})->engine.eviction);
}

TEST(ServerConfigTest, FaultsOfTheFileNameLineSettingAndTheNearestOne) {
  const FlagFile file("# settings\n--data_dir=/d\n--memory_teir_bytes=1GiB\n");
  const std::string refusal = Refusal({file.argument()});
  EXPECT_THAT(refusal, HasSubstr(file.path() + ":3"));
  EXPECT_THAT(refusal, HasSubstr("--memory_teir_bytes"));
  EXPECT_THAT(refusal, HasSubstr("did you mean --memory_tier_bytes?"));
}

TEST(ServerConfigTest, EachKindOfFaultIsRefusedWithItsSetting) {
  struct Case {
    std::vector<const char*> arguments;
    const char* message;
  };
  const Case cases[] = {
      {{}, "--data_dir: is required"},
      {{"--data_dir"}, "--data_dir: needs a value"},
      {{"--data_dir=/d", "--io_threads=many"}, "--io_threads: \"many\""},
      {{"--data_dir=/d", "--io_threads=0"}, "--io_threads: 0"},
      {{"--data_dir=/d", "--memory_tier_bytes=10GB"}, "KiB, MiB, GiB"},
      {{"--data_dir=/d", "--memory_tier_bytes=1000TiB"}, "of this machine's memory"},
      {{"--data_dir=/d", "--memory_tier_bytes=-1"}, "--memory_tier_bytes: \"-1\""},
      {{"--data_dir=/d", "--memory_tier_bytes=1.5GiB"}, "--memory_tier_bytes"},
      {{"--data_dir=/d", "--memory_tier_bytes=99999999999TiB"}, "--memory_tier_bytes"},
      {{"--data_dir=/d", "--drain_grace=20"}, "--drain_grace: \"20\""},
      {{"--data_dir=/d", "--drain_grace=-1s"}, "--drain_grace"},
      {{"--data_dir=/d", "--listen=::1:50051"}, "did you mean [::1]:50051?"},
      {{"--data_dir=/d", "--listen=0.0.0.0:50051"}, "--allow_remote"},
      {{"--data_dir=/d", "--http_listen=unix:/x"}, "--http_listen"},
      {{"--data_dir=/d", "--log_level", "warni"},
       "command line: --log_level: \"warni\" is not one of trace, debug, info, warn, error"},
      {{"--data_dir=/d", "--log_level=off"}, "--log_level: \"off\" is not one of"},
      {{"--data_dir=/d", "--log_format=xml"}, "--log_format"},
      {{"--data_dir=/d", "--admin_listen=127.0.0.1:50051"}, "same address as --listen"},
      {{"--data_dir=/d", "--lane_connections_max=0", "--local_socket=/s"},
       "--local_socket: excludes --lane_connections_max=0"},
      {{"--data_dir=/d", "--read_ahead_bytes=1GiB"}, "--read_ahead_bytes"},
      {{"--data_dir=/d", "--text_reuse=on"}, "--text_reuse: \"on\""},
      {{"--data_dir=/d", "--text_reuse="}, "--text_reuse"},
      {{"--data_dir=/d", "--text_reuse=0"}, "--text_reuse: \"0\""},
      {{"--data_dir=/d", "--text_reuse=all,1"}, "--text_reuse: \"all,1\""},
      {{"--data_dir=/d", "--text_reuse_forbidden_models=,"},
       "--text_reuse_forbidden_models: \"\" is not"},
      {{"--data_dir=/d", "--text_reuse_forbidden_models=00ff"},
       "--text_reuse_forbidden_models: \"00ff\""},
      {{"--data_dir=/d", "--text_reuse_forbidden_models=zz0102030405060708090a0b0c0d0e0f"},
       "--text_reuse_forbidden_models: \"zz"},
      {{"--data_dir=/d", "--message_bytes_max=1GiB"}, "--message_bytes_max"},
      {{"--data_dir=/d", "--flagfile=/does/not/exist"}, "/does/not/exist"},
      {{"--data_dir=/d", "--data_dir=/e"}, "second time"},
      {{"data_dir=/d"}, "write --name=value"},
  };
  for (const Case& c : cases) EXPECT_THAT(Refusal(c.arguments), HasSubstr(c.message));
}

TEST(ServerConfigTest, TextReuseIsOffUnlessSomebodyIsNamed) {
  const auto policy = [](std::vector<const char*> arguments) {
    arguments.push_back("--data_dir=/d");
    const auto config = Read(arguments);
    EXPECT_TRUE(config.ok()) << config.status();
    return config->engine.text_reuse;
  };
  EXPECT_FALSE(policy({}).all_tenants);
  EXPECT_TRUE(policy({}).tenants.empty());
  EXPECT_FALSE(policy({"--text_reuse=off"}).all_tenants);
  EXPECT_TRUE(policy({"--text_reuse=all"}).all_tenants);
  const TextReusePolicy some =
      policy({"--text_reuse=1,7",
              "--text_reuse_forbidden_models="
              "000102030405060708090a0b0c0d0e0f,FF0102030405060708090A0B0C0D0E0F"});
  EXPECT_FALSE(some.all_tenants);
  EXPECT_EQ(some.tenants, (std::vector{TenantId{1}, TenantId{7}}));
  ASSERT_EQ(some.forbidden_models.size(), 2u);
  EXPECT_EQ(some.forbidden_models[1].ToHex(), "ff0102030405060708090a0b0c0d0e0f");
}

TEST(ServerConfigTest, RemoteAddressesNeedAWord) {
  EXPECT_TRUE(Read({"--data_dir=/d", "--listen=[::]:0", "--allow_remote"}).ok());
}

TEST(ServerConfigTest, LaneCanBeTurnedOff) {
  EXPECT_TRUE(Read({"--data_dir=/d", "--local_socket="})->local_socket.empty());
  EXPECT_TRUE(Read({"--data_dir=/d", "--lane_connections_max=0"})->local_socket.empty());
}

TEST(ServerConfigTest, EveryFlagIsDescribed) {
  const std::string text = DescribeFlags();
  const auto config = Read({"--data_dir=/d"});
  for (const EffectiveSetting& setting : config->settings) {
    EXPECT_THAT(text, HasSubstr("--" + setting.name + "="));
  }
}

}  // namespace
}  // namespace kvtrie
