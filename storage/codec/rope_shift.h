#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/codec/raw_kv.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// Takes KV of tokens to other positions: K after RoPE is turned by the angles of the difference
// (arXiv:2104.09864: the score of a query and a key depends on their distance only), V stays as it
// is. What comes out is what the model would have computed at the other position from the same
// hidden states; those depend on the text before, so it is approximate where that differs.
//
// K is turned in float32 and rounded to the nearest value of the dtype: within 2^-22 of the pair's
// size of the true rotation, and that rounding. A shift of 0 copies bit for bit. Models without
// RoPE have nothing to turn: their K is copied.
//
// Immutable, thread-safe.
class RopeShift {
 public:
  // FailedPrecondition: K of this model cannot be taken to other positions, and why.
  static absl::Status Check(const ModelSpec& spec);

  // By so many positions later, or earlier. REQUIRES: Check(spec) is OK; |positions| < 2^32.
  RopeShift(const ModelSpec& spec, std::int64_t positions);

  // Copies tokens [from_token, from_token + count) of one raw block to those from `to_token` on of
  // another one. The answer: those of them (from 0), ascending, whose K has a number that is not
  // finite or too large (kComponentLimit) and cannot be turned; what is there then is undefined.
  // REQUIRES: both have the raw size of a block, and these tokens; they do not overlap.
  std::vector<std::uint32_t> Copy(std::span<const std::byte> from, std::uint32_t from_token,
                                  std::span<std::byte> to, std::uint32_t to_token,
                                  std::uint32_t count) const;

 private:
  KvGeometry geometry_;
  RawKv one_token_;
  RopeAngles angles_;
  bool is_still_;
};

}  // namespace kvtrie
