#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/coded_body.h"
#include "storage/codec/frame.h"
#include "storage/codec/rans.h"
#include "storage/kv/model_spec.h"

// Codec 2: the raw KV of a block, bit for bit, in fewer bytes and without a profile (LOSSLESS.md).
//
// Exponents and signs repeat along the tokens of a channel and are entropy coded; what lies below
// has nearly full entropy and is kept, without bits that are zero everywhere. Each layer is coded
// by itself. All functions are thread-safe.
namespace kvtrie {

// The body is never larger than raw + 64 bytes. REQUIRES: raw.size() == geometry.raw_block_bytes().
CodedBody EncodeLossless(const KvGeometry& geometry, std::span<const std::byte> raw,
                         const FrameBinding& binding);

// The most bytes at a body's beginning that LosslessReader::Parse looks at.
std::size_t LosslessHeadBytesMax(const KvGeometry& geometry);

// Decodes layers in any order, each from its own bytes. Immutable, thread-safe. Memory: 0.5 MiB of
// tables, and 16 bytes per component of a token while a layer is decoded.
class LosslessReader : public LayeredBody {
 public:
  // `body`: the whole, or its first LosslessHeadBytesMax bytes. DataLoss when it is not the body of
  // a block of this geometry; the binding is not looked at.
  static absl::StatusOr<LosslessReader> Parse(const KvGeometry& geometry,
                                              std::span<const std::byte> body);

  // `bytes` are the layer's, layer_begin to layer_end; `raw` takes its layer_end - layer_begin of
  // the geometry. DataLoss when they cannot be such bytes; `raw` holds anything then. Damage
  // that leaves another valid layer is for the frame's checksums to find.
  absl::Status DecodeLayer(std::uint32_t layer, std::span<const std::byte> bytes,
                           std::span<std::byte> raw) const;

 private:
  explicit LosslessReader(const KvGeometry& geometry);

  std::vector<bool> layer_is_raw_;
  RansTables tables_;
};

// All layers of a whole body. REQUIRES: raw.size() == geometry.raw_block_bytes().
absl::Status DecodeLossless(const KvGeometry& geometry, std::span<const std::byte> body,
                            std::span<std::byte> raw);

}  // namespace kvtrie
