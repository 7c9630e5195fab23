#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/codec/frame.h"
#include "tests/fuzz/residual_target.h"

namespace kvtrie {
namespace {

constexpr std::size_t kTableAt = kFrameBindingBytes + 6 + 2;  // behind one section

struct Target {
  ModelSpec spec = FuzzSpec();
  std::unique_ptr<const ResidualCodec> codec = MakeCodec(spec, FuzzProfileOfDifferences());
  SharedBlocks shared{spec, FuzzOther(), FuzzShared()};
};

// What is read is what a writer makes.
void TryTable(const std::vector<std::byte>& body, std::size_t block_tokens) {
  if (body.size() < kTableAt) return;
  ByteReader reader(AsText(body).substr(kTableAt));
  const auto table = ReferenceTable::Read(reader, block_tokens);
  if (!table.ok()) return;
  KV_CHECK(table->Check(block_tokens).ok());
  ByteWriter writer;
  table->Write(writer);
  KV_CHECK(AsText(body).substr(kTableAt, writer.text().size()) == writer.text());
}

void TryBody(const Target& target, std::vector<std::byte> body, std::size_t block, bool mend) {
  if (body.size() >= kTableAt) {
    // The binding that it should have, so that mutations come past it; but for its position.
    StoreLittle(body.data() + 4, Crc32c(std::as_bytes(std::span(target.shared.tokens[block]))));
    StoreLittle(body.data() + 8, target.codec->id());
  }
  TryTable(body, target.spec.block_tokens);
  // And references that are there.
  for (std::size_t i = 0; mend && i < 2 && body.size() >= kTableAt + 4 + 36 * (i + 1); ++i) {
    const ReferenceBlock& reference = target.shared.references[i];
    std::byte* const at = body.data() + kTableAt + 4 + 36 * i;
    StoreLittle(at, reference.node);
    StoreLittle(at + 16, DigestOfKv(reference.raw));
    StoreLittle(at + 32, reference.first_position);
  }
  const std::uint32_t section_bytes[] = {static_cast<std::uint32_t>(body.size())};

  DecodeWithEachKernelSet(*target.codec,
                          {.body = body,
                           .section_bytes = section_bytes,
                           .quality = Quality::kHigh,
                           .tokens = target.shared.tokens[block],
                           .raw = {},
                           .is_referenced = true,
                           .references = target.shared.references},
                          target.shared.raw[0].size());
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const kvtrie::Target target;
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  for (std::size_t block = 0; block < 3; ++block) {
    for (const bool mend : {false, true}) {
      kvtrie::TryBody(target, std::vector<std::byte>(bytes, bytes + size), block, mend);
    }
  }
  return 0;
}
