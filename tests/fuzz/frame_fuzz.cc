#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/codec/frame.h"

namespace kvtrie {
namespace {

void TryFrame(const std::string& bytes) {
  const auto frame = FrameView::Parse(AsBytes(bytes));
  if (!frame.ok()) return;
  KV_CHECK(frame->header_bytes() <= bytes.size());

  // What was accepted is what a writer makes.
  std::vector<FrameSection> sections;
  for (std::size_t i = 0; i < frame->section_count(); ++i) sections.push_back(frame->section(i));
  std::string again(FrameHeaderBytes(sections.size()), '\xaa');
  WriteFrameHeader({.codec = frame->codec(),
                    .quality = frame->quality(),
                    .model = frame->model(),
                    .raw_bytes = frame->raw_bytes(),
                    .sections = sections},
                   std::as_writable_bytes(std::span(again)));
  KV_CHECK(again == bytes.substr(0, frame->header_bytes()));
  if (bytes.size() != frame->frame_bytes()) return;
  frame->VerifyBody().IgnoreError();
  if (frame->codec() == CodecId::kRaw) return;
  std::byte binding[kFrameBindingBytes];
  WriteFrameBinding(frame->binding(), binding);
  KV_CHECK(std::equal(std::begin(binding), std::end(binding), frame->body().begin()));
  const bool by_profile =
      frame->codec() == CodecId::kResidual || frame->codec() == CodecId::kReferenced;
  KV_CHECK(!by_profile || !frame->profile().empty());
}

// Gives the header the checksum that it should have, so that mutations come past it.
void MendChecksum(std::string& bytes) {
  constexpr std::size_t kSectionCountOffset = 12;
  if (bytes.size() < kSectionCountOffset + 4) return;
  const std::size_t section_count = LoadLittle<std::uint32_t>(bytes.data() + kSectionCountOffset);
  const std::size_t checksum_offset = 56 + 8 * section_count;
  if (checksum_offset + 4 > bytes.size()) return;
  StoreLittle(bytes.data() + checksum_offset, Crc32c(AsBytes(bytes).first(checksum_offset)));
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  kvtrie::TryFrame(bytes);
  kvtrie::MendChecksum(bytes);
  kvtrie::TryFrame(bytes);
  return 0;
}
