#include "gpu/device_profile.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/importance.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/portable_math.h"
#include "storage/codec/residual_level.h"

namespace kvtrie::gpu {
namespace {

constexpr int kCodeOfZero = 128;

std::size_t Round16(std::size_t count) { return (count + 15) / 16 * 16; }

// Arrays that go to a device in one piece. Their pointers are set when they are there.
class UploadedArrays {
 public:
  template <typename T>
  void Add(const std::vector<T>& values, const T*& pointer) {
    if (values.empty()) return;
    const std::size_t at = layout_.Add<T>(values.size());
    image_.resize(layout_.bytes());
    std::memcpy(image_.data() + at, values.data(), values.size() * sizeof(T));
    places_.push_back([at, &pointer](const std::byte* begin) {
      pointer = reinterpret_cast<const T*>(begin + at);
    });
  }

  absl::StatusOr<DeviceMemory> To(Device& device, DeviceStream& stream) const {
    KV_ASSIGN_OR_RETURN(DeviceMemory memory,
                        DeviceMemory::Of(device, std::max<std::size_t>(image_.size(), 1)));
    stream.CopyToDevice(memory.data(), image_.data(), image_.size());
    KV_RETURN_IF_ERROR(stream.Synchronize());
    for (const auto& place : places_) place(memory.data());
    return memory;
  }

 private:
  MemoryLayout layout_;
  std::vector<std::byte> image_;
  std::vector<std::function<void(const std::byte*)>> places_;
};

// Weights as products take them, and their sums.
void AddPrediction(const PlaneProfile& of, std::size_t in_count, DevicePlane& plane,
                   UploadedArrays& to) {
  std::vector<float> offset = of.bias;
  const std::size_t components = of.bias.size();
  if (in_count > 0) {
    std::vector<std::int32_t> sums(components);
    std::vector<std::int8_t> weights(std::size_t{plane.block_count} * plane.out * plane.in);
    for (std::size_t c = 0; c < components; ++c) {
      const std::int8_t* const from = of.weights.data() + c * in_count;
      const std::size_t block = c / plane.block_components;
      std::copy_n(
          from, in_count,
          weights.begin() + static_cast<std::ptrdiff_t>(
                                (block * plane.out + c % plane.block_components) * plane.in));
      std::int32_t sum = 0;
      for (std::size_t i = 0; i < in_count; ++i) sum += from[i];
      sums[c] = kCodeOfZero * sum;
      offset[c] -= of.weight_scales[c] * static_cast<float>(sums[c]);
    }
    to.Add(weights, plane.weights);
    to.Add(sums, plane.sums);
  }
  to.Add(offset, plane.offset);
  to.Add(of.weight_scales, plane.scale);
}

}  // namespace

SymbolTable MakeSymbolTable(std::span<const std::uint16_t> frequencies) {
  KV_CHECK(frequencies.size() <= kTableSymbols);
  SymbolTable table = {};
  std::uint32_t begin = 0;
  for (std::uint32_t symbol = 0; symbol < kTableSymbols; ++symbol) {
    table.begins[symbol] = static_cast<std::uint16_t>(begin);
    const std::uint32_t frequency = symbol < frequencies.size() ? frequencies[symbol] : 0;
    for (std::uint32_t slot = begin; slot < begin + frequency; ++slot) {
      if (slot % kBucketSlots == 0) {
        table.first[slot / kBucketSlots] = static_cast<std::uint8_t>(symbol);
      }
    }
    begin += frequency;
    KV_CHECK(begin <= kRansFrequencySum);
  }
  KV_CHECK(begin == kRansFrequencySum);
  table.begins[kTableSymbols] = kRansFrequencySum;
  return table;
}

absl::StatusOr<std::unique_ptr<const DeviceProfile>> DeviceProfile::Upload(
    Device& device, const ModelSpec& spec, const ResidualProfile& profile) {
  auto made = std::unique_ptr<DeviceProfile>(new DeviceProfile());
  DeviceProfile& to = *made;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, device.NewStream());
  to.exponent_groups_ = profile.group_count;
  to.component_count_ = profile.component_count();
  to.prior_ = profile.prior;

  // What all planes share.
  const KvGeometry geometry(spec);
  const RawKv raw_kv(geometry, spec.rope);
  UploadedArrays shared;
  std::vector<SymbolTable> tables;
  const std::vector<std::uint32_t> limits = SymbolLimits(profile);
  for (std::size_t i = 0; i < std::size_t{kScaleClasses}; ++i) {
    tables.push_back(MakeSymbolTable(
        std::span(profile.class_frequencies).subspan(i * kResidualSymbols, kResidualSymbols)));
    tables.back().limit = static_cast<std::uint16_t>(limits[i]);
  }
  for (std::size_t i = 0; i < profile.exponent_frequencies.size(); i += kExponentSymbols) {
    tables.push_back(
        MakeSymbolTable(std::span(profile.exponent_frequencies).subspan(i, kExponentSymbols)));
  }
  shared.Add(tables, to.tables_);
  shared.Add(profile.expected, to.expected_);
  shared.Add(profile.carried, to.carried_);
  shared.Add(profile.offsets, to.offsets_);
  shared.Add(profile.table_rows, to.table_rows_);
  to.table_width_ = static_cast<std::uint32_t>(FirstLayerComponents(profile.planes));
  to.levels_.reserve(profile.levels.size());
  for (const ResidualLevel& level : profile.levels) {
    to.levels_.push_back({level.quality, level.step, nullptr});
    shared.Add(RateThresholds(profile, level.rate_weight), to.levels_.back().thresholds);
  }
  const bool has_importance = profile.importance.query_heads > 0 && profile.group_count > 0;
  to.query_heads_ = profile.importance.query_heads;
  to.covariance_rank_ = profile.importance.covariance_rank;
  for (const PlaneShape& plane : profile.planes) {
    to.heads_max_ = std::max(to.heads_max_, plane.heads);
  }
  if (has_importance) {
    const std::vector<RopePairs> rope = RopePairs::OfLayers(spec);
    to.importance_.resize(geometry.layer_count());
    for (const PlaneShape& plane : profile.planes) {
      if (plane.is_v) continue;
      std::vector<float> matrix;
      for (std::uint32_t head = 0; head < plane.heads; ++head) {
        const std::vector<float> of_head =
            ScoreMatrix(profile, rope[plane.layer], plane.layer, head);
        const std::size_t columns = of_head.size() / plane.head_dim;
        for (std::size_t column = 0; column < columns; ++column) {
          for (std::size_t i = 0; i < plane.head_dim; ++i) {
            matrix.push_back(of_head[i * columns + column]);
          }
        }
      }
      const std::size_t count = std::size_t{kImportanceDistanceCount} * to.query_heads_;
      const auto normalizers =
          profile.importance.normalizers.begin() + static_cast<std::ptrdiff_t>(plane.layer * count);
      DeviceImportance& of_layer = to.importance_[plane.layer];
      shared.Add(matrix, of_layer.matrix);
      shared.Add(std::vector<float>(normalizers, normalizers + static_cast<std::ptrdiff_t>(count)),
                 of_layer.normalizers);
    }
  }
  std::vector<std::uint32_t> pair_counts;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    const std::uint32_t pairs = raw_kv.rotated_pairs(layer);
    const auto found = std::find(pair_counts.begin(), pair_counts.end(), pairs);
    to.rotation_of_layer_.push_back(pairs == 0 ? -1
                                               : static_cast<int>(found - pair_counts.begin()));
    if (pairs != 0 && found == pair_counts.end()) pair_counts.push_back(pairs);
  }
  to.rotations_.resize(pair_counts.size());
  for (std::size_t i = 0; i < pair_counts.size(); ++i) {
    to.rotations_[i].pairs = pair_counts[i];
    std::vector<double> frequencies;
    for (std::uint32_t pair = 0; pair < pair_counts[i]; ++pair) {
      frequencies.push_back(
          PortableInversePower(spec.rope.theta, static_cast<double>(pair) / pair_counts[i]));
    }
    shared.Add(frequencies, to.rotations_[i].frequencies);
  }
  KV_ASSIGN_OR_RETURN(DeviceMemory shared_memory, shared.To(device, *stream));
  to.memory_.push_back(std::move(shared_memory));

  std::size_t first_component = 0;
  to.planes_.resize(profile.planes.size());
  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) {
    const PlaneProfile& of = profile.plane_profiles[i];
    DevicePlane& plane = to.planes_[i];
    plane.shape = profile.planes[i];
    const std::uint32_t components = plane.shape.components();
    plane.block_count = of.block_count;
    plane.block_components = components / of.block_count;
    plane.inputs = InputPlanes(profile.planes, i, of.inputs);
    if (plane.inputs.size() > kInputPlanesMax) {
      return absl::UnavailableError(
          absl::StrCat("profile: plane ", i, " has more inputs than a device takes"));
    }
    std::size_t in = 0;
    for (const std::uint32_t input : plane.inputs) {
      in += profile.planes[input].components() / of.block_count;
    }
    plane.in = static_cast<std::uint32_t>(Round16(in));
    plane.out = static_cast<std::uint32_t>(Round16(plane.block_components));
    plane.exponent_table = static_cast<std::uint32_t>(kScaleClasses) + of.exponent_table;
    if (plane.shape.layer == 0) plane.table_first = static_cast<std::uint32_t>(first_component);

    UploadedArrays own;
    AddPrediction(of, in, plane, own);
    std::vector<float> inverse(components), analysis;
    for (std::size_t c = 0; c < components; ++c) inverse[c] = 1 / of.input_scales[c];
    for (std::uint32_t block = 0; block < of.block_count; ++block) {
      const std::vector<float> matrix = AnalysisMatrix(profile, i, block);
      analysis.insert(analysis.end(), matrix.begin(), matrix.end());
    }
    own.Add(of.bias, plane.bias);
    own.Add(of.input_scales, plane.input_scales);
    own.Add(inverse, plane.inverse_scales);
    own.Add(of.basis, plane.basis);
    own.Add(of.basis_scales, plane.basis_scales);
    own.Add(analysis, plane.analysis);
    plane.scales.resize(of.scales.size());
    for (std::size_t level = 0; level < of.scales.size(); ++level) {
      own.Add(of.scales[level], plane.scales[level]);
    }
    if (has_importance) {
      const std::size_t count = ImportanceFeatureCount(profile.planes) * profile.group_count;
      const auto weights =
          profile.importance.weights.begin() + static_cast<std::ptrdiff_t>(i * count);
      own.Add(std::vector<float>(weights, weights + static_cast<std::ptrdiff_t>(count)),
              plane.importance_weights);
    }
    if (profile.has_first_token) {
      const auto first = profile.first_rows.begin() + static_cast<std::ptrdiff_t>(first_component);
      own.Add(std::vector<float>(first, first + components), plane.first_row);
    }
    KV_ASSIGN_OR_RETURN(DeviceMemory memory, own.To(device, *stream));
    to.memory_.push_back(std::move(memory));

    first_component += components;
    to.components_max_ = std::max(to.components_max_, components);
    to.gathered_max_ = std::max(to.gathered_max_, std::size_t{plane.block_count} * plane.in);
    if (in > 0) {
      to.products_max_ = std::max(to.products_max_, std::size_t{plane.block_count} * plane.out);
    }
  }
  return made;
}

int DeviceProfile::LevelOf(Quality quality) const {
  for (std::size_t i = 0; i < levels_.size(); ++i) {
    if (levels_[i].quality == quality) return static_cast<int>(i);
  }
  return -1;
}

PlaneSymbols DeviceProfile::SymbolsOf(std::uint32_t plane, int level) const {
  const DevicePlane& of = planes_[plane];
  const auto l = static_cast<std::size_t>(level);
  PlaneSymbols symbols;
  symbols.tables = tables_;
  symbols.expected = expected_;
  symbols.carried = carried_;
  symbols.offsets = offsets_;
  symbols.thresholds = levels_[l].thresholds;
  symbols.scales = of.scales[l];
  symbols.components = of.shape.components();
  symbols.block_components = of.block_components;
  symbols.exponent_groups = exponent_groups_;
  symbols.exponent_table = of.exponent_table;
  symbols.prior = prior_;
  symbols.step = levels_[l].step;
  return symbols;
}

}  // namespace kvtrie::gpu
