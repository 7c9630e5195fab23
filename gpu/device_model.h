#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gpu/device_profile.h"
#include "storage/codec/residual_codec.h"
#include "storage/kv/model_spec.h"

namespace kvtrie::gpu {

// A model and its profile on a device: what batches are coded with. Immutable, thread-safe.
struct DeviceModel {
  KvGeometry geometry;
  RopePairing pairing;
  std::shared_ptr<const ResidualCodec> codec;
  std::unique_ptr<const DeviceProfile> profile;
  RawKv raw_kv;

  std::uint32_t row_groups() const {
    return (geometry.block_tokens() + static_cast<std::uint32_t>(kLanes) - 1) /
           static_cast<std::uint32_t>(kLanes);
  }
  std::uint32_t rows_of_block() const { return row_groups() * static_cast<std::uint32_t>(kLanes); }
};

// Where the parts of a batch that both directions have lie in a workspace's memory.
struct BatchMemory {
  // REQUIRES: `layout` is of the device's memory.
  BatchMemory(const DeviceModel& model, std::uint32_t block_count, MemoryLayout& layout);

  std::size_t values[2];             // [value of a plane][row] float
  std::size_t rows;                  // [row][component of a plane] float
  std::size_t gathered;              // of the widest plane, as GatherArgs has it
  std::size_t products;              // likewise
  std::size_t codes;                 // 8 times [row][component of a plane]
  std::vector<std::size_t> cosines;  // of each rotation
  std::vector<std::size_t> sines;
  std::size_t codes_stride;
};

// The steps that both directions have, for the planes of one batch, on its stream.
class BatchPlanes {
 public:
  // first_positions: [block], table_entries: [row]; in device memory. Makes the angles.
  BatchPlanes(const DeviceModel& model, const BatchMemory& memory, std::uint32_t block_count,
              std::byte* device, const std::uint32_t* first_positions,
              const std::int32_t* table_entries, DeviceStream& stream);

  std::uint32_t row_count() const { return row_count_; }
  // [value][row] of a plane. Two of them, in turn: those of the next plane may be decoded while
  // those of one are read.
  float* values(std::uint32_t plane) const { return At<float>(memory_.values[plane % 2]); }

  // Multiplies what the planes below say; what it returns is good until the next plane's.
  Prediction Predict(std::uint32_t plane);
  // Restores rows (if `with_rows`) and codes of predicted rows and values(plane).
  void Restore(std::uint32_t plane, int level, const Prediction& prediction, bool with_rows);
  float* rows() const { return At<float>(memory_.rows); }

  // The step exponents of all planes, [plane][row / 16][group][row % 16], from raw KV that lies
  // block by block from `raw` on. behind: [row], given: [row], as ExponentsArgs has them; features:
  // [layer + 1][row][feature]. Uses rows() and values(0). REQUIRES: the profile has exponent
  // groups.
  void ChooseExponents(std::byte* raw, const std::uint32_t* behind, const std::int8_t* given,
                       float strength, float* features, std::int8_t* exponents);

  // How the plane lies in blocks that begin at `raw`, with so many bytes from one to the next;
  // `raw` points to the plane's first number.
  RawPlane RawOf(std::uint32_t plane, std::byte* raw, std::size_t block_stride) const;

 private:
  template <typename T>
  T* At(std::size_t offset) const {
    return reinterpret_cast<T*>(device_ + offset);
  }
  // Planes that a later one may read stay: those of layer 0, and of three layers in turn.
  std::int8_t* CodesOf(std::uint32_t plane) const;

  const DeviceModel& model_;
  const BatchMemory& memory_;
  const std::uint32_t row_count_;
  std::byte* const device_;
  const std::int32_t* const table_entries_;
  DeviceStream& stream_;
};

// Which row of the token table each of a block's tokens begins with, -1: none.
// REQUIRES: as many entries as tokens, or more, which are none.
void FindTableEntries(const ResidualProfile& profile, std::span<const TokenId> tokens,
                      std::span<std::int32_t> entries);

}  // namespace kvtrie::gpu
