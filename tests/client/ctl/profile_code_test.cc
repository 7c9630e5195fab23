#include "client/ctl/profile_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/ctl/profile_files.h"
#include "tests/client/ctl/profile_fixture.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

// A folder with a draft, and a text that it was not fitted to.
class ProfileCodeTest : public ::testing::Test {
 protected:
  ProfileCodeTest() : text_(MakeText(folder_.spec(), 104, 99)) {
    const CliOutcome fitted = RunKvtrie(folder_.FitArguments("draft"));
    EXPECT_EQ(fitted.code, ExitCode::kOk) << fitted.err;
    folder_.Write("tokens", ProfileFolder::BytesOf<TokenId>(text_.tokens));
    folder_.Write("kv", ProfileFolder::BytesOf<std::byte>(text_.raw));
  }

  std::vector<std::string> Arguments(const std::string& level) const {
    return {"profile",   "code",
            "--spec",    folder_ / "spec.json",
            "--level",   level,
            "--profile", folder_ / "draft",
            "--tokens",  folder_ / "tokens",
            "--kv",      folder_ / "kv",
            "--out",     folder_ / "restored"};
  }
  nlohmann::json Run(const std::vector<std::string>& arguments) const {
    const CliOutcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, ExitCode::kOk) << outcome.err;
    return nlohmann::json::parse(outcome.out, nullptr, false);
  }

  // The first 96 tokens of the text, which are whole blocks.
  std::string WholeBlocks() const {
    const KvGeometry of_text(WithBlocks(folder_.spec(), 104)),
        of_run(WithBlocks(folder_.spec(), 96));
    std::string run;
    for (std::uint32_t layer = 0; layer < of_run.layer_count(); ++layer) {
      for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
        run.append(
            reinterpret_cast<const char*>(text_.raw.data()) + of_text.kind_begin(layer, kind),
            of_run.kind_bytes(layer, kind));
      }
    }
    return run;
  }
  static double RootMeanSquare(const std::string& a, const std::string& b) {
    EXPECT_EQ(a.size(), b.size());
    std::vector<float> x(a.size() / 4), y(x.size());
    std::memcpy(x.data(), a.data(), a.size());
    std::memcpy(y.data(), b.data(), b.size());
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += std::pow(double{x[i]} - y[i], 2);
    return std::sqrt(sum / static_cast<double>(x.size()));
  }

  ProfileFolder folder_;
  SyntheticText text_;
};

TEST_F(ProfileCodeTest, ExactGivesTheSameBytesBack) {
  const auto json = Run(Arguments("exact"));
  EXPECT_TRUE(folder_.Read("restored") == WholeBlocks());
  EXPECT_EQ(json["tokens"], 96);
  EXPECT_EQ(json["blocks"], 6);
}

TEST_F(ProfileCodeTest, FinerLevelsAreNearerAndLarger) {
  double bits = 0, error = std::numeric_limits<double>::max();
  for (const char* const level : {"small", "high", "near-exact"}) {
    const auto json = Run(Arguments(level));
    EXPECT_GT(json["bits_per_component"].get<double>(), bits) << level;
    const double of_level = RootMeanSquare(folder_.Read("restored"), WholeBlocks());
    EXPECT_LT(of_level, error) << level;
    EXPECT_GT(of_level, 0);
    bits = json["bits_per_component"];
    error = of_level;
  }
}

TEST_F(ProfileCodeTest, CountsAllThatAStoreWouldKeep) {
  const auto json = Run(With(Arguments("high"), {"--block-tokens", "32", "--rounds", "2"}));
  ASSERT_EQ(json["block_bytes"].size(), 3u);
  std::size_t sum = 0;
  for (const auto& bytes : json["block_bytes"]) sum += bytes.get<std::size_t>();
  EXPECT_EQ(json["bytes"], sum);
  EXPECT_EQ(json["raw_bytes"], WholeBlocks().size());
  EXPECT_EQ(json["components"], WholeBlocks().size() / 4);
  EXPECT_DOUBLE_EQ(json["bits_per_component"].get<double>(),
                   8.0 * static_cast<double>(sum) / static_cast<double>(WholeBlocks().size() / 4));
  EXPECT_GT(json["encode_mb_per_second"], 0);
  EXPECT_GT(json["decode_mb_per_second"], 0);
  EXPECT_EQ(json["level"], "high");
  EXPECT_EQ(json["body_digest"], BodyDigest(ReadProfileFile(folder_ / "draft")->body).ToHex());
}

TEST_F(ProfileCodeTest, TokensThatAreNotFiniteAreKeptAndCounted) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Component 0 of K of layer 0, token 40.
  std::memcpy(text_.raw.data() + 40 * 16 * sizeof(float), &nan, sizeof nan);
  folder_.Write("kv", ProfileFolder::BytesOf<std::byte>(text_.raw));
  const auto json = Run(Arguments("high"));
  EXPECT_EQ(json["exact_tokens"], 1);
  float restored = 0;
  std::memcpy(&restored, folder_.Read("restored").data() + 40 * 16 * sizeof(float),
              sizeof restored);
  EXPECT_TRUE(std::isnan(restored));
}

TEST_F(ProfileCodeTest, BlocksThatTheCodecDeclinesAreLossless) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t token = 16; token < 32; ++token) {
    std::memcpy(text_.raw.data() + token * 16 * sizeof(float), &nan, sizeof nan);
  }
  folder_.Write("kv", ProfileFolder::BytesOf<std::byte>(text_.raw));
  const auto json = Run(Arguments("high"));
  EXPECT_EQ(json["exact_tokens"], 16);
  const std::string restored = folder_.Read("restored"), put = WholeBlocks();
  const KvGeometry of_run(WithBlocks(folder_.spec(), 96));
  for (std::uint32_t layer = 0; layer < of_run.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t at = of_run.kind_begin(layer, kind) + of_run.kind_bytes(layer, kind) / 6;
      EXPECT_TRUE(restored.substr(at, of_run.kind_bytes(layer, kind) / 6) ==
                  put.substr(at, of_run.kind_bytes(layer, kind) / 6));
    }
  }
}

TEST_F(ProfileCodeTest, MistakesAreNamedWithTheirCure) {
  folder_.Write("short", std::string(40, '\0'));
  std::string other(ProfileFolder::kSpecJson);
  other.replace(other.find("synthetic"), 9, "another");
  folder_.Write("other.json", other);
  const auto run = [&](const std::vector<std::string>& more) {
    std::filesystem::remove(folder_ / "restored");
    const CliOutcome outcome = RunKvtrie(With(Arguments("high"), more));
    EXPECT_NE(outcome.code, ExitCode::kOk);
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder_ / "restored"));
    return outcome.err;
  };
  EXPECT_THAT(run({"--spec", folder_ / "other.json"}), HasSubstr("is of another model"));
  EXPECT_THAT(run({"--kv", folder_ / "short"}), HasSubstr("short: has 40 bytes, and KV of 104"));
  EXPECT_THAT(run({"--kv", folder_ / "none"}), HasSubstr("none: cannot be opened"));
  EXPECT_THAT(run({"--tokens", folder_ / "short"}), HasSubstr("has 10 tokens, and a block has 16"));
  EXPECT_THAT(run({"--profile", folder_ / "short"}), HasSubstr("is neither a profile nor a draft"));
  EXPECT_THAT(run({"--out", folder_ / "none/out", "--spec", folder_ / "other.json"}),
              HasSubstr("--out " + (folder_ / "none/out") + ": cannot be written"));
  folder_.Write("empty", "");
  for (const char* flag : {"--spec", "--profile", "--tokens", "--kv"}) {
    EXPECT_THAT(run({flag, folder_ / "empty"}),
                HasSubstr(flag + (" " + (folder_ / "empty")) + ": is empty"));
  }
  ASSERT_EQ(
      RunKvtrie(With(folder_.FitArguments("one_level"), {"--small", "0", "--high", "0"})).code,
      ExitCode::kOk);
  EXPECT_THAT(run({"--profile", folder_ / "one_level"}), HasSubstr("has no level high"));
}

TEST_F(ProfileCodeTest, ImportanceOfTokensChangesStepsOrIsRefused) {
  const std::vector<std::string> queries = {"--queries", folder_ / "queries.f32"};
  ASSERT_EQ(RunKvtrie(With(folder_.FitArguments("follows"), queries)).code, ExitCode::kOk);
  ASSERT_EQ(
      RunKvtrie(With(With(folder_.FitArguments("even"), queries), {"--importance", "0"})).code,
      ExitCode::kOk);
  std::vector<float> numbers(104, 1);
  for (std::size_t i = 0; i < 32; ++i) numbers[i] = 16;
  const auto write = [&](const std::string& name, std::size_t count) {
    folder_.Write(name, ProfileFolder::BytesOf<float>(std::span(numbers).first(count)));
  };
  write("good", 104);
  const auto with = [&](const std::string& level, const std::string& profile,
                        const std::string& name) {
    return With(Arguments(level),
                {"--profile", folder_ / profile, "--token-importance", folder_ / name});
  };
  // Tokens that count for more have finer steps.
  const auto finer = Run(with("high", "follows", "good"));
  numbers.assign(104, 1);
  write("even_numbers", 104);
  const auto plain = Run(with("high", "follows", "even_numbers"));
  EXPECT_GT(finer["block_bytes"][0], plain["block_bytes"][0]);
  EXPECT_EQ(finer["block_bytes"][4], plain["block_bytes"][4]);

  const auto refused = [&](const std::vector<std::string>& arguments, ExitCode code) {
    const CliOutcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  for (const char* profile : {"draft", "even"}) {
    EXPECT_THAT(refused(with("high", profile, "good"), ExitCode::kFailed),
                HasSubstr(folder_ / profile + ": steps of level high follow no importance"));
  }
  EXPECT_THAT(refused(with("exact", "follows", "good"), ExitCode::kUsage),
              HasSubstr("--token-importance: level exact has no steps"));
  EXPECT_THAT(refused(with("high", "follows", "none"), ExitCode::kNotFound),
              HasSubstr("--token-importance " + (folder_ / "none") + ": cannot be opened"));
  write("short", 103);
  EXPECT_THAT(refused(with("high", "follows", "short"), ExitCode::kFailed),
              HasSubstr("short: has 103 numbers, and there are 104 tokens: write one for each"));
  for (const auto& [value, text] : {std::pair{std::numeric_limits<float>::quiet_NaN(), "nan"},
                                    {std::numeric_limits<float>::infinity(), "inf"},
                                    {-0.5f, "-0.5"},
                                    {0.0f, "0"}}) {
    numbers[40] = value;
    write("wrong", 104);
    EXPECT_THAT(refused(with("high", "follows", "wrong"), ExitCode::kFailed),
                HasSubstr("--token-importance " + (folder_ / "wrong") +
                          ": number 40 (from 0 on) is " + text + ": write a finite one above 0"));
  }
}

}  // namespace
}  // namespace kvtrie
