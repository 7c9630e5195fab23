#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gpu/device.h"
#include "gpu/device_model.h"
#include "gpu/encode_batch.h"
#include "gpu/workspace.h"
#include "storage/codec/block_coder.h"

namespace kvtrie::gpu {

struct DeviceCoderOptions {
  // Batches under way at one time, of all coders of a device.
  std::size_t workspaces = 4;
  // Raw KV of a batch: what pinned memory and, several times over, device memory is taken for.
  std::size_t batch_raw_bytes = std::size_t{256} << 20;
};

// Codes blocks on a device. Decoded KV is, bit for bit, what ResidualCodec makes. Bodies are not
// what it writes to the byte: products of floats add up in another order, so some values round
// otherwise; every decoder reads them alike.
//
// To ResidualCodec fall, block by block: exact frames; frames, and blocks to encode, with
// references; bodies of more than eight times the raw KV; blocks that the device could not encode.
//
// Thread-safe. Calls wait for a workspace where all are lent.
class DeviceCoder final : public BlockCoder {
 public:
  // REQUIRES: `codec` is of this model; device and pool outlive the coder. Unavailable: the device
  // is lost, or has no room for the profile.
  static absl::StatusOr<std::shared_ptr<const DeviceCoder>> Of(
      const ModelSpec& spec, std::shared_ptr<const ResidualCodec> codec, Device& device,
      WorkspacePool& pool, const DeviceCoderOptions& options);

  absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                   Quality quality) const override;
  absl::Status Decode(std::span<const BlockToDecode> blocks) const override;

  // Blocks that one batch may have.
  std::size_t decode_blocks_max() const { return decode_blocks_max_; }
  std::size_t encode_blocks_max() const { return encode_blocks_max_; }

 private:
  DeviceCoder(DeviceModel model, WorkspacePool& pool) : model_(std::move(model)), pool_(pool) {}

  template <typename Finish>
  absl::StatusOr<WorkspacePool::Lease> TakeWorkspace(bool has_one, Finish finish) const;
  absl::Status DecodeOnDevice(std::span<const BlockToDecode> blocks) const;
  absl::Status EncodeOnDevice(std::span<const BlockToEncode> blocks, Quality quality,
                              std::vector<EncodeBatch::Encoded>& encoded) const;

  const DeviceModel model_;
  WorkspacePool& pool_;
  std::size_t batch_raw_bytes_ = 0;
  std::size_t decode_blocks_max_ = 1;
  std::size_t encode_blocks_max_ = 1;
};

// A device as a backend of this name ("cuda").
std::unique_ptr<const CodecBackend> MakeDeviceBackend(std::string name,
                                                      std::unique_ptr<Device> device,
                                                      const DeviceCoderOptions& options = {});

}  // namespace kvtrie::gpu
