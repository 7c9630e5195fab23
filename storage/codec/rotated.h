#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/coded_body.h"
#include "storage/codec/frame.h"
#include "storage/kv/model_spec.h"

// Codec 4: each vector of a token and KV head rotated by a fixed random rotation, and its
// components quantized with the codebook that is best for a random unit vector's (TurboQuant,
// arXiv:2504.19874, algorithm 1). Needs no profile and no calibration, takes any shape, and is
// unrated: what it costs a model is not known. ROTATED.md has the layout.
//
// We depart from the paper in the scale that is stored (of least squared error, not the norm) and
// in the rotation (a fast transform, ROTATED.md). K is coded as the engine gave it, after RoPE.
//
// What cannot be quantized is kept exact: vectors with a component that is no finite number, or
// whose length is not 0 and not about 2^-14 to 65504. What is finite stays finite; a vector of
// zeros stays one. All functions are thread-safe.
namespace kvtrie {

struct RotatedOptions {
  // Per component, 2 to 5; 16 bits per vector come on top. Mean squared error relative to the
  // vector, for many components: 0.117, 0.034, 0.0094, 0.0025.
  std::uint32_t k_bits = 4;
  std::uint32_t v_bits = 4;
  // So many first tokens of the session are kept exact: attention goes to them more than to others.
  std::uint32_t exact_session_tokens = 1;
};

struct RotatedBlock {
  CodedBody body;
  // Vectors that were kept exact because they cannot be quantized.
  std::uint64_t exact_vectors = 0;
};

// The body is never larger than raw + 28 bytes + 12 per layer: a kind that would not shrink is kept
// raw. InvalidArgument names an option that is out of range.
// REQUIRES: raw.size() == geometry.raw_block_bytes().
absl::StatusOr<RotatedBlock> EncodeRotated(const KvGeometry& geometry,
                                           std::span<const std::byte> raw,
                                           const FrameBinding& binding,
                                           const RotatedOptions& options);

// The most bytes at a body's beginning that RotatedReader::Parse looks at.
std::size_t RotatedHeadBytesMax(const KvGeometry& geometry);

// Decodes layers in any order, each from its own bytes. Immutable, thread-safe.
class RotatedReader : public LayeredBody {
 public:
  // `body`: the whole, or its first RotatedHeadBytesMax bytes. DataLoss when it is not the body of
  // a block of this geometry; the binding is not looked at.
  static absl::StatusOr<RotatedReader> Parse(const KvGeometry& geometry,
                                             std::span<const std::byte> body);

  // `bytes` are the layer's, layer_begin to layer_end; `raw` takes its layer_end - layer_begin of
  // the geometry. DataLoss when they cannot be such bytes; `raw` holds anything then.
  absl::Status DecodeLayer(std::uint32_t layer, std::span<const std::byte> bytes,
                           std::span<std::byte> raw) const;

 private:
  explicit RotatedReader(const KvGeometry& geometry) : LayeredBody(geometry) {}
};

// All layers of a whole body. REQUIRES: raw.size() == geometry.raw_block_bytes().
absl::Status DecodeRotated(const KvGeometry& geometry, std::span<const std::byte> body,
                           std::span<std::byte> raw);

}  // namespace kvtrie
