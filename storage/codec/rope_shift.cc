#include "storage/codec/rope_shift.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"

namespace kvtrie {
namespace {

ModelSpec WithBlocksOfOneToken(ModelSpec spec) {
  spec.block_tokens = 1;
  return spec;
}

}  // namespace

absl::Status RopeShift::Check(const ModelSpec& spec) {
  const auto refuse = [](const auto&... parts) {
    return absl::FailedPreconditionError(
        absl::StrCat(parts..., ": K cannot be taken to other positions"));
  };
  if (!spec.layout_tag.empty()) return refuse("layout_tag: only the engine knows this layout");
  if (spec.rope.pairing == RopePairing::kNone) return absl::OkStatus();
  if (!spec.rope.scaling.empty())
    return refuse("rope.scaling: what it does to angles is not known");
  if (!(spec.rope.theta > 0)) return refuse("rope.theta: not given");
  if (spec.dtype == DType::kInt8 || spec.dtype == DType::kUint8) {
    return refuse("dtype: integers are numbers only with scales, which are not known");
  }
  const KvGeometry geometry(spec);
  const RawKv raw_kv(geometry, spec.rope);
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    if (!raw_kv.unrotates_k(layer)) {
      return refuse("rope.rotary_dims: they do not pair up within K of layer ", layer);
    }
  }
  return absl::OkStatus();
}

RopeShift::RopeShift(const ModelSpec& spec, std::int64_t positions)
    : geometry_(spec),
      one_token_(KvGeometry(WithBlocksOfOneToken(spec)), spec.rope),
      angles_(one_token_.AnglesOfShift(positions)),
      is_still_(positions == 0 || spec.rope.pairing == RopePairing::kNone) {}

std::vector<std::uint32_t> RopeShift::Copy(std::span<const std::byte> from,
                                           std::uint32_t from_token, std::span<std::byte> to,
                                           std::uint32_t to_token, std::uint32_t count) const {
  KV_CHECK(from.size() == geometry_.raw_block_bytes() && to.size() == from.size());
  KV_CHECK(from_token + count <= geometry_.block_tokens());
  KV_CHECK(to_token + count <= geometry_.block_tokens());
  const auto dtype = static_cast<std::size_t>(geometry_.dtype());
  std::vector<bool> is_extreme(count);
  std::vector<float> rows;
  for (std::uint32_t layer = 0; layer < geometry_.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t components = geometry_.row_components(layer, kind);
      const std::size_t row_bytes = components * DTypeBytes(geometry_.dtype());
      const std::byte* source =
          from.data() + geometry_.kind_begin(layer, kind) + from_token * row_bytes;
      std::byte* target = to.data() + geometry_.kind_begin(layer, kind) + to_token * row_bytes;
      if (kind == KvKind::kV || is_still_) {
        if (row_bytes > 0) std::memcpy(target, source, count * row_bytes);
        continue;
      }
      rows.resize(count * components);
      Kernels().load_floats[dtype](reinterpret_cast<const std::uint8_t*>(source), rows.size(),
                                   rows.data());
      for (std::uint32_t token = 0; token < count; ++token) {
        const auto row = std::span(rows).subspan(token * components, components);
        if (!Kernels().all_below(row.data(), row.size(), kComponentLimit)) {
          is_extreme[token] = true;
          continue;
        }
        one_token_.RotateRows(row, layer, kind, angles_);
      }
      Kernels().store_floats[dtype](rows.data(), rows.size(),
                                    reinterpret_cast<std::uint8_t*>(target));
    }
  }
  std::vector<std::uint32_t> extreme;
  for (std::uint32_t token = 0; token < count; ++token) {
    if (is_extreme[token]) extreme.push_back(token);
  }
  return extreme;
}

}  // namespace kvtrie
