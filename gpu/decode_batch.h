#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device_model.h"
#include "gpu/workspace.h"
#include "storage/codec/residual_codec.h"

namespace kvtrie::gpu {

// Some blocks on their way through a device. What the blocks point to, and the model, outlive it.
// Not thread-safe.
class DecodeBatch {
 public:
  // About how much of a workspace each block takes: device memory, and pinned.
  static std::size_t DeviceBytesOfBlock(const DeviceModel& model);

  // Reads what the bodies say, and asks the device for everything; does not wait for it.
  // REQUIRES: blocks of one quality, not exact, without references; nothing is under way in the
  // workspace. Errors: those of ResidualCodec::Decode that are seen before symbols are; Unavailable
  // where there is no room.
  static absl::StatusOr<std::unique_ptr<DecodeBatch>> Start(const DeviceModel& model,
                                                            std::span<const BlockToDecode> blocks,
                                                            WorkspacePool::Lease workspace);

  // Waits, and writes the raw KV of all blocks. DataLoss: symbols that no encoder writes.
  // Unavailable: the device is lost. Once.
  absl::Status Finish();

  ~DecodeBatch();

 private:
  struct Parts;
  explicit DecodeBatch(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvtrie::gpu
