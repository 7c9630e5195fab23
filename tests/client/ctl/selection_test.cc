#include "client/ctl/selection.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "client/ctl/exit_code.h"
#include "storage/kv/ids.h"

namespace kvtrie {
namespace {

const FlagSpec kFlags[] = {kModelFlag, kTokensFlag, kTokensFileFlag, kSaltFlag};
const std::string kModel(32, 'a');

absl::StatusOr<v1::Prefix> Read(const std::vector<std::string>& arguments) {
  AdminClientOptions options;
  options.target = "unix:/nonexistent/kvtrie.sock";
  AdminClient admin(options);
  const auto line = CommandLine::Parse(arguments, kFlags);
  EXPECT_TRUE(line.ok());
  return ReadPrefix(admin, *line);
}

TEST(ReadPrefixTest, TokensAreNumbersWithCommasBetween) {
  const auto prefix = Read({"--model", kModel, "--tokens", "1,2,4294967295", "--salt", "s"});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ(prefix->model_id(), std::string(16, '\xaa'));
  EXPECT_EQ(prefix->tokens(), std::string("\1\0\0\0\2\0\0\0\xff\xff\xff\xff", 12));
  EXPECT_EQ(prefix->salt(), "s");
}

TEST(ReadPrefixTest, TokensFileIsTakenAsItIs) {
  const std::string path = ::testing::TempDir() + "/kvtrie-selection-tokens";
  std::ofstream(path, std::ios::binary) << std::string("\7\0\0\0", 4);
  const auto prefix = Read({"--model", kModel, "--tokens-file", path});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ(prefix->tokens(), std::string("\7\0\0\0", 4));
  std::ofstream(path, std::ios::binary) << "123";
  const absl::Status cut = Read({"--model", kModel, "--tokens-file", path}).status();
  EXPECT_EQ(ExitCodeOf(cut), ExitCode::kFailed);
  EXPECT_EQ(cut.message(),
            "--tokens-file " + path +
                ": has 3 bytes, must have a multiple of 4: it is cut, or holds other "
                "numbers");
  std::filesystem::remove(path);
  EXPECT_EQ(ExitCodeOf(Read({"--model", kModel, "--tokens-file", path}).status()),
            ExitCode::kNotFound);
}

TEST(ReadPrefixTest, MistakesInTheLineAreUsageErrors) {
  const std::vector<std::string> cases[] = {
      {"--model", kModel},
      {"--tokens", "1"},
      {"--model", kModel, "--tokens", ""},
      {"--model", kModel, "--tokens", "1,,2"},
      {"--model", kModel, "--tokens", "1,-2"},
      {"--model", kModel, "--tokens", "4294967296"},
      {"--model", kModel, "--tokens", "1", "--tokens-file", "x"},
  };
  for (const auto& arguments : cases) {
    EXPECT_EQ(ExitCodeOf(Read(arguments).status()), ExitCode::kUsage)
        << ::testing::PrintToString(arguments);
  }
}

TEST(ResolveModelTest, NameNeedsAServerAndAnIdDoesNot) {
  EXPECT_TRUE(Read({"--model", kModel, "--tokens", "1"}).ok());
  EXPECT_TRUE(absl::IsUnavailable(Read({"--model", "name", "--tokens", "1"}).status()));
}

}  // namespace
}  // namespace kvtrie
