#include "gpu/device_model.h"

#include <algorithm>

#include "storage/base/check.h"

namespace kvtrie::gpu {
namespace {

// kernels.h knows them by number.
static_assert(static_cast<int>(DType::kFloat32) == static_cast<int>(NumberType::kFloat32));
static_assert(static_cast<int>(DType::kFloat16) == static_cast<int>(NumberType::kFloat16));
static_assert(static_cast<int>(DType::kBfloat16) == static_cast<int>(NumberType::kBfloat16));
static_assert(static_cast<int>(DType::kFloat8E4m3) == static_cast<int>(NumberType::kFloat8E4m3));
static_assert(static_cast<int>(DType::kFloat8E5m2) == static_cast<int>(NumberType::kFloat8E5m2));
static_assert(static_cast<int>(DType::kInt8) == static_cast<int>(NumberType::kInt8));
static_assert(static_cast<int>(DType::kUint8) == static_cast<int>(NumberType::kUint8));

constexpr std::size_t kLayersKept = 3;  // beside layer 0: a layer reads the two below, and writes

}  // namespace

BatchMemory::BatchMemory(const DeviceModel& model, std::uint32_t block_count,
                         MemoryLayout& layout) {
  const DeviceProfile& profile = *model.profile;
  const std::size_t row_count = std::size_t{block_count} * model.rows_of_block();
  const std::size_t plane_numbers = row_count * profile.components_max();
  for (std::size_t& of_parity : values) of_parity = layout.Add<float>(plane_numbers);
  rows = layout.Add<float>(plane_numbers);
  gathered = layout.Add<std::int8_t>(row_count * profile.gathered_max());
  products = layout.Add<std::int32_t>(row_count * profile.products_max());
  codes_stride = (plane_numbers + MemoryLayout::kAlignment - 1) / MemoryLayout::kAlignment *
                 MemoryLayout::kAlignment;
  codes = layout.Add(2 * (1 + kLayersKept) * codes_stride);
  for (const DeviceRotation& rotation : profile.rotations()) {
    cosines.push_back(layout.Add<float>(row_count * rotation.pairs));
    sines.push_back(layout.Add<float>(row_count * rotation.pairs));
  }
}

BatchPlanes::BatchPlanes(const DeviceModel& model, const BatchMemory& memory,
                         std::uint32_t block_count, std::byte* device,
                         const std::uint32_t* first_positions, const std::int32_t* table_entries,
                         DeviceStream& stream)
    : model_(model),
      memory_(memory),
      row_count_(block_count * model.rows_of_block()),
      device_(device),
      table_entries_(table_entries),
      stream_(stream) {
  for (std::size_t i = 0; i < model.profile->rotations().size(); ++i) {
    const DeviceRotation& rotation = model.profile->rotations()[i];
    AnglesArgs args;
    args.frequencies = rotation.frequencies;
    args.first_positions = first_positions;
    args.cosines = At<float>(memory.cosines[i]);
    args.sines = At<float>(memory.sines[i]);
    args.pairs = rotation.pairs;
    args.rows_of_block = model.rows_of_block();
    args.row_count = row_count_;
    stream.Launch(args);
  }
  // Rows that nothing is coded of have values too.
  for (const std::uint32_t parity : {0u, 1u}) {
    stream.Zero(values(parity),
                std::size_t{row_count_} * model.profile->components_max() * sizeof(float));
  }
}

std::int8_t* BatchPlanes::CodesOf(std::uint32_t plane) const {
  const PlaneShape& shape = model_.profile->planes()[plane].shape;
  const std::size_t layer = shape.layer == 0 ? 0 : 1 + shape.layer % kLayersKept;
  return At<std::int8_t>(memory_.codes + (2 * layer + (shape.is_v ? 1 : 0)) * memory_.codes_stride);
}

Prediction BatchPlanes::Predict(std::uint32_t plane) {
  const DevicePlane& of = model_.profile->planes()[plane];
  Prediction prediction;
  prediction.sums = of.sums;
  prediction.offset = of.offset;
  prediction.scale = of.scale;
  prediction.input_scales = of.input_scales;
  prediction.components = of.shape.components();
  prediction.block_components = of.block_components;
  prediction.row_count = row_count_;
  if (of.shape.layer == 0 && model_.profile->table_rows() != nullptr) {
    prediction.table_entries = table_entries_;
    prediction.table_rows = model_.profile->table_rows() + of.table_first;
    prediction.table_width = model_.profile->table_width();
  }
  if (of.in == 0) return prediction;

  GatherArgs gather;
  gather.input_count = static_cast<std::uint32_t>(of.inputs.size());
  for (std::size_t i = 0; i < of.inputs.size(); ++i) {
    gather.codes[i] = CodesOf(of.inputs[i]);
    gather.widths[i] = model_.profile->planes()[of.inputs[i]].shape.components() / of.block_count;
  }
  gather.in_stride = of.in;
  gather.plane_blocks = of.block_count;
  gather.row_count = row_count_;
  gather.gathered = At<std::int8_t>(memory_.gathered);
  stream_.Launch(gather);

  IntegerProductArgs product;
  product.rows = gather.gathered;
  product.matrix = of.weights;
  product.products = At<std::int32_t>(memory_.products);
  product.batch_count = of.block_count;
  product.row_count = row_count_;
  product.in = of.in;
  product.out = of.out;
  stream_.Multiply(product);
  prediction.products = product.products;
  prediction.out_stride = of.out;
  return prediction;
}

void BatchPlanes::Restore(std::uint32_t plane, int level, const Prediction& prediction,
                          bool with_rows) {
  const DevicePlane& of = model_.profile->planes()[plane];
  RestoreRowsArgs args;
  args.prediction = prediction;
  args.values = values(plane);
  args.scales = of.scales[static_cast<std::size_t>(level)];
  args.basis = of.basis;
  args.basis_scales = of.basis_scales;
  args.bias = of.bias;
  args.inverse_scales = of.inverse_scales;
  args.rows = with_rows ? rows() : nullptr;
  args.codes = CodesOf(plane);
  stream_.Launch(args);
}

void BatchPlanes::ChooseExponents(std::byte* raw, const std::uint32_t* behind,
                                  const std::int8_t* given, float strength, float* features,
                                  std::int8_t* exponents) {
  const DeviceProfile& profile = *model_.profile;
  const KvGeometry& geometry = model_.geometry;
  const std::span<const DevicePlane> planes = profile.planes();
  const std::size_t of_layer = std::size_t{row_count_} * LayerFeatureCount(profile.heads_max());
  float* const mean = features + geometry.layer_count() * of_layer;
  // Of heads that a layer has not.
  stream_.Zero(features, (geometry.layer_count() + 1) * of_layer * sizeof(float));
  const auto read = [&](std::uint32_t plane, float* to) {
    const PlaneShape& shape = planes[plane].shape;
    ReadRowsArgs args;
    args.plane = RawOf(plane, raw + geometry.kind_begin(shape.layer, shape.kind()),
                       geometry.raw_block_bytes());
    args.rows = to;
    args.row_count = row_count_;
    stream_.Launch(args);
  };
  for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
    const PlaneShape& k = planes[plane].shape;
    if (k.is_v) continue;
    const bool has_v = plane + 1 < planes.size() && planes[plane + 1].shape.is_v;
    read(plane, rows());
    if (has_v) read(plane + 1, values(0));
    ImportanceLayerArgs args;
    args.k_rows = rows();
    args.v_rows = has_v ? values(0) : nullptr;
    args.matrix = profile.importance()[k.layer].matrix;
    args.normalizers = profile.importance()[k.layer].normalizers;
    args.features = features + k.layer * of_layer;
    args.mean = mean;
    args.layer_count = geometry.layer_count();
    args.k_head_dim = k.head_dim;
    args.v_head_dim = has_v ? planes[plane + 1].shape.head_dim : 0;
    args.heads = k.heads;
    args.heads_max = profile.heads_max();
    args.query_heads = profile.query_heads();
    args.rank = profile.covariance_rank();
    args.row_count = row_count_;
    stream_.Launch(args);
  }
  for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
    ExponentsArgs args;
    args.features = features;
    args.mean = mean;
    args.weights = planes[plane].importance_weights;
    args.behind = behind;
    args.given = given;
    args.exponents = exponents + std::size_t{plane} * profile.exponent_groups() * row_count_;
    args.strength = strength;
    args.layer = planes[plane].shape.layer;
    args.layer_count = geometry.layer_count();
    args.heads_max = profile.heads_max();
    args.groups = profile.exponent_groups();
    args.row_count = row_count_;
    stream_.Launch(args);
  }
  // Rows that nothing is coded of have values too.
  stream_.Zero(values(0), std::size_t{row_count_} * profile.components_max() * sizeof(float));
}

RawPlane BatchPlanes::RawOf(std::uint32_t plane, std::byte* raw, std::size_t block_stride) const {
  const PlaneShape& shape = model_.profile->planes()[plane].shape;
  RawPlane of;
  of.raw = reinterpret_cast<std::uint8_t*>(raw);
  of.block_stride = block_stride;
  of.components = shape.components();
  of.head_dim = shape.head_dim;
  of.rows_of_block = model_.rows_of_block();
  of.block_tokens = model_.geometry.block_tokens();
  of.type = static_cast<NumberType>(model_.geometry.dtype());
  of.interleaved = model_.pairing == RopePairing::kInterleaved;
  const int rotation = model_.profile->RotationOf(shape.layer);
  if (!shape.is_v && rotation >= 0) {
    const auto r = static_cast<std::size_t>(rotation);
    of.cosines = At<float>(memory_.cosines[r]);
    of.sines = At<float>(memory_.sines[r]);
    of.pairs = model_.profile->rotations()[r].pairs;
  }
  return of;
}

void FindTableEntries(const ResidualProfile& profile, std::span<const TokenId> tokens,
                      std::span<std::int32_t> entries) {
  KV_CHECK(entries.size() >= tokens.size());
  std::fill(entries.begin(), entries.end(), -1);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const auto found =
        std::lower_bound(profile.table_tokens.begin(), profile.table_tokens.end(), tokens[t]);
    if (found == profile.table_tokens.end() || *found != tokens[t]) continue;
    entries[t] = static_cast<std::int32_t>(found - profile.table_tokens.begin());
  }
}

}  // namespace kvtrie::gpu
