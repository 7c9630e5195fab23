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

// A draft that codes differences, and a session that holds tokens 20 to 83 of another one.
class ProfileCodeAgainstTest : public ProfileCodeTest {
 protected:
  ProfileCodeAgainstTest()
      : again_(ShareTokens(folder_.spec(), text_, 20, 64, 37, 112, 98, 0.05f)) {
    folder_.WriteRepeated("repeated", 24);
    const CliOutcome fitted =
        RunKvtrie(With(folder_.FitArguments("with"), {"--repeated", folder_ / "repeated"}));
    EXPECT_EQ(fitted.code, ExitCode::kOk) << fitted.err;
    folder_.Write("again.tokens", ProfileFolder::BytesOf<TokenId>(again_.tokens));
    folder_.Write("again.kv", ProfileFolder::BytesOf<std::byte>(again_.raw));
  }

  std::vector<std::string> Alone(const std::string& level) const {
    return With(Arguments(level), {"--profile", folder_ / "with", "--tokens",
                                   folder_ / "again.tokens", "--kv", folder_ / "again.kv"});
  }
  std::vector<std::string> Against(const std::string& level, const std::string& other) const {
    return With(Alone(level), {"--against-tokens", folder_ / "tokens", "--against-kv",
                               folder_ / "kv", "--against-level", other});
  }

  SyntheticText again_;
};

TEST_F(ProfileCodeAgainstTest, SharedTextTakesLess) {
  for (const auto& [level, other] :
       {std::pair{"high", "near-exact"}, {"small", "high"}, {"high", "exact"}}) {
    const auto alone = Run(Alone(level));
    EXPECT_FALSE(alone.contains("referenced_tokens"));
    const auto against = Run(Against(level, other));
    EXPECT_EQ(against["against_level"], other);
    // Tokens 37 to 100 lie in blocks 2 to 6.
    EXPECT_EQ(against["referenced_blocks"], 5);
    EXPECT_EQ(against["referenced_tokens"], 64);
    std::size_t bytes = 0;
    for (std::size_t b = 0; b < 7; ++b) {
      const std::size_t own = against["block_bytes"][b], own_alone = alone["block_bytes"][b];
      if (b < 2) {
        EXPECT_EQ(own, own_alone);
      } else {
        EXPECT_LT(own, own_alone) << level << b;
        bytes += own;
      }
    }
    EXPECT_EQ(against["referenced_bytes"], bytes);
    EXPECT_DOUBLE_EQ(
        against["referenced_share_of_bytes"].get<double>(),
        static_cast<double>(bytes) / static_cast<double>(against["bytes"].get<std::size_t>()));
    const std::string whole(reinterpret_cast<const char*>(again_.raw.data()), again_.raw.size());
    EXPECT_LT(RootMeanSquare(folder_.Read("restored"), whole), 0.3) << level;
  }
}

TEST_F(ProfileCodeAgainstTest, WhatIsNotSharedIsAsAlone) {
  folder_.Write("tokens", ProfileFolder::BytesOf<TokenId>(MakeText(folder_.spec(), 104, 7).tokens));
  const auto against = Run(Against("high", "near-exact"));
  EXPECT_EQ(against["referenced_tokens"], 0);
  EXPECT_EQ(against["referenced_share_of_bytes"], 0);
  EXPECT_EQ(against["block_bytes"], Run(Alone("high"))["block_bytes"]);
}

TEST_F(ProfileCodeAgainstTest, MistakesAreNamedWithTheirCure) {
  folder_.Write("short", std::string(40, '\0'));
  const auto run = [&](const std::vector<std::string>& arguments, ExitCode code) {
    std::filesystem::remove(folder_ / "restored");
    const CliOutcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder_ / "restored"));
    return outcome.err;
  };
  EXPECT_THAT(run(With(Alone("high"), {"--against-level", "exact"}), ExitCode::kUsage),
              HasSubstr("say what to code against: give all of them, or none"));
  for (const auto& [level, other] : {std::pair{"high", "high"}, {"high", "small"}}) {
    EXPECT_THAT(
        run(Against(level, other), ExitCode::kUsage),
        HasSubstr(std::string("--against-level ") + other + ": must be finer than --level high"));
  }
  EXPECT_THAT(run(Against("exact", "exact"), ExitCode::kUsage),
              HasSubstr("level exact is coded against nothing"));
  const auto against = Against("high", "near-exact");
  EXPECT_THAT(run(With(against, {"--profile", folder_ / "draft"}), ExitCode::kFailed),
              HasSubstr("draft: cannot code a text against another"));
  EXPECT_THAT(run(With(against, {"--against-kv", folder_ / "short"}), ExitCode::kFailed),
              HasSubstr("--against-kv " + (folder_ / "short") + ": has 40 bytes"));
  EXPECT_THAT(run(With(against, {"--against-tokens", folder_ / "none"}), ExitCode::kNotFound),
              HasSubstr("--against-tokens " + (folder_ / "none") + ": cannot be opened"));
  ASSERT_EQ(RunKvtrie(With(folder_.FitArguments("two"),
                           {"--repeated", folder_ / "repeated", "--near-exact", "0"}))
                .code,
            ExitCode::kOk);
  EXPECT_THAT(run(With(against, {"--profile", folder_ / "two"}), ExitCode::kFailed),
              HasSubstr("has no level near-exact, which --against-level names"));
}

TEST(FindReferencesTest, RunsAreCutAtTheBlocksOfBoth) {
  const ModelSpec spec = SyntheticSpec();
  const SyntheticText other = MakeText(spec, 104, 99);
  const SyntheticText text = ShareTokens(spec, other, 20, 64, 37, 112, 98, 0.05f);
  RestoredSession restored;
  restored.tokens = other.tokens;
  restored.blocks = BlocksOfRun(spec, other.raw);
  restored.quality = Quality::kNearExact;
  const auto found = FindReferences(spec, restored, text.tokens);
  ASSERT_EQ(found.size(), 7u);
  std::size_t tokens = 0;
  for (std::size_t b = 0; b < found.size(); ++b) {
    std::size_t end = 0;
    for (const ReferenceRun& run : found[b].runs) {
      EXPECT_GE(run.first_token, end);
      end = run.first_token + run.token_count;
      EXPECT_LE(end, 16u);
      const ReferenceBlock& reference = found[b].references[run.reference];
      EXPECT_EQ(reference.quality, Quality::kNearExact);
      EXPECT_EQ(reference.raw.data(), restored.blocks[reference.first_position / 16].data());
      for (std::size_t i = 0; i < run.token_count; ++i, ++tokens) {
        EXPECT_EQ(reference.tokens[run.offset + i], text.tokens[16 * b + run.first_token + i]);
        EXPECT_EQ(16 * b + run.first_token + i - 37,
                  reference.first_position + run.offset + i - 20);
      }
    }
  }
  EXPECT_EQ(tokens, 64u);
  EXPECT_TRUE(found[1].runs.empty());
  EXPECT_EQ(found[2].runs.size(), 1u);
  EXPECT_EQ(found[3].runs.size(), 2u);
}

// A frame names no more blocks than a reader may have to decode first.
TEST(FindReferencesTest, ABlockHasSoManyReferencesAtMost) {
  const ModelSpec spec = WithBlocks(SyntheticSpec(), 1024);
  std::vector<TokenId> other(20 * 1024), text;
  for (std::size_t i = 0; i < other.size(); ++i) other[i] = static_cast<TokenId>(i);
  for (std::size_t run = 0; run < 20; ++run) {
    const auto from = other.begin() + static_cast<std::ptrdiff_t>(1024 * run + 100);
    text.insert(text.end(), from, from + 50);
  }
  text.resize(1024, 1u << 20);
  RestoredSession restored;
  restored.tokens = other;
  restored.blocks.resize(20);
  const auto found = FindReferences(spec, restored, text);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].references.size(), kReferencesMax);
  EXPECT_EQ(found[0].runs.size(), kReferencesMax);
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
