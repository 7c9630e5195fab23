#include "server/flag_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"

ABSL_FLAG(kvtrie::ByteSize, test_bytes, kvtrie::ByteSize{1024}, "Bytes of a test.");
ABSL_FLAG(bool, test_switch, true, "A switch of a test.");
ABSL_FLAG(std::string, test_name, "x", "A name of a test.");

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr FlagSet kFlags("flag_set_test.cc");

class FlagSetTest : public testing::Test {
 protected:
  absl::StatusOr<SettingSources> Read(std::vector<const char*> arguments,
                                      std::vector<std::string> environment = {}) {
    return kFlags.Read(arguments, environment);
  }
  absl::FlagSaver saver_;
};

TEST_F(FlagSetTest, HasTheFlagsOfItsFileAlone) {
  ASSERT_TRUE(Read({"--test_bytes=2MiB", "--notest_switch"}).ok());
  const auto sources = Read({"--test_bytes=2MiB", "--notest_switch"});
  std::vector<std::string> settings;
  for (const EffectiveSetting& setting : kFlags.Effective(*sources)) {
    settings.push_back(setting.name + "=" + setting.value + " " + setting.source);
  }
  EXPECT_THAT(settings,
              ElementsAre("test_bytes=2MiB flag", "test_name=x default", "test_switch=false flag"));
  const std::string help = kFlags.Describe("a test");
  EXPECT_THAT(help, HasSubstr("a test\n"));
  EXPECT_THAT(help, HasSubstr("--test_bytes=1KiB"));
}

TEST_F(FlagSetTest, FaultsSayWhereAndWhatWouldBeRight) {
  EXPECT_THAT(std::string(Read({"--test_byte=1"}).status().message()),
              HasSubstr("did you mean --test_bytes?"));
  EXPECT_THAT(std::string(Read({"--test_bytes=1MB"}).status().message()), HasSubstr("MiB"));
  EXPECT_THAT(std::string(Read({"--test_name"}).status().message()), HasSubstr("value"));
  EXPECT_FALSE(Read({}, {"KVTRIE_TEST_BYTES=3"}).ok());
}

TEST_F(FlagSetTest, TheFirstFaultStaysAndSaysWhereItWasMade) {
  const auto sources = Read({"--test_name=long"});
  ASSERT_TRUE(sources.ok());
  SettingChecks checks(*sources);
  EXPECT_EQ(checks.Between("test_bytes", 5, 1, 9), 5u);
  EXPECT_TRUE(checks.status().ok());
  checks.OneOf("test_name", "long", {"short", "wide"});
  checks.Between("test_bytes", 50, 1, 9);
  EXPECT_THAT(std::string(checks.status().message()),
              HasSubstr("command line: --test_name: \"long\" is not one of short, wide"));
}

}  // namespace
}  // namespace kvtrie
