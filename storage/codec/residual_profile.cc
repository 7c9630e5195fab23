// PROFILE.md has the layout: the order of Fields().
#include "storage/codec/residual_profile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "storage/base/byte_reader.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"
#include "storage/codec/importance.h"
#include "storage/codec/matrix_product.h"
#include "storage/codec/rans.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {
namespace {

constexpr std::size_t kLevelsMax = 8;
constexpr std::uint32_t kHeadDimMax = 4096;
constexpr std::uint32_t kHeadsMax = 1024;
constexpr std::uint32_t kComponentsMax = 65'536;
constexpr std::size_t kTableTokensMax = std::size_t{1} << 20;
constexpr std::uint32_t kExponentTablesMax = kRansTablesMax - kScaleClasses;
constexpr std::uint8_t kDifferencesFollow = 1;

class BodyWriter;
class BodyReader;
template <typename Archive, typename Profile>
void Fields(Archive& archive, Profile& profile);

class BodyWriter {
 public:
  template <typename T>
  void Value(const T& value) {
    writer_.Write(value);
  }
  // A count that the reader cannot know.
  template <typename T>
  void Count(const std::vector<T>& items, std::size_t /*most*/) {
    writer_.Write(static_cast<std::uint32_t>(items.size()));
  }
  template <typename T>
  void Array(const std::vector<T>& items, std::size_t count) {
    KV_CHECK(items.size() == count);
    writer_.WriteText({reinterpret_cast<const char*>(items.data()), count * sizeof(T)});
  }
  void Differences(const std::vector<ResidualProfile>& differences) {
    for (const ResidualProfile& profile : differences) {
      writer_.Write(kDifferencesFollow);
      Fields(*this, profile);
    }
  }
  bool ok() const { return true; }
  std::string Take() { return writer_.Take(); }

 private:
  ByteWriter writer_;
};

class BodyReader {
 public:
  explicit BodyReader(std::string_view body) : reader_(body) {}

  template <typename T>
  void Value(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      const auto byte = reader_.Read<std::uint8_t>();
      ok_ &= byte <= 1;
      value = byte != 0;
    } else {
      value = reader_.Read<T>();
    }
  }
  template <typename T>
  void Count(std::vector<T>& items, std::size_t most) {
    const std::size_t count = reader_.Read<std::uint32_t>();
    // Each item takes a byte at least.
    ok_ &= count <= most && count <= reader_.remaining_bytes();
    items.resize(ok() ? count : 0);
  }
  template <typename T>
  void Array(std::vector<T>& items, std::size_t count) {
    if (!ok() || count > reader_.remaining_bytes() / sizeof(T)) {
      ok_ = false;
      return;
    }
    items.resize(count);
    if (count > 0)
      std::memcpy(items.data(), reader_.ReadBytes(count * sizeof(T)).data(), count * sizeof(T));
  }
  // They are all that may follow, and have none of their own.
  void Differences(std::vector<ResidualProfile>& differences) {
    if (!ok() || reader_.remaining_bytes() == 0) return;
    ok_ = !in_differences_ && reader_.Read<std::uint8_t>() == kDifferencesFollow;
    if (!ok_) return;
    in_differences_ = true;
    Fields(*this, differences.emplace_back());
  }
  bool ok() const { return ok_ && reader_.ok(); }
  bool Done() const { return ok_ && reader_.Done(); }

 private:
  ByteReader reader_;
  bool ok_ = true;
  bool in_differences_ = false;
};

std::size_t InputComponents(const ResidualProfile& profile, std::uint32_t plane) {
  std::size_t count = 0;
  for (const std::uint32_t input :
       InputPlanes(profile.planes, plane, profile.plane_profiles[plane].inputs)) {
    count += profile.planes[input].components();
  }
  return count;
}

bool PlanesAreInOrder(const std::vector<PlaneShape>& planes) {
  std::size_t components = 0;
  for (std::size_t i = 0; i < planes.size(); ++i) {
    const PlaneShape& plane = planes[i];
    if (plane.heads < 1 || plane.heads > kHeadsMax) return false;
    if (plane.head_dim < 1 || plane.head_dim > kHeadDimMax) return false;
    if (plane.components() > kComponentsMax) return false;
    components += plane.components();
    if (plane.layer >= kLayersMax) return false;
    if (i == 0) {
      if (plane.layer != 0 || plane.is_v) return false;
      continue;
    }
    const PlaneShape& before = planes[i - 1];
    const bool v_of_layer =
        plane.is_v && !before.is_v && plane.layer == before.layer && plane.heads == before.heads;
    const bool next_layer = !plane.is_v && plane.layer == before.layer + 1;
    if (!v_of_layer && !next_layer) return false;
  }
  return components <= kRawBlockBytesMax;
}

// One function for both directions, so that they cannot differ.
template <typename Archive, typename Profile>
void Fields(Archive& archive, Profile& profile) {
  archive.Count(profile.planes, 2 * std::size_t{kLayersMax});
  for (auto& plane : profile.planes) {
    archive.Value(plane.layer);
    archive.Value(plane.is_v);
    archive.Value(plane.heads);
    archive.Value(plane.head_dim);
  }
  if (!archive.ok() || profile.planes.empty() || !PlanesAreInOrder(profile.planes)) return;

  archive.Value(profile.group_count);
  archive.Count(profile.levels, kLevelsMax);
  for (auto& level : profile.levels) {
    archive.Value(level.quality);
    archive.Value(level.step);
    archive.Value(level.rate_weight);
    archive.Value(level.importance_strength);
  }

  archive.Array(profile.class_frequencies, std::size_t{kScaleClasses} * kResidualSymbols);
  auto exponent_tables =
      static_cast<std::uint32_t>(profile.exponent_frequencies.size() / kExponentSymbols);
  archive.Value(exponent_tables);
  if (exponent_tables > kExponentTablesMax) return;
  archive.Array(profile.exponent_frequencies, std::size_t{exponent_tables} * kExponentSymbols);
  archive.Array(profile.expected, std::size_t{kScaleIndexMax} + 1);
  archive.Array(profile.offsets, std::size_t{kScaleClasses} * kRestoredOffsets);
  archive.Array(profile.carried, 2 * std::size_t{kScaleShiftMax} + 1);
  archive.Value(profile.prior);

  if constexpr (!std::is_const_v<Profile>) profile.plane_profiles.resize(profile.planes.size());
  for (std::uint32_t i = 0; i < profile.planes.size() && archive.ok(); ++i) {
    auto& plane = profile.plane_profiles[i];
    const std::size_t components = profile.planes[i].components();
    archive.Value(plane.block_count);
    if (plane.block_count != 1 && plane.block_count != profile.planes[i].heads) return;
    archive.Count(plane.inputs, 8);
    for (auto& input : plane.inputs) archive.Value(input);
    archive.Array(plane.bias, components);
    archive.Array(plane.input_scales, components);
    const std::size_t in = InputComponents(profile, i);
    archive.Array(plane.weights, components * in / plane.block_count);
    archive.Array(plane.weight_scales, components);
    archive.Array(plane.basis, components * components / plane.block_count);
    archive.Array(plane.basis_scales, components);
    archive.Array(plane.cell_exponents, components);
    archive.Array(plane.cell_scales, components);
    archive.Value(plane.exponent_table);
    archive.Count(plane.scales, kLevelsMax);
    for (auto& scales : plane.scales) archive.Array(scales, components);
  }

  archive.Count(profile.table_tokens, kTableTokensMax);
  archive.Array(profile.table_tokens, profile.table_tokens.size());
  archive.Array(profile.table_rows,
                profile.table_tokens.size() * FirstLayerComponents(profile.planes));
  archive.Value(profile.has_first_token);
  archive.Value(profile.first_token);
  archive.Array(profile.first_rows, profile.has_first_token ? profile.component_count() : 0);

  auto& importance = profile.importance;
  archive.Value(importance.query_heads);
  archive.Value(importance.covariance_rank);
  if (!archive.ok() || importance.query_heads > kHeadsMax ||
      importance.covariance_rank > kHeadDimMax) {
    return;
  }
  const ImportanceSizes sizes = SizesOf(profile.planes, profile.group_count, importance);
  archive.Array(importance.query_means, sizes.query_means);
  archive.Array(importance.query_factors, sizes.query_factors);
  archive.Array(importance.normalizers, sizes.normalizers);
  archive.Array(importance.weights, sizes.weights);
  archive.Differences(profile.differences);
}

absl::Status Bad(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("profile: ", what));
}
absl::Status BadPlane(std::size_t plane, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("profile: plane ", plane, ": ", what));
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}
bool AllPositive(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value) && value > 0; });
}

// What a profile of differences may not have, or has to have as the whole's.
absl::Status CheckDifferences(const ResidualProfile& whole, const ResidualProfile& of) {
  if (of.planes != whole.planes) return Bad("differences: planes");
  if (of.group_count != 0 && of.group_count != whole.group_count) {
    return Bad("differences: exponent groups");
  }
  if (!std::equal(
          of.levels.begin(), of.levels.end(), whole.levels.begin(), whole.levels.end(),
          [](const ResidualLevel& a, const ResidualLevel& b) { return a.quality == b.quality; })) {
    return Bad("differences: levels");
  }
  if (!of.table_tokens.empty()) return Bad("differences: token table");
  if (of.has_first_token) return Bad("differences: first token");
  if (of.importance.query_heads > 0) return Bad("differences: importance");
  if (!of.differences.empty()) return Bad("differences of differences");
  return absl::OkStatus();
}

}  // namespace

std::size_t FirstLayerComponents(std::span<const PlaneShape> planes) {
  std::size_t count = 0;
  for (const PlaneShape& plane : planes) {
    if (plane.layer == 0) count += plane.components();
  }
  return count;
}

std::vector<PlaneShape> PlanesOf(const ModelSpec& spec) {
  const KvGeometry geometry(spec);
  std::vector<PlaneShape> planes;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      if (geometry.row_components(layer, kind) == 0) continue;
      planes.push_back({.layer = layer,
                        .is_v = kind == KvKind::kV,
                        .heads = geometry.kv_heads(layer),
                        .head_dim = geometry.head_dim(layer, kind)});
    }
  }
  return planes;
}

std::vector<std::uint32_t> InputPlanes(std::span<const PlaneShape> planes, std::uint32_t plane,
                                       std::span<const PredictorInput> inputs) {
  std::vector<std::uint32_t> found;
  const auto add_layer = [&](std::int64_t layer) {
    for (std::uint32_t i = 0; i < plane; ++i) {
      if (planes[i].layer == layer && planes[i].layer < planes[plane].layer) found.push_back(i);
    }
  };
  const std::int64_t layer = planes[plane].layer;
  for (const PredictorInput input : inputs) {
    switch (input) {
      case PredictorInput::kLayerBelow:
        add_layer(layer - 1);
        break;
      case PredictorInput::kTwoBelow:
        add_layer(layer - 2);
        break;
      case PredictorInput::kFirstLayer:
        add_layer(0);
        break;
      case PredictorInput::kSameLayerK:
        if (planes[plane].is_v) found.push_back(plane - 1);
        break;
    }
  }
  return found;
}

std::size_t ResidualProfile::component_count() const {
  std::size_t count = 0;
  for (const PlaneShape& plane : planes) count += plane.components();
  return count;
}

absl::Status ResidualProfile::CheckConsistency() const {
  if (planes.empty() || !PlanesAreInOrder(planes)) return Bad("planes");
  if (plane_profiles.size() != planes.size()) return Bad("a plane without a profile");
  if (group_count > kExponentGroupsMax) return Bad("exponent groups");
  if (levels.empty() || levels.size() > kLevelsMax) return Bad("levels");
  for (const ResidualLevel& level : levels) {
    if (level.quality != Quality::kHigh && level.quality != Quality::kNearExact &&
        level.quality != Quality::kSmall) {
      return Bad("quality of a level");
    }
    if (!AllPositive({level.step})) return Bad("step");
    if (!AllFinite({level.rate_weight, level.importance_strength})) return Bad("level");
  }
  if (class_frequencies.size() != std::size_t{kScaleClasses} * kResidualSymbols ||
      expected.size() != std::size_t{kScaleIndexMax} + 1 ||
      offsets.size() != std::size_t{kScaleClasses} * kRestoredOffsets ||
      carried.size() != 2 * std::size_t{kScaleShiftMax} + 1 ||
      exponent_frequencies.size() % kExponentSymbols != 0) {
    return Bad("size of a table");
  }
  if (!AllFinite(offsets)) return Bad("offsets");
  // Energies start at 1 at least: their logarithm is taken.
  if (prior < 1 || std::any_of(carried.begin(), carried.end(), [](auto v) { return v < 1; })) {
    return Bad("energy to start with");
  }
  const std::size_t exponent_tables = exponent_frequencies.size() / kExponentSymbols;
  if (exponent_tables > kExponentTablesMax) return Bad("exponent tables");

  for (std::uint32_t i = 0; i < planes.size(); ++i) {
    const PlaneProfile& plane = plane_profiles[i];
    const std::size_t components = planes[i].components();
    if (plane.block_count != 1 && plane.block_count != planes[i].heads)
      return BadPlane(i, "blocks");
    if (group_count > 1 && group_count != plane.block_count) return BadPlane(i, "exponent groups");
    if (group_count > 0 && plane.exponent_table >= exponent_tables) {
      return BadPlane(i, "exponent table");
    }
    if (std::any_of(plane.inputs.begin(), plane.inputs.end(), [](PredictorInput input) {
          return input < PredictorInput::kLayerBelow || input > PredictorInput::kSameLayerK;
        })) {
      return BadPlane(i, "unknown input");
    }
    const std::vector<std::uint32_t> inputs = InputPlanes(planes, i, plane.inputs);
    std::size_t in = 0;
    for (const std::uint32_t input : inputs) {
      if (planes[input].components() % plane.block_count != 0) return BadPlane(i, "input");
      in += planes[input].components();
    }
    if (in > IntegerProduct::kInputsMax) return BadPlane(i, "too many inputs");
    if (plane.bias.size() != components || plane.input_scales.size() != components ||
        plane.weight_scales.size() != components || plane.basis_scales.size() != components ||
        plane.cell_exponents.size() != components || plane.cell_scales.size() != components ||
        plane.weights.size() != components * in / plane.block_count ||
        plane.basis.size() != components * components / plane.block_count) {
      return BadPlane(i, "size of a matrix");
    }
    if (!AllFinite(plane.bias) || !AllFinite(plane.weight_scales)) return BadPlane(i, "not finite");
    if (!AllPositive(plane.input_scales) || !AllPositive(plane.basis_scales)) {
      return BadPlane(i, "scales");
    }
    if (std::any_of(plane.weights.begin(), plane.weights.end(), [](int weight) {
          return weight < -IntegerProduct::kWeightMax || weight > IntegerProduct::kWeightMax;
        })) {
      return BadPlane(i, "weights");
    }
    if (std::any_of(plane.cell_scales.begin(), plane.cell_scales.end(),
                    [](int scale) { return scale > kScaleIndexMax; })) {
      return BadPlane(i, "scale index of cells");
    }
    if (plane.scales.size() != levels.size()) return BadPlane(i, "levels");
    for (const auto& scales : plane.scales) {
      if (scales.size() != components) return BadPlane(i, "size of a level");
      if (std::any_of(scales.begin(), scales.end(),
                      [](int scale) { return scale > kScaleIndexMax && scale != kNotCoded; })) {
        return BadPlane(i, "scale index");
      }
    }
  }
  if (std::adjacent_find(table_tokens.begin(), table_tokens.end(), std::greater_equal<>()) !=
      table_tokens.end()) {
    return Bad("token table");
  }
  if (table_rows.size() != table_tokens.size() * FirstLayerComponents(planes)) {
    return Bad("rows of the token table");
  }
  if (first_rows.size() != (has_first_token ? component_count() : 0) || !AllFinite(first_rows)) {
    return Bad("first token");
  }
  if (absl::Status status = CheckImportance(planes, group_count, importance); !status.ok()) {
    return Bad(status.message());
  }
  if (differences.empty()) return absl::OkStatus();
  if (differences.size() > 1) return Bad("differences twice");
  if (absl::Status status = differences[0].CheckConsistency(); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(status.message(), " (of differences)"));
  }
  return CheckDifferences(*this, differences[0]);
}

std::string ResidualProfile::EncodeBody() const {
  const absl::Status consistent = CheckConsistency();
  KV_CHECK(consistent.ok());
  BodyWriter writer;
  Fields(writer, *this);
  return writer.Take();
}

absl::StatusOr<ResidualProfile> ResidualProfile::DecodeBody(std::string_view body) {
  BodyReader reader(body);
  ResidualProfile profile;
  Fields(reader, profile);
  if (!reader.Done())
    return absl::DataLossError("profile: the body is cut off or has a wrong count");
  if (absl::Status status = profile.CheckConsistency(); !status.ok()) {
    return absl::DataLossError(status.message());
  }
  return profile;
}

}  // namespace kvtrie
