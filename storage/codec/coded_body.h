#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrie {

// The body of a frame before it has a header: what WriteFrameHeader needs, but for the checksums.
struct CodedBody {
  std::vector<std::byte> bytes;              // begins with the binding (FORMAT.md)
  std::vector<std::uint32_t> section_bytes;  // sums up to bytes.size()
};

// Cuts a body at the ends of layers, so that a reader of some layers gets little else: sections
// have 4 KiB to 1 MiB, but for the last one, which may be smaller. A layer of more than 1 MiB
// is cut into equal parts. REQUIRES: ascending; the last end is that of the body, and not 0.
std::vector<std::uint32_t> CutSections(std::span<const std::size_t> layer_ends);

}  // namespace kvtrie
