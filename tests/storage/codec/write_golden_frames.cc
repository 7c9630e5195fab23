// Writes what is not yet there of tests/golden/v1/codec:
//
//   write_golden_frames tests/golden/v1/codec
//
// Ends with 1 when a file that is there would have to change.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/storage/codec/golden_frames.h"

namespace kvtrie {
namespace {

class Writer {
 public:
  explicit Writer(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void Write(const std::filesystem::path& name, std::span<const std::byte> bytes) {
    const std::filesystem::path path = folder_ / name;
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (std::filesystem::exists(path)) {
      std::ifstream file(path, std::ios::binary);
      const std::string there{std::istreambuf_iterator<char>(file), {}};
      if (there != text) {
        std::fprintf(stderr, "%s would change\n", path.c_str());
        changed_ = true;
      }
      return;
    }
    std::filesystem::create_directories(path.parent_path());
    std::ofstream file(path, std::ios::binary);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    KV_CHECK(static_cast<bool>(file.flush()));
  }

  bool changed() const { return changed_; }

 private:
  const std::filesystem::path folder_;
  bool changed_ = false;
};

void WriteCase(const GoldenCase& of, Writer& writer) {
  const std::filesystem::path model = of.model;
  const std::filesystem::path folder = model / of.dtype;
  const std::vector<std::byte> profile = ProfileFile(of.profile);
  writer.Write(model / "profile.bin", profile);
  const std::string spec = of.spec.Encode();
  writer.Write(folder / "spec.bin", std::as_bytes(std::span(spec)));
  auto residual = ResidualCodec::Create(of.spec, IdOfProfile(profile), of.profile);
  KV_CHECK(residual.ok());
  const FrameCodec with(of.spec, *std::move(residual));
  const FrameCodec without(of.spec, nullptr);
  for (const GoldenBlock& block : of.blocks) {
    writer.Write(folder / (block.name + "_tokens.bin"), std::as_bytes(std::span(block.tokens)));
    writer.Write(folder / (block.name + "_kv.bin"), block.raw);
    if (!block.references.empty()) {
      const std::string references = block.ReferenceFile();
      writer.Write(folder / (block.name + "_references.bin"), std::as_bytes(std::span(references)));
    }
    for (const GoldenCoding& coding : block.codings) {
      const std::string name = block.name + "_" + coding.name;
      const std::vector<std::byte> frame = EncodeGolden(of, block, coding, with, without);
      writer.Write(folder / (name + ".bin"), frame);
      const std::vector<std::byte> decoded = DecodeGolden(of, block, frame, with);
      if (coding.quality != Quality::kExact) {
        writer.Write(folder / (name + "_kv.bin"), decoded);
      } else {
        KV_CHECK(decoded == block.raw);
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s tests/golden/v1/codec\n", argv[0]);
    return 2;
  }
  kvtrie::Writer writer(argv[1]);
  for (const kvtrie::GoldenCase& of : kvtrie::MakeGoldenCases()) kvtrie::WriteCase(of, writer);
  return writer.changed() ? 1 : 0;
}
