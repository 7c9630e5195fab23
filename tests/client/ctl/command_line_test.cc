#include "client/ctl/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const FlagSpec kFlags[] = {
    {"name", FlagSpec::Kind::kText, ""},
    {"count", FlagSpec::Kind::kNumber, "", 2, 10},
    {"lane", FlagSpec::Kind::kChoice, "", 0, 0, "grpc|shm"},
    {"json", FlagSpec::Kind::kSwitch, ""},
    {"step", FlagSpec::Kind::kReal, ""},
    FlagSpec{"ridge", FlagSpec::Kind::kReal, ""}.AboveZero(),
    FlagSpec{"share", FlagSpec::Kind::kReal, ""}.AtMost(1),
};

absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& arguments) {
  return CommandLine::Parse(arguments, kFlags);
}

TEST(CommandLineTest, FlagsStandBeforeBetweenAndBehind) {
  const auto line =
      Parse({"--name", "a b", "first", "--count=7", "second", "--json", "--lane", "shm"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->positionals(), ElementsAre("first", "second"));
  EXPECT_EQ(line->Text("name"), "a b");
  EXPECT_EQ(line->Number("count", 0), 7u);
  EXPECT_EQ(line->Text("lane"), "shm");
  EXPECT_TRUE(line->Has("json"));
}

TEST(CommandLineTest, RealNumbersMayHaveAnExponent) {
  const auto line = Parse({"--step", "8.5e-4"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->Real("step", 1), 8.5e-4);
  EXPECT_EQ(Parse({"--step", "0"})->Real("step", 1), 0);
  EXPECT_EQ(Parse({"--share", "1"})->Real("share", 0), 1);
}

TEST(CommandLineTest, WhatIsNotGivenHasItsDefault) {
  const auto line = Parse({});
  ASSERT_TRUE(line.ok());
  EXPECT_EQ(line->Real("step", 0.5), 0.5);
  EXPECT_FALSE(line->Has("json"));
  EXPECT_EQ(line->Text("name", "x"), "x");
  EXPECT_EQ(line->Number("count", 5), 5u);
}

TEST(CommandLineTest, DashesEndTheFlags) {
  const auto line = Parse({"--", "--json", "-x"});
  ASSERT_TRUE(line.ok());
  EXPECT_THAT(line->positionals(), ElementsAre("--json", "-x"));
}

TEST(CommandLineTest, EachMistakeIsNamed) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--nme", "x"}, "unknown flag --nme"},
      {{"-j"}, "unknown flag -j"},
      {{"--name"}, "--name needs a value"},
      {{"--json=1"}, "takes no value"},
      {{"--count", "x"}, "not a whole number"},
      {{"--count", "0.5"}, "not a whole number"},
      {{"--step", "x"}, "--step x: not a number from 0 on"},
      {{"--step", ""}, "not a number from 0 on"},
      {{"--step", "1e-3x"}, "not a number from 0 on"},
      {{"--step", "-1"}, "not a number from 0 on"},
      {{"--step", "nan"}, "not a number from 0 on"},
      {{"--step", "inf"}, "not a number from 0 on"},
      {{"--step", "1e999"}, "not a number from 0 on"},
      {{"--step", "1e300"}, "--step 1e300: must be 0, or 1e-30 to 1e+30"},
      {{"--step", "1e-300"}, "--step 1e-300: must be 0, or 1e-30 to 1e+30"},
      {{"--ridge", "0"}, "--ridge 0: must be 1e-30 to 1e+30"},
      {{"--share", "1.5"}, "--share 1.5: must be 0, or 1e-30 to 1"},
      {{"--count", ""}, "not a whole number"},
      {{"--count", "3x"}, "not a whole number"},
      {{"--count", "-3"}, "not a whole number"},
      {{"--count", "99999999999999999999"}, "not a whole number"},
      {{"--count", "1"}, "must be 2 to 10"},
      {{"--count", "11"}, "must be 2 to 10"},
      {{"--lane", "tcp"}, "must be grpc|shm"},
      {{"--lane", ""}, "must be grpc|shm"},
      {{"--name", "a", "--name", "b"}, "given twice"},
  };
  for (const auto& [arguments, message] : cases) {
    const auto line = Parse(arguments);
    ASSERT_TRUE(absl::IsInvalidArgument(line.status())) << message;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr(message));
  }
}

TEST(OfFlagTest, NamesTheFlagAndKeepsTheCode) {
  EXPECT_EQ(OfFlag("out", absl::NotFoundError("file: is not there")),
            absl::NotFoundError("--out file: is not there"));
  EXPECT_TRUE(OfFlag("out", absl::OkStatus()).ok());
  EXPECT_EQ(*OfFlag("out", absl::StatusOr<int>(7)), 7);
}

}  // namespace
}  // namespace kvtrie
