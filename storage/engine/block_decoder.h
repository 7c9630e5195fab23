#pragma once

#include <cstddef>
#include <span>

#include "absl/status/status.h"
#include "storage/codec/frame.h"
#include "storage/engine/profile_store.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// A frame that is not raw, and what it was made of.
struct EncodedBlock {
  const FrameView& frame;           // whole and intact, and bound to these tokens
  std::span<const TokenId> tokens;  // of the block
  const ModelSpec& spec;
  const KvGeometry& geometry;
};

// Turns frames that are not raw back into raw KV: the seam between the engine and the codecs.
//
// The same frame gives the same bytes on every call: a block may be decoded once for each of its
// layers. Thread-safe: the engine calls it on several threads at once.
class BlockDecoder {
 public:
  virtual ~BlockDecoder() = default;

  // Writes the block's raw KV to `raw`, which has geometry.raw_block_bytes(). Profiles are read
  // from `profiles`, by the id that the frame names; what is made of one may be kept.
  // Errors: DataLoss: the frame itself cannot be decoded; the engine drops it then.
  // FailedPrecondition: it could be, with something that is missing here (its profile, say).
  virtual absl::Status Decode(const EncodedBlock& block, ProfileStore& profiles,
                              std::span<std::byte> raw) const = 0;
};

}  // namespace kvtrie
