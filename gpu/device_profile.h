#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/device.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie::gpu {

// One plane of a profile in a device's memory, and what says how to use it.
struct DevicePlane {
  PlaneShape shape;
  std::uint32_t block_count = 1;
  std::uint32_t block_components = 0;
  std::vector<std::uint32_t> inputs;  // planes
  std::uint32_t in = 0;               // of a block, up to a multiple of 16; 0: none
  std::uint32_t out = 0;              // likewise
  std::uint32_t exponent_table = 0;   // among all tables
  std::uint32_t table_first = 0;      // in a row of the token table, of layer 0

  const std::int8_t* weights = nullptr;  // [block][out][in], zeros where there is none
  const std::int32_t* sums = nullptr;    // [component] 128 times the sum of its weights
  const float* offset = nullptr;         // [component], and so on as kernels.h has them
  const float* scale = nullptr;
  const float* bias = nullptr;
  const float* input_scales = nullptr;
  const float* inverse_scales = nullptr;
  const std::int8_t* basis = nullptr;
  const float* basis_scales = nullptr;
  const float* analysis = nullptr;            // [block][component][value]
  const float* first_row = nullptr;           // of the profile's first token, or null
  const float* importance_weights = nullptr;  // [group][feature]; null: no model of importance
  std::vector<const std::uint8_t*> scales;    // [level][value]
};

// What turns K of a layer; none where pairs is 0.
struct DeviceRotation {
  std::uint32_t pairs = 0;
  const double* frequencies = nullptr;  // [pair]
};

// What tells the importance of a layer's tokens (importance.h).
struct DeviceImportance {
  const float* matrix = nullptr;       // [KV head][column][k_head_dim]
  const float* normalizers = nullptr;  // [distance][query head]
};

// A profile in a device's memory. Takes as much of it as the profile has, and four bytes for each
// number of its bases. Immutable, thread-safe.
class DeviceProfile {
 public:
  // REQUIRES: the profile is consistent and of this model. `device` outlives it. Unavailable: there
  // is no room, or the device is lost, or a plane has more inputs than kernels take.
  static absl::StatusOr<std::unique_ptr<const DeviceProfile>> Upload(
      Device& device, const ModelSpec& spec, const ResidualProfile& profile);

  // The level of this quality, or -1.
  int LevelOf(Quality quality) const;
  float step(int level) const { return levels_[static_cast<std::size_t>(level)].step; }

  std::span<const DevicePlane> planes() const { return planes_; }
  std::uint32_t exponent_groups() const { return exponent_groups_; }
  std::size_t component_count() const { return component_count_; }
  std::uint32_t components_max() const { return components_max_; }  // of a plane
  // Of all input codes of a row that one product reads, and of all that one makes.
  std::size_t gathered_max() const { return gathered_max_; }
  std::size_t products_max() const { return products_max_; }

  const std::vector<DeviceRotation>& rotations() const { return rotations_; }
  // Which of them turns a layer; -1: none.
  int RotationOf(std::uint32_t layer) const { return rotation_of_layer_[layer]; }

  // Of each layer; empty where the profile has no model of importance.
  std::span<const DeviceImportance> importance() const { return importance_; }
  std::uint32_t heads_max() const { return heads_max_; }
  std::uint32_t query_heads() const { return query_heads_; }
  std::uint32_t covariance_rank() const { return covariance_rank_; }

  // Rows of the token table, and how wide they are; null without.
  const std::int8_t* table_rows() const { return table_rows_; }
  std::uint32_t table_width() const { return table_width_; }

  PlaneSymbols SymbolsOf(std::uint32_t plane, int level) const;

 private:
  DeviceProfile() = default;

  struct Level {
    Quality quality;
    float step;
    const float* thresholds;
  };

  std::vector<DeviceMemory> memory_;
  std::vector<DevicePlane> planes_;
  std::vector<Level> levels_;
  std::vector<DeviceRotation> rotations_;
  std::vector<int> rotation_of_layer_;
  std::vector<DeviceImportance> importance_;
  std::uint32_t heads_max_ = 0;
  std::uint32_t query_heads_ = 0;
  std::uint32_t covariance_rank_ = 0;
  std::uint32_t exponent_groups_ = 0;
  std::size_t component_count_ = 0;
  std::uint32_t components_max_ = 0;
  std::size_t gathered_max_ = 0;
  std::size_t products_max_ = 0;
  const SymbolTable* tables_ = nullptr;
  const std::uint16_t* expected_ = nullptr;
  const std::uint16_t* carried_ = nullptr;
  const float* offsets_ = nullptr;
  const std::int8_t* table_rows_ = nullptr;
  std::uint32_t table_width_ = 0;
  std::int32_t prior_ = 1;
};

// The table of these frequencies, of at most 128 symbols that sum up to kRansFrequencySum.
SymbolTable MakeSymbolTable(std::span<const std::uint16_t> frequencies);

}  // namespace kvtrie::gpu
