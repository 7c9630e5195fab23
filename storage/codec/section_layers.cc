#include "storage/codec/section_layers.h"

#include "storage/base/byte_reader.h"

namespace kvtrie {
namespace {

// In front of the table, behind the binding: flags, zero, count of exact tokens (RESIDUAL.md).
constexpr std::size_t kBeforeSectionCount = 4;

absl::Status Damaged() {
  return absl::DataLossError("frame: layers of its sections are not those of the model");
}

std::vector<std::uint32_t> OfRaw(const FrameView& frame, const KvGeometry& geometry) {
  std::vector<std::uint32_t> layers;
  std::size_t end = 0;
  std::uint32_t complete = 0;
  for (std::size_t i = 0; i < frame.section_count(); ++i) {
    end += frame.section(i).bytes;
    while (complete < geometry.layer_count() && geometry.layer_end(complete) <= end) ++complete;
    layers.push_back(complete);
  }
  return layers;
}

}  // namespace

absl::StatusOr<std::vector<std::uint32_t>> LayersOfSections(const FrameView& frame,
                                                            const KvGeometry& geometry) {
  if (frame.codec() == CodecId::kRaw) return OfRaw(frame, geometry);
  std::vector<std::uint32_t> layers(frame.section_count(), 0);
  if (frame.profile().empty()) {
    layers.back() = geometry.layer_count();
    return layers;
  }
  const std::size_t first_bytes = frame.section(0).bytes;
  if (first_bytes < kFrameBindingBytes + kBeforeSectionCount) return Damaged();
  ByteReader reader(AsText(frame.body().first(first_bytes).subspan(kFrameBindingBytes)));
  reader.ReadBytes(kBeforeSectionCount);
  if (reader.Read<std::uint16_t>() != layers.size()) return Damaged();
  std::uint32_t before = 0;
  for (std::uint32_t& of_section : layers) {
    of_section = reader.Read<std::uint16_t>();
    if (of_section < before || of_section > geometry.layer_count()) return Damaged();
    before = of_section;
  }
  if (!reader.ok() || before != geometry.layer_count()) return Damaged();
  return layers;
}

}  // namespace kvtrie
