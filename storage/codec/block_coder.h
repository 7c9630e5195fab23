#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/residual_codec.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// Codes blocks of one model with one profile, somewhere: what ResidualCodec does, by whatever
// device does it fastest. Bodies are those of RESIDUAL.md and REFERENCED.md, so that what one coder
// wrote any other decodes, to the same bytes.
//
// Thread-safe. A call returns when all of it is done.
class BlockCoder {
 public:
  virtual ~BlockCoder() = default;

  // As ResidualCodec::Encode. Unavailable: the device is lost, or has no room for the batch; the
  // processor can do the same work.
  virtual absl::StatusOr<std::vector<EncodedBlock>> Encode(std::span<const BlockToEncode> blocks,
                                                           Quality quality) const = 0;

  // As ResidualCodec::Decode. Unavailable: as above.
  virtual absl::Status Decode(std::span<const BlockToDecode> blocks) const = 0;
};

// A device that codes blocks. Mains choose one; everything else takes what it is given.
//
// Thread-safe. Outlives the coders that it made.
class CodecBackend {
 public:
  virtual ~CodecBackend() = default;

  // As --backend has it: "cpu", "cuda".
  virtual std::string_view name() const = 0;
  // For people: what the device calls itself.
  virtual std::string device() const = 0;

  // Keeps `codec` alive, to which falls what the device does not do. Unavailable: the device is
  // lost, or has no room for the profile.
  virtual absl::StatusOr<std::shared_ptr<const BlockCoder>> CoderFor(
      const ModelSpec& spec, std::shared_ptr<const ResidualCodec> codec) const = 0;

  // Does a little work, and waits for it. Unavailable: the device is lost. A device that is stuck
  // does not return: whoever asks has a clock.
  virtual absl::Status Probe() const = 0;
};

// The processor: ResidualCodec itself.
std::unique_ptr<const CodecBackend> CpuBackend();

}  // namespace kvtrie
