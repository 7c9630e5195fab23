#include "client/ctl/profile_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ctl/profile_files.h"
#include "client/ctl/progress.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/profile_header.h"
#include "storage/codec/residual_profile.h"
#include "tests/client/ctl/profile_fixture.h"

namespace kvtrie {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

nlohmann::json Parsed(const CliOutcome& outcome) {
  EXPECT_EQ(outcome.code, ExitCode::kOk) << outcome.err;
  return nlohmann::json::parse(outcome.out, nullptr, false);
}

std::vector<std::string> MaterialArguments(const ProfileFolder& folder, const std::string& out) {
  return {"profile",   "material",
          "--spec",    folder / "spec.json",
          "--samples", folder / "samples",
          "--queries", folder / "queries.f32",
          "--metrics", folder / "metrics.f32",
          "--rank",    "2",
          "--out",     folder / out};
}

TEST(ProfileMaterialTest, IsWhatQueriesAndMetricsSay) {
  const ProfileFolder folder;
  const CliOutcome outcome = RunKvtrie(MaterialArguments(folder, "material"));
  ASSERT_EQ(outcome.code, ExitCode::kOk) << outcome.err;
  const auto planes = PlanesOf(folder.spec());
  const auto material = FitMaterial::Decode(planes, folder.Read("material"));
  ASSERT_TRUE(material.ok()) << material.status();
  EXPECT_EQ(material->group_count, 1u);
  EXPECT_EQ(material->importance.query_heads, 4u);
  EXPECT_EQ(material->importance.covariance_rank, 2u);
  EXPECT_EQ(material->Encode(planes), [&] {
    FitMaterial expected = MakeMaterial(folder.spec(), folder.texts(), false);
    expected.metrics = material->metrics;
    return expected.Encode(planes);
  }());
  ASSERT_EQ(material->metrics.size(), planes.size());
  for (const auto& metric : material->metrics) {
    for (std::size_t i = 0; i < 16 * 16; ++i) {
      EXPECT_NEAR(metric[i], i / 16 == i % 16 ? 1 : 0, 1e-6);
    }
  }
}

TEST(ProfileFitTest, TheSameInputsGiveTheSameBytes) {
  const ProfileFolder folder;
  const std::vector<std::string> more = {"--metrics", folder / "metrics.f32", "--queries",
                                         folder / "queries.f32"};
  ASSERT_EQ(RunKvtrie(With(folder.FitArguments("a"), more)).code, ExitCode::kOk);
  ASSERT_EQ(RunKvtrie(With(folder.FitArguments("b"), more)).code, ExitCode::kOk);
  EXPECT_GT(folder.Read("a").size(), 1000u);
  EXPECT_TRUE(folder.Read("a") == folder.Read("b"));
}

TEST(ProfileFitTest, WithoutFiguresItIsADraftAndSaysSo) {
  const ProfileFolder folder;
  const CliOutcome outcome = RunKvtrie(folder.FitArguments("draft"));
  ASSERT_EQ(outcome.code, ExitCode::kOk) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("predictors"), HasSubstr("token table"), HasSubstr("near-exact"),
                    HasSubstr("not measured"), HasSubstr("A draft: no server takes it")));
  const auto draft = ReadProfileFile(folder / "draft");
  ASSERT_TRUE(draft.ok()) << draft.status();
  EXPECT_TRUE(draft->levels.empty());
  EXPECT_EQ(draft->codec_key, folder.spec().CodecKey());
  const auto body = ResidualProfile::DecodeBody(draft->body);
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(body->levels.size(), 3u);
  // A server's check of the same bytes.
  EXPECT_FALSE(ParseProfileHeader(AsBytes(folder.Read("draft"))).ok());
  const CliOutcome put = RunKvtrie({"profile", "put", folder / "draft"});
  EXPECT_EQ(put.code, ExitCode::kFailed);
  EXPECT_THAT(put.err, HasSubstr("is a draft: measure its levels"));
}

TEST(ProfileFitTest, SaysSizesAndBitsAsJson) {
  const ProfileFolder folder;
  std::vector<std::string> arguments = folder.FitArguments("draft");
  arguments.push_back("--json");
  const auto json = Parsed(RunKvtrie(arguments));
  EXPECT_EQ(json["bytes"], std::filesystem::file_size(folder / "draft"));
  EXPECT_EQ(json["draft"], true);
  EXPECT_EQ(json["texts"], 4);
  EXPECT_EQ(json["tokens"], 400);
  std::size_t parts = 0;
  for (const auto& part : json["parts"]) parts += part.get<std::size_t>();
  EXPECT_EQ(parts, ReadProfileFile(folder / "draft")->body.size());
  ASSERT_EQ(json["levels"].size(), 3u);
  EXPECT_EQ(json["levels"][0]["quality"], "high");
  EXPECT_EQ(json["levels"][0]["step"], 0.25);
  // Finer steps take more bits, and all less than what was put in.
  const double high = json["levels"][0]["fitted_texts_bits_per_component"];
  const double near_exact = json["levels"][1]["fitted_texts_bits_per_component"];
  const double small = json["levels"][2]["fitted_texts_bits_per_component"];
  EXPECT_LT(small, high);
  EXPECT_LT(high, near_exact);
  EXPECT_LT(near_exact, 32);
  EXPECT_GT(small, 0);
}

std::string Figures(const std::string& digest, const std::string& mean_kl) {
  return R"({"body_digest": ")" + digest + R"(", "levels": [
    {"quality": "high", "bits_per_component": 4, "mean_kl": )" +
         mean_kl + R"(, "kl_p99": 0.1},
    {"quality": "near-exact", "bits_per_component": 8, "mean_kl": 0.001, "kl_p99": 0.1},
    {"quality": "small", "bits_per_component": 2, "mean_kl": 0.05, "kl_p99": 0.1}]})";
}

TEST(ProfileSealTest, MakesADraftAProfileAndAProfileANewOne) {
  const ProfileFolder folder;
  ASSERT_EQ(RunKvtrie(folder.FitArguments("draft")).code, ExitCode::kOk);
  const auto draft = ReadProfileFile(folder / "draft");
  ASSERT_TRUE(draft.ok());
  folder.Write("measured", Figures(BodyDigest(draft->body).ToHex(), "0.009"));
  const auto seal = [&](const std::string& from, const std::string& to) {
    return RunKvtrie({"profile", "seal", folder / from, "--measured", folder / "measured", "--out",
                      folder / to});
  };
  ASSERT_EQ(seal("draft", "first").code, ExitCode::kOk);
  const auto first = ReadProfileFile(folder / "first");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->body == draft->body);
  ASSERT_EQ(first->levels.size(), 3u);
  EXPECT_EQ(first->levels[0].mean_kl, 0.009f);

  folder.Write("measured", Figures(BodyDigest(draft->body).ToHex(), "0.005"));
  ASSERT_EQ(seal("first", "second").code, ExitCode::kOk);
  EXPECT_EQ(ReadProfileFile(folder / "second")->levels[0].mean_kl, 0.005f);

  // The same as a fit that is given the figures at once.
  ASSERT_EQ(
      RunKvtrie(With(folder.FitArguments("fitted"), {"--measured", folder / "measured"})).code,
      ExitCode::kOk);
  EXPECT_TRUE(folder.Read("fitted") == folder.Read("second"));

  folder.Write("measured", Figures(BodyDigest(draft->body).ToHex(), "0.02"));
  const CliOutcome broken = seal("draft", "third");
  EXPECT_EQ(broken.code, ExitCode::kFailed);
  EXPECT_THAT(broken.err, HasSubstr("promises at most 0.01"));
  EXPECT_FALSE(std::filesystem::exists(folder / "third"));
}

TEST(ProfileFitTest, FiguresOfAnotherFitAreRefused) {
  const ProfileFolder folder;
  ASSERT_EQ(RunKvtrie(folder.FitArguments("draft")).code, ExitCode::kOk);
  folder.Write("measured",
               Figures(BodyDigest(ReadProfileFile(folder / "draft")->body).ToHex(), "0.009"));
  const CliOutcome other = RunKvtrie(
      With(folder.FitArguments("other"), {"--measured", folder / "measured", "--high", "0.3"}));
  EXPECT_EQ(other.code, ExitCode::kFailed);
  EXPECT_THAT(other.err, HasSubstr("measure it again"));
  EXPECT_FALSE(std::filesystem::exists(folder / "other"));
}

TEST(ProfileFitTest, MistakesAreNamedWithTheirCure) {
  const ProfileFolder folder;
  folder.Write("cut", "12");
  folder.Write("short", std::string(40, '\0'));
  const auto fit = [&](const std::vector<std::string>& more) {
    const CliOutcome outcome = RunKvtrie(With(folder.FitArguments("out"), more));
    EXPECT_NE(outcome.code, ExitCode::kOk);
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
    return outcome.err;
  };
  folder.Write("empty", "");
  for (const char* flag : {"--metrics", "--queries", "--material", "--spec", "--measured"}) {
    EXPECT_THAT(fit({flag, folder / "empty"}),
                HasSubstr(flag + (" " + (folder / "empty")) + ": is empty"));
  }
  EXPECT_THAT(fit({"--metrics", folder / "cut"}), HasSubstr("cut: has 2 bytes"));
  EXPECT_THAT(fit({"--metrics", folder / "short"}),
              HasSubstr("short: has 10 numbers, and this model takes 1024: [plane][KV head]"));
  EXPECT_THAT(fit({"--queries", folder / "short"}),
              HasSubstr("short: has 10 numbers, and this model takes 288 for each query head"));
  EXPECT_THAT(fit({"--material", folder / "short"}), HasSubstr("short: "));
  EXPECT_THAT(fit({"--material", folder / "none"}), HasSubstr("none: cannot be opened"));
  EXPECT_THAT(fit({"--samples", folder / "none"}), HasSubstr("none: cannot be read"));
  EXPECT_THAT(fit({"--spec", folder / "cut"}), HasSubstr("ModelSpec"));
  EXPECT_THAT(fit({"--inputs", "below,above"}), HasSubstr("'above' is none; they are below"));
  EXPECT_THAT(fit({"--ridge", "0"}), HasSubstr("--ridge 0: must be 1e-30 to"));
  EXPECT_THAT(fit({"--high", "1e300"}), HasSubstr("--high 1e300: must be 0, or 1e-30 to 1e+30"));
  EXPECT_THAT(fit({"--small", "1e-60"}), HasSubstr("--small 1e-60: must be 0, or 1e-30 to 1e+30"));
  EXPECT_THAT(fit({"--energy-carried", "2"}), HasSubstr("--energy-carried 2: must be 0, or"));
  EXPECT_THAT(fit({"--high", "0", "--near-exact", "0", "--small", "0"}),
              HasSubstr("there are no default steps"));
  EXPECT_THAT(fit({"--metrics", folder / "metrics.f32", "--high", "0", "--near-exact", "0",
                   "--small", "0"}),
              HasSubstr("give one of --high, --near-exact and --small a step above 0"));
  EXPECT_THAT(fit({"--measured", folder / "cut"}), HasSubstr("cut: is no JSON object"));
  EXPECT_THAT(fit({"--material", folder / "short", "--queries", folder / "queries.f32"}),
              HasSubstr("give one or the other"));
}

ResidualProfile BodyOf(const ProfileFolder& folder, const std::string& name) {
  const auto file = ReadProfileFile(folder / name);
  EXPECT_TRUE(file.ok()) << file.status();
  return ResidualProfile::DecodeBody(file->body).value();
}

TEST(ProfileFitTest, RepeatedTextsGiveDifferencesAndChangeNothingElse) {
  const ProfileFolder folder;
  folder.WriteRepeated("repeated", 24);
  ASSERT_EQ(RunKvtrie(folder.FitArguments("without")).code, ExitCode::kOk);
  std::vector<std::string> arguments =
      With(folder.FitArguments("with"), {"--repeated", folder / "repeated"});
  arguments.push_back("--json");
  const auto json = Parsed(RunKvtrie(arguments));
  EXPECT_EQ(json["texts"], 4);
  EXPECT_GE(json["shared_tokens"], 24 * 88);  // a token before or behind them may be the same
  EXPECT_GT(json["parts"]["differences"], 100);
  ResidualProfile with = BodyOf(folder, "with");
  ASSERT_EQ(with.differences.size(), 1u);
  EXPECT_EQ(with.differences[0].levels[0].step, 4 * with.levels[0].step);
  with.differences.clear();
  EXPECT_TRUE(with.EncodeBody() == BodyOf(folder, "without").EncodeBody());

  // Text that samples share by chance gives none.
  folder.WriteRepeated("samples", 32);
  ASSERT_EQ(RunKvtrie(folder.FitArguments("chance")).code, ExitCode::kOk);
  EXPECT_TRUE(BodyOf(folder, "chance").differences.empty());
}

TEST(ProfileFitTest, DifferencesCanBeAddedToADraft) {
  const ProfileFolder folder;
  folder.WriteRepeated("repeated", 24);
  ASSERT_EQ(RunKvtrie(folder.FitArguments("without")).code, ExitCode::kOk);
  ASSERT_EQ(RunKvtrie(With(folder.FitArguments("with"), {"--repeated", folder / "repeated"})).code,
            ExitCode::kOk);
  const auto add = [&](const std::string& out, const std::string& steps) {
    return RunKvtrie({"profile", "fit", "--base", folder / "without", "--spec",
                      folder / "spec.json", "--samples", folder / "samples", "--repeated",
                      folder / "repeated", "--difference-steps", steps, "--out", folder / out});
  };
  ASSERT_EQ(add("added", "4").code, ExitCode::kOk);
  EXPECT_TRUE(folder.Read("added") == folder.Read("with"));
  ASSERT_EQ(add("finer", "0.5").code, ExitCode::kOk);
  const ResidualProfile finer = BodyOf(folder, "finer");
  EXPECT_EQ(finer.differences[0].levels[0].step, finer.levels[0].step / 2);
}

TEST(ProfileFitTest, RepeatedTextsThatAreNoneAreNamed) {
  const ProfileFolder folder;
  folder.WriteRepeated("few", 20);
  std::filesystem::create_directory(folder / "empty");
  ASSERT_EQ(RunKvtrie(folder.FitArguments("draft")).code, ExitCode::kOk);
  const auto fit = [&](const std::vector<std::string>& arguments,
                       const std::vector<std::string>& more, ExitCode code) {
    const CliOutcome outcome = RunKvtrie(With(arguments, more));
    EXPECT_EQ(outcome.code, code);
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
    return outcome.err;
  };
  const std::vector<std::string> whole = folder.FitArguments("out");
  EXPECT_THAT(fit(whole, {"--repeated", folder / "empty"}, ExitCode::kFailed),
              HasSubstr("--repeated " + (folder / "empty") + ": has no samples"));
  EXPECT_THAT(fit(whole, {"--repeated", folder / "none"}, ExitCode::kNotFound),
              HasSubstr("--repeated " + (folder / "none") + ": cannot be read"));
  EXPECT_THAT(
      fit(whole, {"--repeated", folder / "few"}, ExitCode::kFailed),
      AllOf(HasSubstr("few: has 17"), HasSubstr(" tokens in runs of 32 or more that --samples"),
            HasSubstr("must have 2000")));
  EXPECT_THAT(fit(whole, {"--difference-steps", "0"}, ExitCode::kUsage),
              HasSubstr("--difference-steps 0: must be"));
  EXPECT_THAT(fit(whole, {"--difference-steps", "2"}, ExitCode::kUsage),
              HasSubstr("--difference-steps: there are no differences without --repeated"));
  // Their tokens stand there at the same places: nothing is shared behind another prefix.
  EXPECT_THAT(fit(whole, {"--repeated", folder / "samples"}, ExitCode::kFailed),
              HasSubstr("samples: has 0 tokens"));

  const std::vector<std::string> base = {"profile",   "fit",
                                         "--spec",    folder / "spec.json",
                                         "--samples", folder / "samples",
                                         "--base",    folder / "draft",
                                         "--out",     folder / "out"};
  EXPECT_THAT(fit(base, {}, ExitCode::kUsage), HasSubstr("--base: only differences"));
  EXPECT_THAT(fit(base, {"--repeated", folder / "few", "--high", "1"}, ExitCode::kUsage),
              HasSubstr("--high: --base has that already"));
  folder.WriteRepeated("repeated", 24);
  EXPECT_THAT(fit(base, {"--repeated", folder / "repeated", "--base", folder / "none"},
                  ExitCode::kNotFound),
              HasSubstr("--base " + (folder / "none") + ": cannot be opened"));
  std::string other(ProfileFolder::kSpecJson);
  other.replace(other.find("synthetic"), 9, "another");
  folder.Write("other.json", other);
  EXPECT_THAT(fit(base, {"--repeated", folder / "repeated", "--spec", folder / "other.json"},
                  ExitCode::kFailed),
              HasSubstr("draft: is of another model than"));
}

// A token that no text has, and one that texts have.
TEST(ProfileFitTest, TheTokenTableHasTheVocabulary) {
  const ProfileFolder folder;
  const std::size_t width = 32;
  std::string bytes;
  for (const std::uint32_t token : {777u, 2u}) {
    bytes.append(reinterpret_cast<const char*>(&token), sizeof token);
  }
  bytes.append(2 * width * sizeof(float), '\0');
  folder.Write("vocabulary", bytes);
  const auto tokens_of = [&](const std::string& name) {
    const auto file = ReadProfileFile(folder / name);
    const auto profile = ResidualProfile::DecodeBody(file->body);
    return profile->table_tokens;
  };
  ASSERT_EQ(RunKvtrie(With(folder.FitArguments("without"), {"--table", "1000"})).code,
            ExitCode::kOk);
  const CliOutcome with = RunKvtrie(With(
      folder.FitArguments("with"), {"--table", "1000", "--vocabulary", folder / "vocabulary"}));
  ASSERT_EQ(with.code, ExitCode::kOk) << with.err;
  std::vector<TokenId> expected = tokens_of("without");
  expected.push_back(777);
  EXPECT_EQ(tokens_of("with"), expected);

  folder.Write("vocabulary", bytes.substr(4));
  const CliOutcome cut =
      RunKvtrie(With(folder.FitArguments("out"), {"--vocabulary", folder / "vocabulary"}));
  EXPECT_EQ(cut.code, ExitCode::kFailed);
  EXPECT_THAT(cut.err, HasSubstr("vocabulary: has 65 words of 4 bytes, and a token takes 33"));
}

TEST(ProfileFitTest, StepsAreGivenWhereThereIsNoMetric) {
  const ProfileFolder folder;
  std::vector<std::string> arguments = With(
      folder.FitArguments("out"),
      {"--metrics", folder / "metrics.f32", "--high", "0", "--near-exact", "0", "--small", "0"});
  arguments.push_back("--no-metric");
  const CliOutcome outcome = RunKvtrie(arguments);
  EXPECT_EQ(outcome.code, ExitCode::kUsage);
  EXPECT_THAT(outcome.err, HasSubstr("with --no-metric, there are no default steps"));
}

// Long work is not begun for what is told at once that it fails.
TEST(ProfileFitTest, WhatIsWrittenInTheEndIsCheckedFirst) {
  const ProfileFolder folder;
  folder.Write("cut", "12");
  const std::string none = folder / "none/out";
  for (const auto& arguments : {folder.FitArguments("out"), MaterialArguments(folder, "out")}) {
    const CliOutcome outcome =
        RunKvtrie(With(arguments, {"--samples", folder / "none", "--out", none}));
    EXPECT_EQ(outcome.code, ExitCode::kFailed);
    EXPECT_THAT(outcome.err,
                HasSubstr("--out " + none + ": cannot be written: there is no folder"));
  }
  EXPECT_THAT(RunKvtrie(With(folder.FitArguments("out"),
                             {"--samples", folder / "none", "--measured", folder / "cut"}))
                  .err,
              HasSubstr("--measured " + (folder / "cut") + ": is no JSON object"));
}

TEST(ProfileFitTest, MaterialOfEachHeadNeedsHeads) {
  const ProfileFolder folder;
  std::vector<std::string> arguments = MaterialArguments(folder, "material");
  arguments.push_back("--heads");
  ASSERT_EQ(RunKvtrie(arguments).code, ExitCode::kOk);
  arguments = With(folder.FitArguments("out"), {"--material", folder / "material"});
  const CliOutcome outcome = RunKvtrie(arguments);
  EXPECT_EQ(outcome.code, ExitCode::kUsage);
  EXPECT_THAT(outcome.err, HasSubstr("was made with --heads: give --heads here too"));
  arguments.push_back("--heads");
  EXPECT_EQ(RunKvtrie(arguments).code, ExitCode::kOk);
}

TEST(ProfileVerbTest, EachCommandTakesItsOwnFlags) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"profile", "fit"}, "needs --spec"},
      {{"profile", "fit", "file"}, "does not take 'file'"},
      {{"profile", "material", "--spec", "s", "--samples", "s", "--out", "o"}, "needs --queries"},
      {{"profile", "seal", "file", "--out", "o"}, "needs --measured"},
      {{"profile", "code", "--spec", "s"}, "needs --profile"},
      {{"profile", "put", "file", "--high", "1"}, "profile put: unknown flag --high"},
      {{"profile", "seal", "file", "--measured", "m", "--out", "o", "--spec", "s"},
       "unknown flag --spec"},
      {{"profile", "code", "--level", "best"}, "must be exact|near-exact|high|small"},
  };
  for (const auto& [arguments, what] : cases) {
    const CliOutcome outcome = RunKvtrie(arguments);
    EXPECT_EQ(outcome.code, ExitCode::kUsage) << what;
    EXPECT_THAT(outcome.err, HasSubstr(what));
  }
}

TEST(ProgressTest, ShowsLongWorkOnOneLine) {
  std::ostringstream err;
  {
    Progress progress(err, /*is_terminal=*/true, std::chrono::seconds(0));
    progress.Report(0.051, "a long name");
    progress.Report(1, "short");
  }
  EXPECT_EQ(err.str(), "\r  5 %  a long name\r100 %  short      \n");
}

TEST(ProgressTest, IsALineForEachTenthWhereThereIsNoTerminal) {
  std::ostringstream err;
  {
    Progress progress(err, /*is_terminal=*/false, std::chrono::seconds(0));
    for (int i = 0; i <= 1000; ++i) progress.Report(i / 1000.0, i < 500 ? "tables" : "steps");
  }
  std::string expected = "  0 %  tables\n";
  for (int percent = 10; percent < 100; percent += 10) {
    expected += absl::StrCat(" ", percent, " %  ", percent < 50 ? "tables" : "steps", "\n");
  }
  EXPECT_EQ(err.str(), expected + "100 %  steps\n");
}

TEST(ProgressTest, OtherLinesStandBetween) {
  std::ostringstream err;
  {
    Progress progress(err, /*is_terminal=*/true, std::chrono::seconds(0));
    progress.Report(0.5, "work");
    progress.EndLine();
    err << "found\n";
    progress.Report(0.6, "work");
  }
  EXPECT_EQ(err.str(), "\r 50 %  work\nfound\n\r 60 %  work\n");
}

TEST(ProgressTest, ShortWorkShowsNothing) {
  std::ostringstream err;
  for (const bool is_terminal : {false, true}) {
    Progress(err, is_terminal, std::chrono::hours(1)).Report(0.5, "work");
  }
  EXPECT_EQ(err.str(), "");
}

}  // namespace
}  // namespace kvtrie
