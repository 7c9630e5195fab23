// Writes the corpora of residual_body_fuzz, referenced_body_fuzz and profile_body_fuzz:
//
//   residual_corpus tests/fuzz/corpus
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "storage/base/byte_reader.h"
#include "tests/fuzz/residual_target.h"

namespace kvtrie {
namespace {

void Write(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  KV_CHECK(static_cast<bool>(file.flush()));
}

void WriteCorpora(const std::filesystem::path& folder) {
  const ModelSpec spec = FuzzSpec();
  const ResidualProfile profile = FuzzProfile();
  Write(folder / "profile_body/exponents.bin", profile.EncodeBody());
  Write(folder / "profile_body/latents.bin",
        PlainProfile(SyntheticSpec({{2, 1, 3, 0}})).EncodeBody());
  ResidualFitOptions options = SmallFitOptions();
  options.block_per_head = true;
  for (ResidualLevel& level : options.levels) level.importance_strength = 0.5f;
  const std::vector<SyntheticText> texts = FitTexts(spec);
  Write(folder / "profile_body/fitted.bin",
        FitSynthetic(spec, options, MakeMaterial(spec, texts, true)).EncodeBody());

  const auto codec = MakeCodec(spec, profile);
  const CodedText coded = EncodeText(*codec, spec, FuzzText(), Quality::kHigh);
  const char* const kNames[] = {"first_token", "exact_token", "plain"};
  for (std::size_t b = 0; b < 3; ++b) {
    Write(folder / "residual_body" / (std::string(kNames[b]) + ".bin"),
          AsText(coded.encoded[b].body));
  }
  // Values that are escaped.
  SyntheticText large = MakeText(spec, 40, 1, 300);
  Write(folder / "residual_body/escapes.bin",
        AsText(EncodeText(*codec, spec, large, Quality::kHigh).encoded[1].body));

  Write(folder / "profile_body/differences.bin", FuzzProfileOfDifferences().EncodeBody());
  const SharedBlocks shared(spec, FuzzOther(), FuzzShared());
  const auto against =
      MakeCodec(spec, FuzzProfileOfDifferences())->Encode(shared.blocks, Quality::kHigh);
  KV_CHECK(against.ok());
  const char* const kBlocks[] = {"first_token", "whole", "part"};
  for (std::size_t b = 0; b < 3; ++b) {
    KV_CHECK((*against)[b].referenced_tokens > 0);
    Write(folder / "referenced_body" / (std::string(kBlocks[b]) + ".bin"),
          AsText((*against)[b].body));
  }
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
    return 2;
  }
  kvtrie::WriteCorpora(argv[1]);
  return 0;
}
