#include "server/flag_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kNames = {"data_dir", "listen", "memory_tier_bytes"};
bool TakesValue(absl::string_view name) { return name != "eviction"; }

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(FlagFileTest, SkipsBlankLinesAndComments) {
  const auto settings = ParseFlagFile("f", "# comment\n\n  --data_dir=/x \r\n--eviction\n");
  ASSERT_TRUE(settings.ok()) << settings.status();
  ASSERT_EQ(settings->size(), 2u);
  EXPECT_EQ((*settings)[0].name, "data_dir");
  EXPECT_EQ((*settings)[0].value, "/x");
  EXPECT_EQ((*settings)[0].where, "f:3");
  EXPECT_FALSE((*settings)[1].value.has_value());
}

TEST(FlagFileTest, ValuesMayHoldEqualsSigns) {
  EXPECT_EQ((*ParseFlagFile("f", "--a=b=c"))[0].value, "b=c");
}

TEST(FlagFileTest, FaultsNameFileAndLine) {
  EXPECT_THAT(Message(ParseFlagFile("f", "--a=1\n--a=2").status()), HasSubstr("f:2"));
  EXPECT_THAT(Message(ParseFlagFile("f", "--a=1\n--a=2").status()), HasSubstr("first in f:1"));
  EXPECT_THAT(Message(ParseFlagFile("f", "\na=1").status()), HasSubstr("f:2"));
  EXPECT_THAT(Message(ParseFlagFile("f", "--").status()), HasSubstr("f:1"));
  EXPECT_THAT(Message(ParseFlagFile("f", "--flagfile=g").status()), HasSubstr("f:1"));
}

TEST(ArgumentsTest, TakeValuesInBothForms) {
  const char* const arguments[] = {"--listen", "x:1", "--data_dir=/y", "--eviction"};
  const auto settings = ParseArguments(arguments, TakesValue);
  ASSERT_TRUE(settings.ok());
  EXPECT_EQ((*settings)[0].value, "x:1");
  EXPECT_EQ((*settings)[1].value, "/y");
  EXPECT_FALSE((*settings)[2].value.has_value());
}

TEST(ArgumentsTest, RefuseWhatIsNoSettingAndWhatIsGivenTwice) {
  const char* const stray[] = {"stray"};
  EXPECT_FALSE(ParseArguments(stray, TakesValue).ok());
  const char* const twice[] = {"--listen=a:1", "--listen=b:1"};
  EXPECT_THAT(Message(ParseArguments(twice, TakesValue).status()), HasSubstr("second time"));
}

TEST(NearestNameTest, FindsTheWordThatWasMeant) {
  EXPECT_EQ(NearestName("data-dir", kNames), "data_dir");
  EXPECT_EQ(NearestName("LISTEN", kNames), "listen");
  EXPECT_EQ(NearestName("memory_teir_bytes", kNames), "memory_tier_bytes");
  EXPECT_EQ(NearestName("zzz", kNames), "");
}

TEST(EnvironmentTest, UnknownVariablesOfOursStopTheStart) {
  const std::vector<std::string> ours = {"PATH=/bin", "KVTRIE_DATA_DIR=/x"};
  const absl::Status status = CheckEnvironment(ours, kNames);
  EXPECT_THAT(Message(status), HasSubstr("KVTRIE_DATA_DIR"));
  EXPECT_THAT(Message(status), HasSubstr("--data_dir"));
}

TEST(EnvironmentTest, VariablesOfTheCliAreNotMeant) {
  const std::vector<std::string> ours = {"KVTRIE_SERVER=127.0.0.1:1", "KVTRIE_ADMIN_SERVER=[::1]:2",
                                         "KVTRIE_CACHE=/var/cache"};
  EXPECT_TRUE(CheckEnvironment(ours, kNames).ok());
}

TEST(EnvironmentTest, VariablesOfAServiceOfThatNameAreNotMeant) {
  const std::vector<std::string> kubernetes = {
      "KVTRIE_SERVICE_HOST=10.0.0.1",        "KVTRIE_SERVICE_PORT=50051",
      "KVTRIE_SERVICE_PORT_GRPC=50051",      "KVTRIE_PORT=tcp://10.0.0.1:50051",
      "KVTRIE_PORT_50051_TCP_ADDR=10.0.0.1", "KVTRIE_SERVER_SERVICE_HOST=10.0.0.2"};
  EXPECT_TRUE(CheckEnvironment(kubernetes, kNames).ok());
}

}  // namespace
}  // namespace kvtrie
