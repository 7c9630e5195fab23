#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device_model.h"
#include "gpu/workspace.h"
#include "storage/codec/residual_codec.h"

namespace kvtrie::gpu {

// Blocks on their way through a device, to be encoded. What the processor's encoder decides is
// decided alike: which tokens are exact, the first token, sections; and step exponents, but where a
// token lies so near the border of two that the roundings of sums and logarithms tell. What the
// blocks point to, and the model, outlive it. Not thread-safe.
class EncodeBatch {
 public:
  // About how much of a workspace's device memory each block takes.
  static std::size_t DeviceBytesOfBlock(const DeviceModel& model);

  // Asks the device for all but the symbols; does not wait for it. REQUIRES: the profile has a
  // level of this quality, which is not exact; blocks without references; nothing is under way in
  // the workspace. Unavailable: there is no room.
  static absl::StatusOr<std::unique_ptr<EncodeBatch>> Start(const DeviceModel& model,
                                                            std::span<const BlockToEncode> blocks,
                                                            Quality quality,
                                                            WorkspacePool::Lease workspace);

  // Waits, lets the device make symbols, waits again, and makes bodies: as ResidualCodec::Encode,
  // but that a block that the device could not encode is missing. Unavailable: the device is lost.
  // Once.
  struct Encoded {
    EncodedBlock block;
    bool is_missing = false;
  };
  absl::StatusOr<std::vector<Encoded>> Finish();

  ~EncodeBatch();

 private:
  struct Parts;
  explicit EncodeBatch(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvtrie::gpu
