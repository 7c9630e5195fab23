#include "client/ctl/profile_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "storage/base/byte_reader.h"
#include "tests/client/ctl/profile_fixture.h"

namespace kvtrie {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(MappedFileTest, SaysWhatIsWrong) {
  const ScratchFolder folder;
  const auto missing = MappedFile::Open(folder / "missing");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(missing.status()), HasSubstr(folder / "missing"));
  EXPECT_THAT(Message(MappedFile::Open(folder.path()).status()), HasSubstr("no regular file"));
  ASSERT_TRUE(WriteFile(folder / "empty", "").ok());
  const auto empty = MappedFile::Open(folder / "empty");
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(empty.status()), HasSubstr("empty: is empty: write it again"));
}

TEST(MappedFileTest, NumbersAreWhole) {
  const ScratchFolder folder;
  ASSERT_TRUE(WriteFile(folder / "numbers", std::string("\1\0\0\0\2\0\0\0", 8)).ok());
  const auto file = MappedFile::Open(folder / "numbers");
  ASSERT_TRUE(file.ok());
  const auto numbers = NumbersOf<TokenId>(*file, "numbers");
  ASSERT_TRUE(numbers.ok());
  EXPECT_THAT(std::vector<TokenId>(numbers->begin(), numbers->end()),
              ::testing::ElementsAre(1u, 2u));
  ASSERT_TRUE(WriteFile(folder / "cut", std::string(7, 'x')).ok());
  EXPECT_THAT(Message(NumbersOf<TokenId>(*MappedFile::Open(folder / "cut"), "cut").status()),
              HasSubstr("has 7 bytes, must have a multiple of 4"));
}

TEST(CheckCanWriteTest, SaysBeforehandWhatWriteFileWouldSay) {
  const ScratchFolder folder;
  ASSERT_TRUE(WriteFile(folder / "there", "x").ok());
  EXPECT_TRUE(CheckCanWrite(folder / "there").ok());
  EXPECT_TRUE(CheckCanWrite(folder / "new").ok());
  EXPECT_EQ(*MappedFile::Open(folder / "there")->text().data(), 'x');
  std::filesystem::create_directory(folder / "taken");
  std::filesystem::create_symlink("/dev/null", folder / "device");
  const std::pair<std::string, const char*> cases[] = {
      {"", "is no name of a file"},
      {folder / "none/file", "there is no folder"},
      {folder / "there/file", "there is no folder"},
      {folder / "taken", "no regular file"},
      {folder / "device", "no regular file"},
      {folder / std::string(300, 'x'), "cannot be written: File name too long"},
  };
  for (const auto& [path, what] : cases) {
    const absl::Status status = CheckCanWrite(path);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_THAT(Message(status), AllOf(HasSubstr(path), HasSubstr(what)));
    EXPECT_EQ(WriteFile(path, "y"), status);
  }
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++entries;
  }
  EXPECT_EQ(entries, 3u);
}

TEST(WriteFileTest, LeavesNothingWhereItCannotWrite) {
  const ScratchFolder folder;
  EXPECT_THAT(Message(WriteFile(folder / "none/file", "x")), HasSubstr("cannot be written"));
  std::filesystem::create_directory(folder / "taken");
  EXPECT_FALSE(WriteFile(folder / "taken", "x").ok());
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++entries;
  }
  EXPECT_EQ(entries, 1u);
}

TEST(ReadModelSpecTest, IsProto3Json) {
  const ProfileFolder folder;
  const auto spec = ReadModelSpec(folder / "spec.json");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(*spec, folder.spec());
}

TEST(ReadModelSpecTest, NamesTheFieldThatIsWrong) {
  const ProfileFolder folder;
  const std::string good(ProfileFolder::kSpecJson);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  const std::pair<std::string, const char*> cases[] = {
      {"", "is empty"},
      {"[]", "is not the JSON"},
      {good.substr(0, 100), "is not the JSON"},
      {replaced("\"name\"", "\"nmae\""), "nmae"},
      {replaced("DTYPE_FLOAT32", "DTYPE_FLOAT31"), "DTYPE_FLOAT31"},
      {replaced("\"dtype\": \"DTYPE_FLOAT32\",", ""), "dtype"},
      {replaced("\"k_head_dim\": 8", "\"k_head_dim\": 5000"), "k_head_dim"},
      {replaced("\"layer_count\": 4", "\"layer_count\": -4"), "-4"},
      {replaced("\"block_tokens\": 16", "\"layout_tag\": \"paged\", \"block_tokens\": 16"),
       "layout_tag"},
      {std::string((1 << 20) + 1, ' '), "larger than 1 MiB"},
  };
  for (const auto& [text, what] : cases) {
    folder.Write("spec.json", text);
    const auto spec = ReadModelSpec(folder / "spec.json");
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_THAT(Message(spec.status()), AllOf(HasSubstr(folder / "spec.json"), HasSubstr(what)));
  }
}

TEST(ReadSamplesTest, FindsTextsInTheOrderOfTheirNames) {
  const ProfileFolder folder;
  std::filesystem::remove(folder / "samples/2.importance");
  const auto found = ReadSamples(folder.spec(), folder / "samples");
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_THAT(found->names, ::testing::ElementsAre("0", "1", "2", "3"));
  for (std::size_t i = 0; i < 4; ++i) {
    const SyntheticText& text = folder.texts()[i];
    EXPECT_TRUE(std::ranges::equal(found->samples[i].tokens, text.tokens));
    EXPECT_TRUE(std::ranges::equal(found->samples[i].raw, text.raw));
    EXPECT_EQ(found->samples[i].importance.size(), i == 2 ? 0 : text.importance.size());
  }
}

TEST(ReadSamplesTest, NamesTheFileThatIsWrong) {
  const auto read = [](const ProfileFolder& folder) {
    const auto found = ReadSamples(folder.spec(), folder / "samples");
    EXPECT_FALSE(found.ok());
    return Message(found.status());
  };
  const ProfileFolder folder;
  const std::string kv = folder.Read("samples/1.kv");
  folder.Write("samples/1.kv", kv.substr(1));
  EXPECT_THAT(read(folder), AllOf(HasSubstr("samples/1.*"), HasSubstr("size of raw KV")));
  std::filesystem::remove(folder / "samples/1.kv");
  EXPECT_THAT(read(folder), HasSubstr("samples/1.kv: cannot be opened"));
  folder.Write("samples/1.kv", kv);
  folder.Write("samples/1.importance", "1234");
  EXPECT_THAT(read(folder), AllOf(HasSubstr("samples/1.*"), HasSubstr("count of importance")));
  folder.Write("samples/1.importance", "123");
  EXPECT_THAT(read(folder), HasSubstr("samples/1.importance: has 3 bytes"));
  folder.Write("samples/1.importance", std::string(4 * 16 * 100, '\xff'));  // not a number
  EXPECT_THAT(read(folder), HasSubstr("importance is negative or not finite"));
  folder.Write("samples/0.tokens", "");
  EXPECT_THAT(read(folder), HasSubstr("samples/0.tokens: is empty"));

  EXPECT_THAT(Message(ReadSamples(folder.spec(), folder / "none").status()),
              HasSubstr("cannot be read"));
  std::filesystem::create_directory(folder / "empty");
  EXPECT_THAT(Message(ReadSamples(folder.spec(), folder / "empty").status()),
              HasSubstr("no samples"));
}

// A body as SealProfile sees it: bytes, and the levels that are in them.
constexpr ResidualLevel kHighAndSmall[] = {{.quality = Quality::kHigh, .step = 1},
                                           {.quality = Quality::kSmall, .step = 2}};
const std::string kBody(2000, 'b');
const CodecKey kKey = ModelSpec(SyntheticSpec()).CodecKey();

MeasuredFigures GoodFigures() {
  return {.body_digest = BodyDigest(kBody),
          .levels = {{Quality::kSmall, 0.2f, 0.04f, 0.5f}, {Quality::kHigh, 0.5f, 0.01f, 0.1f}}};
}

TEST(SealProfileTest, WritesTheHeadInTheOrderOfTheBody) {
  const auto bytes = SealProfile(kKey, kBody, kHighAndSmall, GoodFigures());
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto header = ParseProfileHeader(AsBytes(*bytes));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->codec_key, kKey);
  EXPECT_THAT(header->levels,
              ::testing::ElementsAre(ProfileLevel{Quality::kHigh, 0.5f, 0.01f, 0.1f},
                                     ProfileLevel{Quality::kSmall, 0.2f, 0.04f, 0.5f}));
  EXPECT_EQ(bytes->substr(header->header_bytes()), kBody);
}

TEST(SealProfileTest, NoLevelClaimsWhatWasNotMeasured) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto changed = [](auto change) {
    MeasuredFigures figures = GoodFigures();
    change(figures);
    return figures;
  };
  const std::pair<MeasuredFigures, const char*> cases[] = {
      {changed([](auto& f) { f.body_digest.bytes[0] ^= 1; }), "measure it again"},
      {changed([](auto& f) { f.levels.pop_back(); }), "level high: 0 figures"},
      {changed([](auto& f) { f.levels.push_back(f.levels[1]); }), "level high: 2 figures"},
      {changed([](auto& f) {
         f.levels.push_back({Quality::kNearExact, 1, 0, 0});
       }),
       "level near-exact: the profile has none"},
      {changed([](auto& f) { f.levels[1].mean_kl = 0.0101f; }), "promises at most 0.01"},
      {changed([&](auto& f) { f.levels[1].mean_kl = nan; }), "level high: mean_kl"},
      {changed([](auto& f) { f.levels[0].mean_kl = -1; }),
       "level small: mean_kl is -1, must be 0 or above: measure it again"},
      {changed([&](auto& f) { f.levels[0].kl_p99 = nan; }), "level small: kl_p99"},
      {changed([](auto& f) { f.levels[0].kl_p99 = -1; }), "level small: kl_p99"},
      {changed([](auto& f) { f.levels[0].bits_per_component = 0; }), "bits_per_component"},
      {changed([](auto& f) { f.levels[0].bits_per_component = 33; }), "bits_per_component"},
  };
  for (const auto& [figures, what] : cases) {
    const auto bytes = SealProfile(kKey, kBody, kHighAndSmall, figures);
    EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_THAT(Message(bytes.status()), HasSubstr(what));
  }
  const std::string tiny = "b";
  MeasuredFigures of_tiny = GoodFigures();
  of_tiny.body_digest = BodyDigest(tiny);
  EXPECT_THAT(Message(SealProfile(kKey, tiny, kHighAndSmall, of_tiny).status()),
              HasSubstr("must have 1024 to"));
}

TEST(ReadProfileFileTest, TellsADraftFromAProfile) {
  const ScratchFolder folder;
  ASSERT_TRUE(WriteFile(folder / "draft", EncodeDraft(kKey, kBody)).ok());
  const auto draft = ReadProfileFile(folder / "draft");
  ASSERT_TRUE(draft.ok()) << draft.status();
  EXPECT_EQ(draft->codec_key, kKey);
  EXPECT_EQ(draft->body, kBody);
  EXPECT_TRUE(draft->levels.empty());

  ASSERT_TRUE(
      WriteFile(folder / "whole", *SealProfile(kKey, kBody, kHighAndSmall, GoodFigures())).ok());
  const auto whole = ReadProfileFile(folder / "whole");
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->codec_key, kKey);
  EXPECT_EQ(whole->body, kBody);
  EXPECT_EQ(whole->levels.size(), 2u);
}

TEST(ReadProfileFileTest, NoServerWouldTakeADraft) {
  EXPECT_FALSE(ParseProfileHeader(AsBytes(EncodeDraft(kKey, kBody))).ok());
}

TEST(ReadProfileFileTest, RefusesEveryFlippedBitAndEveryCut) {
  const ScratchFolder folder;
  for (const std::string& good :
       {EncodeDraft(kKey, kBody), *SealProfile(kKey, kBody, kHighAndSmall, GoodFigures())}) {
    for (std::size_t at = 0; at < good.size(); at += at < 100 ? 1 : 97) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      ASSERT_TRUE(WriteFile(folder / "bad", bad).ok());
      const auto profile = ReadProfileFile(folder / "bad");
      EXPECT_FALSE(profile.ok()) << "byte " << at;
      EXPECT_THAT(Message(profile.status()), HasSubstr(folder / "bad"));
      ASSERT_TRUE(WriteFile(folder / "bad", good.substr(0, at)).ok());
      EXPECT_FALSE(ReadProfileFile(folder / "bad").ok()) << "cut at " << at;
    }
    ASSERT_TRUE(WriteFile(folder / "bad", good + "x").ok());
    EXPECT_FALSE(ReadProfileFile(folder / "bad").ok());
  }
}

TEST(ReadMeasuredFiguresTest, ReadsWhatACalibrationWrites) {
  const ScratchFolder folder;
  ASSERT_TRUE(WriteFile(folder / "m", R"({"body_digest": "000102030405060708090a0b0c0d0e0f",
      "levels": [{"quality": "near-exact", "bits_per_component": 1.5, "mean_kl": 0.0009,
                  "kl_p99": 0, "texts": 3}], "about": {"model": "m"}})")
                  .ok());
  const auto figures = ReadMeasuredFigures(folder / "m");
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_EQ(figures->body_digest.ToHex(), "000102030405060708090a0b0c0d0e0f");
  EXPECT_THAT(figures->levels,
              ::testing::ElementsAre(ProfileLevel{Quality::kNearExact, 1.5f, 0.0009f, 0}));
}

TEST(ReadMeasuredFiguresTest, NamesTheFieldThatIsWrong) {
  const ScratchFolder folder;
  const std::string head = R"({"body_digest": "000102030405060708090a0b0c0d0e0f", "levels": )";
  const std::pair<std::string, const char*> cases[] = {
      {"", "is empty"},
      {"[1]", "is no JSON object"},
      {R"({"levels": []})", "body_digest"},
      {R"({"body_digest": 7, "levels": []})", "body_digest"},
      {R"({"body_digest": "00", "levels": []})", "body_digest"},
      {head + "[]}", "levels: must be a list"},
      {head + "{}}", "levels: must be a list"},
      {head + "[1]}", "levels[0]: must be an object"},
      {head + R"([{"quality": "exact"}]})", "levels[0].quality"},
      {head + R"([{"quality": "high", "mean_kl": 0, "kl_p99": 0}]})",
       "levels[0].bits_per_component: must be a number, and is missing: measure the level"},
      {head + R"([{"quality": "high", "bits_per_component": 1, "mean_kl": "0", "kl_p99": 0}]})",
       "levels[0].mean_kl: must be a number, and is string"},
  };
  for (const auto& [text, what] : cases) {
    ASSERT_TRUE(WriteFile(folder / "m", text).ok());
    const auto figures = ReadMeasuredFigures(folder / "m");
    EXPECT_FALSE(figures.ok()) << what;
    EXPECT_THAT(Message(figures.status()), AllOf(HasSubstr(folder / "m"), HasSubstr(what)));
  }
}

}  // namespace
}  // namespace kvtrie
