#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "storage/codec/frame.h"
#include "tests/fuzz/residual_target.h"

namespace kvtrie {
namespace {

struct Target {
  ModelSpec spec = FuzzSpec();
  std::unique_ptr<const ResidualCodec> codec = MakeCodec(spec, FuzzProfile());
  SyntheticText text = FuzzText();
  std::size_t raw_bytes = KvGeometry(spec).raw_block_bytes();
};

// As many sections as the head says, of about equal size.
std::vector<std::uint32_t> SectionBytes(std::size_t body_bytes, std::size_t count) {
  std::vector<std::uint32_t> sections(count, static_cast<std::uint32_t>(body_bytes / count));
  sections[0] += static_cast<std::uint32_t>(body_bytes % count);
  return sections;
}

// The tokens of this block.
void TryBody(const Target& target, std::vector<std::byte> body, std::size_t block) {
  const std::span<const TokenId> tokens = std::span(target.text.tokens).subspan(20 * block, 20);
  std::size_t section_count = 1;
  if (body.size() >= kFrameBindingBytes + 6) {
    // The binding that it should have, so that mutations come past it; but for its position.
    StoreLittle(body.data() + 4, Crc32c(std::as_bytes(tokens)));
    StoreLittle(body.data() + 8, target.codec->id());
    section_count = LoadLittle<std::uint16_t>(body.data() + kFrameBindingBytes + 4) % 8 + 1;
    if (section_count > 1) --section_count;
  }
  const std::vector<std::uint32_t> section_bytes = SectionBytes(body.size(), section_count);

  DecodeWithEachKernelSet(*target.codec,
                          {.body = body,
                           .section_bytes = section_bytes,
                           .quality = Quality::kHigh,
                           .tokens = tokens,
                           .raw = {}},
                          target.raw_bytes);
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const kvtrie::Target target;
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  for (std::size_t block = 0; block < 2; ++block) {
    kvtrie::TryBody(target, std::vector<std::byte>(bytes, bytes + size), block);
  }
  return 0;
}
