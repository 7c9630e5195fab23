#include "storage/codec/coded_body.h"

#include "storage/base/check.h"
#include "storage/codec/frame.h"

namespace kvtrie {
namespace {

constexpr std::size_t kSectionBytesMin = std::size_t{4} << 10;

}  // namespace

std::vector<std::uint32_t> CutSections(std::span<const std::size_t> layer_ends) {
  KV_CHECK(!layer_ends.empty());
  KV_CHECK(layer_ends.back() > 0);
  std::vector<std::uint32_t> sections;
  std::size_t begin = 0;
  for (const std::size_t end : layer_ends) {
    KV_CHECK(end >= begin);
    const bool is_last = end == layer_ends.back();
    if (end == begin || (end - begin < kSectionBytesMin && !is_last)) continue;
    for (std::size_t parts = (end - begin + kSectionBytesMax - 1) / kSectionBytesMax; parts > 0;
         --parts) {
      const std::size_t bytes = (end - begin) / parts;
      sections.push_back(static_cast<std::uint32_t>(bytes));
      begin += bytes;
    }
  }
  return sections;
}

}  // namespace kvtrie
