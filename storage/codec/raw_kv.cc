#include "storage/codec/raw_kv.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/portable_math.h"

namespace kvtrie {
namespace {

// codec_kernels_impl.h lists the conversions in this order.
static_assert(static_cast<int>(DType::kFloat32) == 1);
static_assert(static_cast<int>(DType::kFloat16) == 2);
static_assert(static_cast<int>(DType::kBfloat16) == 3);
static_assert(static_cast<int>(DType::kFloat8E4m3) == 4);
static_assert(static_cast<int>(DType::kFloat8E5m2) == 5);
static_assert(static_cast<int>(DType::kInt8) == 6);
static_assert(static_cast<int>(DType::kUint8) == 7);

const std::uint8_t* Bytes(std::span<const std::byte> bytes) {
  return reinterpret_cast<const std::uint8_t*>(bytes.data());
}

}  // namespace

RawKv::RawKv(const KvGeometry& geometry, const RopeSpec& rope)
    : geometry_(geometry), pairing_(rope.pairing), theta_(rope.theta) {
  const bool known = pairing_ != RopePairing::kNone && theta_ > 0 && rope.scaling.empty();
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    const std::uint32_t head_dim = geometry.head_dim(layer, KvKind::kK);
    const std::uint32_t dims = rope.rotary_dims == 0 ? head_dim : rope.rotary_dims;
    Rotation& rotation = rotations_.emplace_back();
    if (!known || dims % 2 != 0 || dims > head_dim) continue;
    rotation.pair_count = dims / 2;
    const auto found = std::find(pair_counts_.begin(), pair_counts_.end(), rotation.pair_count);
    rotation.table = static_cast<std::uint32_t>(found - pair_counts_.begin());
    if (found == pair_counts_.end()) pair_counts_.push_back(rotation.pair_count);
  }
}

bool RawKv::unrotates_k(std::uint32_t layer) const { return rotations_[layer].pair_count != 0; }

RopeAngles RawKv::AnglesAt(std::uint32_t first_position) const {
  return AnglesOf(first_position, 1);
}

RopeAngles RawKv::AnglesOfShift(std::int64_t positions) const {
  KV_CHECK(std::abs(positions) <= UINT32_MAX);
  return AnglesOf(static_cast<double>(positions), 0);
}

RopeAngles RawKv::AnglesOf(double first, double step) const {
  RopeAngles angles;
  for (const std::uint32_t pair_count : pair_counts_) {
    std::vector<float>& table = angles.tables_.emplace_back();
    const std::size_t stride = pairing_ == RopePairing::kInterleaved ? 2 : 1;
    table.resize(std::size_t{2} * pair_count * stride * geometry_.block_tokens());
    for (std::uint32_t pair = 0; pair < pair_count; ++pair) {
      const double frequency = PortableInversePower(theta_, static_cast<double>(pair) / pair_count);
      float* cosines = table.data() + pair * stride;
      for (std::uint32_t token = 0; token < geometry_.block_tokens(); ++token) {
        const double positions = first + step * token;
        const SineAndCosine of = PortableSineAndCosine(std::abs(positions) * frequency);
        const auto cosine = static_cast<float>(of.cosine);
        const auto sine = static_cast<float>(positions < 0 ? -of.sine : of.sine);
        float* const sines = cosines + pair_count * stride;
        cosines[0] = cosine;
        sines[0] = sine;
        if (stride == 2) {
          cosines[1] = cosine;
          sines[1] = -sine;
        }
        cosines += 2 * pair_count * stride;
      }
    }
  }
  return angles;
}

void RawKv::Rotate(std::span<float> rows, std::uint32_t layer, const RopeAngles& angles,
                   float direction) const {
  const Rotation& rotation = rotations_[layer];
  const std::vector<float>& table = angles.tables_[rotation.table];
  const auto rotate = pairing_ == RopePairing::kInterleaved ? Kernels().rotate_interleaved
                                                            : Kernels().rotate_half_split;
  rotate(rows.data(), geometry_.block_tokens(), geometry_.kv_heads(layer),
         geometry_.head_dim(layer, KvKind::kK), rotation.pair_count, table.data(), direction);
}

void RawKv::ReadRows(std::span<const std::byte> raw, std::uint32_t layer, KvKind kind,
                     const RopeAngles& angles, std::span<float> rows) const {
  KV_CHECK(raw.size() == geometry_.raw_block_bytes());
  KV_CHECK(rows.size() ==
           std::size_t{geometry_.block_tokens()} * geometry_.row_components(layer, kind));
  Kernels().load_floats[static_cast<std::size_t>(geometry_.dtype())](
      Bytes(raw) + geometry_.kind_begin(layer, kind), rows.size(), rows.data());
  if (kind == KvKind::kK && unrotates_k(layer)) Rotate(rows, layer, angles, 1.0f);
}

void RawKv::WriteRows(std::span<float> rows, std::uint32_t layer, KvKind kind,
                      const RopeAngles& angles, std::span<std::byte> raw) const {
  KV_CHECK(raw.size() == geometry_.raw_block_bytes());
  RotateRows(rows, layer, kind, angles);
  Kernels().store_floats[static_cast<std::size_t>(geometry_.dtype())](
      rows.data(), rows.size(),
      reinterpret_cast<std::uint8_t*>(raw.data()) + geometry_.kind_begin(layer, kind));
}

void RawKv::RotateRows(std::span<float> rows, std::uint32_t layer, KvKind kind,
                       const RopeAngles& angles) const {
  KV_CHECK(rows.size() ==
           std::size_t{geometry_.block_tokens()} * geometry_.row_components(layer, kind));
  if (kind == KvKind::kK && unrotates_k(layer)) Rotate(rows, layer, angles, -1.0f);
}

std::vector<std::uint32_t> RawKv::ExtremeTokens(std::span<const std::byte> raw, std::uint32_t layer,
                                                KvKind kind) const {
  KV_CHECK(raw.size() == geometry_.raw_block_bytes());
  constexpr std::size_t kPieceComponents = 1024;
  float piece[kPieceComponents];
  const std::size_t row_components = geometry_.row_components(layer, kind);
  const std::size_t component_bytes = DTypeBytes(geometry_.dtype());
  const auto load_floats = Kernels().load_floats[static_cast<std::size_t>(geometry_.dtype())];
  const std::uint8_t* from = Bytes(raw) + geometry_.kind_begin(layer, kind);
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t token = 0; token < geometry_.block_tokens(); ++token) {
    bool extreme = false;
    for (std::size_t at = 0; at < row_components; at += kPieceComponents) {
      const std::size_t count = std::min(kPieceComponents, row_components - at);
      load_floats(from + at * component_bytes, count, piece);
      extreme |= !Kernels().all_below(piece, count, kComponentLimit);
    }
    if (extreme) tokens.push_back(token);
    from += row_components * component_bytes;
  }
  return tokens;
}

}  // namespace kvtrie
