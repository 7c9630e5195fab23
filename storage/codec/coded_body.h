#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/base/status_macros.h"
#include "storage/kv/model_spec.h"

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

// Where a body's layers lie that are coded each by itself: what their readers share.
class LayeredBody {
 public:
  // [begin, end) of a layer's bytes within the body.
  std::size_t layer_begin(std::uint32_t layer) const { return layer_begins_[layer]; }
  std::size_t layer_end(std::uint32_t layer) const { return layer_begins_[layer + 1]; }
  std::size_t body_bytes() const { return layer_begins_.back(); }

 protected:
  explicit LayeredBody(const KvGeometry& geometry)
      : geometry_(geometry), layer_begins_(geometry.layer_count() + 1) {}

  KvGeometry geometry_;
  std::vector<std::size_t> layer_begins_;  // and the end of the last
};

// All layers of a body, whose reader decodes each from its own bytes. REQUIRES: the body has
// reader.body_bytes(), and raw the geometry's.
template <typename Reader>
absl::Status DecodeEveryLayer(const KvGeometry& geometry, const Reader& reader,
                              std::span<const std::byte> body, std::span<std::byte> raw) {
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    const std::size_t from = reader.layer_begin(layer);
    const std::size_t to = geometry.layer_begin(layer);
    KV_RETURN_IF_ERROR(reader.DecodeLayer(layer, body.subspan(from, reader.layer_end(layer) - from),
                                          raw.subspan(to, geometry.layer_end(layer) - to)));
  }
  return absl::OkStatus();
}

}  // namespace kvtrie
