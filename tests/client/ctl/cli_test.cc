#include "client/ctl/cli.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "client/ctl/verb.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

struct Outcome {
  ExitCode code;
  std::string out;
  std::string err;
};

// No server listens at these addresses.
Outcome RunKvtrie(std::vector<std::string> arguments,
                  std::map<std::string, std::string> variables = {
                      {"KVTRIE_SERVER", "unix:/nonexistent/kvtrie.sock"},
                      {"KVTRIE_ADMIN_SERVER", "unix:/nonexistent/kvtrie-admin.sock"}}) {
  std::ostringstream out;
  std::ostringstream err;
  const CliEnvironment environment{
      .out = out,
      .err = err,
      .variable = [&](const std::string& name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end()) return std::nullopt;
        return found->second;
      }};
  const ExitCode code = RunCli(arguments, environment);
  return {code, out.str(), err.str()};
}

TEST(CliTest, HelpNamesEachVerbAndExitCode) {
  const Outcome outcome = RunKvtrie({"help"});
  EXPECT_EQ(outcome.code, ExitCode::kOk);
  for (const Verb* verb : AllVerbs()) EXPECT_THAT(outcome.out, HasSubstr(std::string(verb->name)));
  EXPECT_THAT(outcome.out, HasSubstr("exit codes:"));
  EXPECT_EQ(RunKvtrie({"--help"}).out, outcome.out);
}

TEST(CliTest, EachVerbHasHelp) {
  for (const Verb* verb : AllVerbs()) {
    const std::string name(verb->name);
    const Outcome outcome = RunKvtrie({"help", name});
    EXPECT_EQ(outcome.code, ExitCode::kOk);
    EXPECT_THAT(outcome.out, HasSubstr("usage: kvtrie " + name));
    EXPECT_EQ(RunKvtrie({name, "--help"}).out, outcome.out);
    for (const FlagSpec& flag : verb->flags) {
      EXPECT_THAT(outcome.out, HasSubstr("--" + std::string(flag.name)));
    }
  }
}

TEST(CliTest, MistakesInTheCommandLineAreUsageErrors) {
  const std::vector<std::string> cases[] = {
      {},
      {"nonsense"},
      {"status", "extra"},
      {"status", "--nonsense"},
      {"status", "--timeout", "0"},
      {"status", "--timeout"},
      {"show"},
      {"show", "zz"},
      {"show", std::string(31, '0')},
      {"show", std::string(32, '0'), "--tokens", "1"},
      {"show", "--tokens", "1,2"},
      {"show", "--tokens", "1,x", "--model", std::string(32, '0')},
      {"show", "--tokens-file", "/nonexistent", "--model", std::string(32, '0')},
      {"ls"},
      {"ls", "zz"},
      {"rm"},
      {"rm", "zz"},
      {"rm", "--all"},
      {"rm", "--all", "--yes", "--session", "s"},
      {"pin"},
      {"pin", "zz"},
      {"pin", std::string(32, '0'), "--seconds", "0"},
      {"unpin"},
      {"unpin", "zz"},
      {"profile"},
      {"profile", "nonsense"},
      {"profile", "put"},
      {"profile", "put", "/nonexistent"},
      {"profile", "put", "/dev/null", "more"},
      {"profile", "get", std::string(32, '0')},
      {"profile", "get", "zz", "file"},
      {"profile", "rm"},
      {"profile", "rm", "zz"},
      {"bench"},
      {"bench", "nonsense"},
      {"bench", "get", "--batch", "0"},
      {"bench", "get", "--lane", "rdma"},
      {"bench", "get", "--cold", "--warmup"},
      {"bench", "get", "--quality", "good"},
      {"bench", "lookup", "--quality", "high"},
      {"completion"},
      {"completion", "fish"},
      {"help", "nonsense"},
  };
  for (const auto& arguments : cases) {
    const Outcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, ExitCode::kUsage) << ::testing::PrintToString(arguments);
    EXPECT_FALSE(outcome.err.empty());
    EXPECT_EQ(outcome.out, "");
  }
}

TEST(CliTest, ServerThatIsNotThereIsUnreachable) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"status"},
           {"models"},
           {"pins"},
           {"config"},
           {"drain"},
           {"verify"},
           {"top", "--once"},
           {"show", std::string(32, '0')},
           {"ls", "--model", "name"},
           {"rm", std::string(32, '0'), "--timeout", "1"},
           {"unpin", std::string(32, '0'), "--timeout", "1"},
           {"profiles", "--timeout", "1"},
           {"profile", "rm", std::string(32, '0'), "--timeout", "1"},
           {"profile", "get", std::string(32, '0'), "/tmp/never-written", "--timeout", "1"},
           {"bench", "get", "--timeout", "1"},
       }) {
    const Outcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, ExitCode::kUnreachable) << ::testing::PrintToString(arguments);
    EXPECT_THAT(outcome.err, HasSubstr("unix:/nonexistent/kvtrie.sock"));
  }
}

TEST(CliTest, FlagNamesTheServerBeforeTheEnvironmentDoes) {
  const Outcome outcome = RunKvtrie({"--admin_server", "unix:/nonexistent/other.sock", "status"});
  EXPECT_EQ(outcome.code, ExitCode::kUnreachable);
  EXPECT_THAT(outcome.err, HasSubstr("unix:/nonexistent/other.sock"));
}

TEST(CliTest, CompletionKnowsEachVerb) {
  for (const char* shell : {"bash", "zsh"}) {
    const Outcome outcome = RunKvtrie({"completion", shell});
    EXPECT_EQ(outcome.code, ExitCode::kOk);
    for (const Verb* verb : AllVerbs()) {
      EXPECT_THAT(outcome.out, HasSubstr(std::string(verb->name)));
    }
  }
}

TEST(CliTest, VersionIsPlainOrJson) {
  EXPECT_THAT(RunKvtrie({"version"}).out, HasSubstr("kvtrie "));
  EXPECT_THAT(RunKvtrie({"version", "--json"}).out, HasSubstr("\"version\""));
}

TEST(ExitCodeTest, FollowsFromTheStatus) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), ExitCode::kOk);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("")), ExitCode::kNotFound);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("")), ExitCode::kUnreachable);
  EXPECT_EQ(ExitCodeOf(absl::DeadlineExceededError("")), ExitCode::kUnreachable);
  EXPECT_EQ(ExitCodeOf(absl::ResourceExhaustedError("")), ExitCode::kFailed);
}

}  // namespace
}  // namespace kvtrie
