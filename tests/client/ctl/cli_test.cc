#include "client/ctl/cli.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "client/ctl/verb.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  // A command without actions of its own takes words as well.
  EXPECT_EQ(RunKvtrie({"help", "groups", "show"}).out, RunKvtrie({"help", "groups"}).out);
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

TEST(CliTest, EachActionHasHelpOfItsOwn) {
  const std::string all = RunKvtrie({"help", "profile"}).out;
  EXPECT_THAT(all, HasSubstr("usage: kvtrie profile ACTION"));
  EXPECT_THAT(all, HasSubstr("\n  get ID FILE "));
  EXPECT_THAT(all, HasSubstr("\n  fit --spec TEXT --samples TEXT --out TEXT [FLAGS]\n"));
  const Verb* const profile = FindVerb(AllVerbs(), "profile");
  ASSERT_NE(profile, nullptr);
  ASSERT_FALSE(profile->actions.empty());
  for (const Verb* action : profile->actions) {
    const std::string name(action->name);
    const Outcome outcome = RunKvtrie({"profile", name, "--help"});
    EXPECT_EQ(outcome.code, ExitCode::kOk);
    EXPECT_EQ(RunKvtrie({"help", "profile", name}).out, outcome.out);
    EXPECT_THAT(outcome.out, StartsWith("usage: kvtrie profile " + name));
    for (const Verb* other : profile->actions) {
      for (const FlagSpec& flag : other->flags) {
        const bool is_own = std::any_of(action->flags.begin(), action->flags.end(),
                                        [&](const FlagSpec& own) { return own.name == flag.name; });
        EXPECT_EQ(is_own, outcome.out.find("\n  --" + std::string(flag.name)) != std::string::npos)
            << name << " --" << flag.name;
      }
    }
  }
}

TEST(CliTest, AnActionMayStandBehindItsFlags) {
  const Outcome outcome = RunKvtrie({"profile", "--spec", "fit", "--timeout", "3", "code"});
  EXPECT_EQ(outcome.code, ExitCode::kUsage);
  EXPECT_THAT(outcome.err, StartsWith("kvtrie: profile code: needs --profile\n"
                                      "Try 'kvtrie help profile code'."));
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
      {"similar"},
      {"similar", "--tokens", "1,2"},
      {"similar", "--model", std::string(32, '0')},
      {"similar", "--model", std::string(32, '0'), "--tokens", "1", "--count", "65"},
      {"ls"},
      {"ls", "zz"},
      {"groups", "nonsense"},
      {"groups", "show"},
      {"groups", "show", "zz"},
      {"groups", "--limit", "0"},
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
      {"profile", "--json"},
      {"profile", "nonsense", "--help"},
      {"profile", "fit", "--level", "high"},
      {"profile", "put", "/dev/null", "more"},
      {"profile", "get", std::string(32, '0')},
      {"profile", "get", "zz", "file"},
      {"profile", "rm"},
      {"profile", "rm", "zz"},
      {"bench"},
      {"bench", "nonsense"},
      {"bench", "get", "--batch", "0"},
      {"bench", "get", "--lane", "rdma"},
      {"bench", "put", "--block-bytes", "33"},
      {"bench", "get", "--cold", "--warmup"},
      {"bench", "get", "--quality", "good"},
      {"bench", "lookup", "--quality", "high"},
      {"completion"},
      {"completion", "fish"},
      {"help", "nonsense"},
      {"help", "status", "nonsense"},
      {"help", "profile", "nonsense"},
  };
  for (const auto& arguments : cases) {
    const Outcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, ExitCode::kUsage) << ::testing::PrintToString(arguments);
    EXPECT_FALSE(outcome.err.empty());
    EXPECT_EQ(outcome.out, "");
  }
}

// What a well-formed line names may still be missing or wrong, which is no mistake in the line.
TEST(CliTest, FilesThatAreWrongAreNoUsageErrors) {
  const std::string model(32, '0');
  const std::string wrong = ::testing::TempDir() + "/kvtrie-cli-wrong";
  std::ofstream(wrong, std::ios::binary) << "123";
  for (const auto& [path, code] :
       {std::pair<std::string, ExitCode>{"/nonexistent/file", ExitCode::kNotFound},
        {"/dev/null", ExitCode::kFailed},
        {wrong, ExitCode::kFailed}}) {
    for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
             {"show", "--tokens-file", path, "--model", model},
             {"ls", "--tokens-file", path, "--model", model},
             {"pin", "--tokens-file", path, "--model", model},
             {"rm", "--tokens-file", path, "--model", model},
             {"profile", "seal", path, "--measured", path, "--out", wrong + ".out"}}) {
      const Outcome outcome = RunKvtrie(arguments);
      EXPECT_EQ(outcome.code, code) << ::testing::PrintToString(arguments) << outcome.err;
      EXPECT_THAT(outcome.err, HasSubstr(path + ": "));
    }
  }
  EXPECT_EQ(RunKvtrie({"profile", "put", "/nonexistent/file"}).code, ExitCode::kNotFound);
  EXPECT_EQ(RunKvtrie({"profile", "put", "/dev/null"}).code, ExitCode::kFailed);
  EXPECT_EQ(RunKvtrie({"profile", "get", model, "/nonexistent/file"}).code, ExitCode::kFailed);
}

TEST(CliTest, OutputThatCannotBeWrittenIsAFailure) {
  std::ostream out(nullptr);  // as a full disk is: nothing can be written
  std::ostringstream err;
  const CliEnvironment environment{
      .out = out, .err = err, .variable = [](const std::string&) { return std::nullopt; }};
  EXPECT_EQ(RunCli(std::vector<std::string>{"version"}, environment), ExitCode::kFailed);
  EXPECT_THAT(err.str(), HasSubstr("version: the output cannot be written"));
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
           {"similar", "--model", std::string(32, '0'), "--tokens", "1", "--timeout", "1"},
           {"groups"},
           {"groups", "show", std::string(32, '0')},
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
    EXPECT_THAT(outcome.out, HasSubstr("\"profile fit\")"));
  }
}

TEST(CliTest, BashCompletesActionsAndTheirFlags) {
  const std::string script = ::testing::TempDir() + "/kvtrie-completion";
  std::ofstream(script) << RunKvtrie({"completion", "bash"}).out;
  const auto completed = [&](const std::string& words) {
    const std::string command = "bash -c 'source " + script + "; COMP_WORDS=(kvtrie " + words +
                                "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _kvtrie; "
                                "echo ${COMPREPLY[*]}' > " +
                                script + ".out";
    EXPECT_EQ(std::system(command.c_str()), 0);
    std::string line;
    std::ifstream file(script + ".out");
    std::getline(file, line);
    return line;
  };
  EXPECT_EQ(completed("prof"), "profiles profile");
  EXPECT_EQ(completed("profile s"), "seal");
  EXPECT_EQ(completed("profile seal --o"), "--out");
  EXPECT_EQ(completed("profile seal --sp"), "");
  EXPECT_EQ(completed("--server a profile code --sp"), "--spec");
  EXPECT_EQ(completed("bench lo"), "lookup");
  EXPECT_EQ(completed("bench lookup --pro"), "--prompts");
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
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("")), ExitCode::kFailed);
  EXPECT_EQ(ExitCodeOf(UsageError("")), ExitCode::kUsage);
}

}  // namespace
}  // namespace kvtrie
