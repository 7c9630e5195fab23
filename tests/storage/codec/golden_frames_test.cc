// The frames and profiles of tests/golden/v1/codec: the encoder writes these bytes, and they decode
// to these bytes. tests/reference reads the same files by the pages of the formats alone.
//
// An encoder may come to choose otherwise: its frames are then written beside these under names of
// their own, and these are still to be restored.
#include "tests/storage/codec/golden_frames.h"

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/codec/kernel_sets.h"

namespace kvtrie {
namespace {

const std::filesystem::path kFolder = "v1/codec";

std::vector<std::byte> Read(const std::filesystem::path& name) {
  const std::string text = ReadGolden(kFolder / name);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// A case with its tokens and raw KV from the files, and both codecs.
class Golden {
 public:
  explicit Golden(GoldenCase of) : of_(std::move(of)) {
    profile_file_ = Read(profile_path());
    auto residual = ResidualCodec::Create(of_.spec, IdOfProfile(profile_file_), of_.profile);
    EXPECT_TRUE(residual.ok()) << residual.status();
    with_ = std::make_unique<FrameCodec>(of_.spec, *std::move(residual));
    without_ = std::make_unique<FrameCodec>(of_.spec, nullptr);
    for (GoldenBlock& block : of_.blocks) {
      block.raw = Read(folder() / (block.name + "_kv.bin"));
      const std::vector<std::byte> tokens = Read(folder() / (block.name + "_tokens.bin"));
      EXPECT_EQ(tokens.size(), 4 * of_.spec.block_tokens);
      block.tokens.resize(tokens.size() / 4);
      std::memcpy(block.tokens.data(), tokens.data(), tokens.size());
      if (!block.references.empty()) ReadReferences(block);
    }
  }

  const GoldenCase& of() const { return of_; }
  std::filesystem::path folder() const { return std::filesystem::path(of_.model) / of_.dtype; }
  std::filesystem::path profile_path() const {
    return std::filesystem::path(of_.model) / "profile.bin";
  }
  const std::vector<std::byte>& profile_file() const { return profile_file_; }

  // visit(block, frame, path of the frame without ".bin", coding)
  template <typename Visit>
  void ForEachFrame(Visit visit) const {
    for (const GoldenBlock& block : of_.blocks) {
      for (const GoldenCoding& coding : block.codings) {
        const std::string name = (folder() / (block.name + "_" + coding.name)).string();
        SCOPED_TRACE(name);
        visit(block, Read(name + ".bin"), name, coding);
      }
    }
  }
  std::vector<std::byte> Encode(const GoldenBlock& block, const GoldenCoding& coding) const {
    return EncodeGolden(of_, block, coding, *with_, *without_);
  }
  std::vector<std::byte> Decode(const GoldenBlock& block, std::span<const std::byte> frame) const {
    return DecodeGolden(of_, block, frame, *with_);
  }

 private:
  void ReadReferences(GoldenBlock& block) const {
    const std::vector<std::byte> bytes = Read(folder() / (block.name + "_references.bin"));
    ByteReader reader(AsText(bytes));
    for (GoldenReference& of : block.references) {
      EXPECT_EQ(reader.ReadText(TrieNodeId::kBytes), of.node.view());
      EXPECT_EQ(reader.Read<std::uint32_t>(), of.first_position);
      for (TokenId& token : of.tokens) token = reader.Read<std::uint32_t>();
      const auto raw = reader.ReadBytes(of.raw.size());
      of.raw.assign(raw.begin(), raw.end());
    }
    EXPECT_TRUE(reader.Done());
  }

  GoldenCase of_;
  std::vector<std::byte> profile_file_;
  std::unique_ptr<FrameCodec> with_, without_;
};

std::vector<Golden> ReadAll() {
  std::vector<Golden> all;
  for (GoldenCase& of : MakeGoldenCases()) all.emplace_back(std::move(of));
  return all;
}

TEST(GoldenFramesTest, ProfilesAreTheseBytesAndReadBack) {
  for (const Golden& golden : ReadAll()) {
    SCOPED_TRACE(golden.profile_path());
    EXPECT_EQ(ProfileFile(golden.of().profile), golden.profile_file());
    const auto header = ParseProfileHeader(golden.profile_file());
    ASSERT_TRUE(header.ok()) << header.status();
    const auto body = std::span(golden.profile_file()).subspan(header->header_bytes());
    const auto profile =
        ResidualProfile::DecodeBody({reinterpret_cast<const char*>(body.data()), body.size()});
    ASSERT_TRUE(profile.ok()) << profile.status();
    EXPECT_EQ(profile->EncodeBody().size(), body.size());
  }
}

TEST(GoldenFramesTest, SpecsAreTheseBytes) {
  for (const Golden& golden : ReadAll()) {
    const std::string spec = golden.of().spec.Encode();
    const auto bytes = std::as_bytes(std::span(spec));
    EXPECT_EQ(Read(golden.folder() / "spec.bin"),
              std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
}

TEST(GoldenFramesTest, EveryKernelSetWritesTheseBytes) {
  const std::vector<Golden> all = ReadAll();
  WithEachKernelSet([&] {
    for (const Golden& golden : all) {
      golden.ForEachFrame(
          [&](const GoldenBlock& block, const std::vector<std::byte>& frame, const std::string&,
              const GoldenCoding& coding) { EXPECT_TRUE(golden.Encode(block, coding) == frame); });
    }
  });
}

TEST(GoldenFramesTest, EveryKernelSetRestoresTheseBytes) {
  const std::vector<Golden> all = ReadAll();
  WithEachKernelSet([&] {
    for (const Golden& golden : all) {
      golden.ForEachFrame([&](const GoldenBlock& block, const std::vector<std::byte>& frame,
                              const std::string& name, const GoldenCoding& coding) {
        const std::vector<std::byte> expected =
            coding.quality == Quality::kExact ? block.raw : Read(name + "_kv.bin");
        EXPECT_TRUE(golden.Decode(block, frame) == expected);
      });
    }
  });
}

TEST(GoldenFramesTest, TheFramesAreOfTheCodecsTheyAreNamedFor) {
  std::set<CodecId> codecs;
  for (const Golden& golden : ReadAll()) {
    golden.ForEachFrame([&](const GoldenBlock& block, const std::vector<std::byte>& bytes,
                            const std::string&, const GoldenCoding& coding) {
      const auto frame = FrameView::Parse(bytes);
      ASSERT_TRUE(frame.ok()) << frame.status();
      codecs.insert(frame->codec());
      EXPECT_EQ(frame->quality(), coding.quality);
      EXPECT_EQ(frame->codec() != CodecId::kRaw && !frame->profile().empty(),
                coding.smallest || frame->codec() == CodecId::kResidual ||
                    frame->codec() == CodecId::kReferenced);
      EXPECT_EQ(frame->codec() == CodecId::kReferenced, !block.references.empty());
      // Those of the block, in the order in which its tokens use them.
      const auto table = ReferencesOf(*frame, golden.of().spec.block_tokens);
      ASSERT_TRUE(table.ok()) << table.status();
      ASSERT_EQ(table->references.size(), block.references.size());
      for (std::size_t i = 0; i < block.references.size(); ++i) {
        EXPECT_EQ(table->references[i].node, block.references[i].node);
        EXPECT_EQ(table->references[i].digest, DigestOfKv(block.references[i].raw));
        EXPECT_EQ(table->references[i].first_position, block.references[i].first_position);
      }
    });
  }
  EXPECT_EQ(codecs.size(), std::size(kAllCodecs));
}

}  // namespace
}  // namespace kvtrie
