#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/kv/model_spec.h"

namespace kvtrie {

// Vectors with a component of this size, or one that is infinite or no number, are kept out of what
// computes with KV: sums of squares of smaller ones stay finite in float32 for every row that a
// model may have.
inline constexpr float kComponentLimit = 0x1p50f;

// Cosine and sine of the angles by which RoPE turns the tokens of one block (arXiv:2104.09864).
// Made by RawKv::AnglesAt, read by RawKv. Immutable, thread-safe.
class RopeAngles {
 private:
  friend class RawKv;
  std::vector<std::vector<float>> tables_;  // one for each of RawKv's rotations
};

// The raw KV of one model's blocks as rows of float32, and back, one layer and kind at a time.
//
// Raw: the whole block, [layer][K, V][token][KV head][dim] in the model's dtype, K after RoPE.
// Rows: [token][KV head][dim] float32, that is row_components() values per token; K before RoPE,
// un-rotated by the block's positions. Integer dtypes are rows of whole numbers.
//
// Every value of every dtype comes back from rows as it was, except the payload of a NaN. V is not
// computed with, so what was read is written back bit for bit; K that was un-rotated and rotated
// comes back within a rounding of its float32 arithmetic, 2^-22 of the pair's size, and of the
// dtype.
//
// Immutable, thread-safe.
class RawKv {
 public:
  RawKv(const KvGeometry& geometry, const RopeSpec& rope);

  const KvGeometry& geometry() const { return geometry_; }

  // Whether K of the layer is un-rotated. False where the model does not rotate, and where how it
  // does is not known: with a scaling rule, a theta of 0, or dimensions that do not pair up. K rows
  // are what the engine gave then.
  bool unrotates_k(std::uint32_t layer) const;
  // How many pairs of dimensions of each head it turns; 0 where it turns none. Pair i turns by
  // PortableInversePower(theta, i / pairs) per position.
  std::uint32_t rotated_pairs(std::uint32_t layer) const { return rotations_[layer].pair_count; }

  // For the block whose first token has this position. Costs some 50 ns per pair and token, so it
  // is made once for all layers. Angles are computed in double precision, to the same bits on every
  // machine.
  RopeAngles AnglesAt(std::uint32_t first_position) const;

  // By which K after RoPE is turned to stand so many positions later (less than 2^32), or earlier:
  // the same for each token of the block.
  RopeAngles AnglesOfShift(std::int64_t positions) const;

  // REQUIRES: raw.size() == geometry().raw_block_bytes(), rows.size() == block_tokens *
  // row_components(layer, kind), angles of this object.
  void ReadRows(std::span<const std::byte> raw, std::uint32_t layer, KvKind kind,
                const RopeAngles& angles, std::span<float> rows) const;

  // Rounds to the nearest value of the dtype, to the even one of two. What is finite stays finite:
  // beyond the dtype's range it is the largest value. Infinity and NaN are themselves where the
  // dtype has them; otherwise the largest value, and 0. Un-rotated rows are rotated in place:
  // `rows` holds K after RoPE then.
  void WriteRows(std::span<float> rows, std::uint32_t layer, KvKind kind, const RopeAngles& angles,
                 std::span<std::byte> raw) const;

  // Turns rows as WriteRows does, without writing them. REQUIRES: as WriteRows.
  void RotateRows(std::span<float> rows, std::uint32_t layer, KvKind kind,
                  const RopeAngles& angles) const;

  // The tokens of the block, ascending, whose row has a component that is not a finite number below
  // kComponentLimit. REQUIRES: as ReadRows.
  std::vector<std::uint32_t> ExtremeTokens(std::span<const std::byte> raw, std::uint32_t layer,
                                           KvKind kind) const;

 private:
  // Which table of RopeAngles turns a layer, and how many pairs; none when pair_count is 0.
  struct Rotation {
    std::uint32_t table = 0;
    std::uint32_t pair_count = 0;
  };

  // Token i of the block is turned by first + i * step positions.
  RopeAngles AnglesOf(double first, double step) const;
  void Rotate(std::span<float> rows, std::uint32_t layer, const RopeAngles& angles,
              float direction) const;

  KvGeometry geometry_;
  RopePairing pairing_;
  double theta_;
  std::vector<Rotation> rotations_;         // of each layer
  std::vector<std::uint32_t> pair_counts_;  // of each table
};

}  // namespace kvtrie
