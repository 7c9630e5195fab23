#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/codec/codec_cache.h"
#include "storage/codec/frame_codec.h"
#include "storage/engine/profile_store.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"

namespace kvtrie {

struct BlockCodecStats {
  std::uint64_t missing_profiles_total = 0;  // blocks whose profile is not stored
  std::uint64_t unusable_profiles_total =
      0;  // blocks whose profile cannot be read, or does not fit
  CodecCacheStats codecs;
};

// Turns raw KV into frames and frames back into raw KV: the seam between the engine and the codecs.
//
// The same input gives the same bytes on every call. Thread-safe: the engine calls it on several
// threads at once. Profiles are read from `profiles`; what is made of one may be kept.
class BlockCodec {
 public:
  virtual ~BlockCodec() = default;

  // Writes the raw KV of blocks of one model; codecs are fastest over 64 and more tokens. `frames`
  // are whole and intact, bound to these tokens; none is raw. They name their profiles.
  // One status per frame, in order; where it is not OK, anything is in its memory. DataLoss: the
  // frame itself cannot be decoded; the engine drops it then. FailedPrecondition: it could be, with
  // something that is missing here; the message names it.
  virtual std::vector<absl::Status> Decode(const ModelSpec& spec,
                                           std::span<const FrameToDecode> frames,
                                           ProfileStore& profiles) const = 0;

  // Frames of raw blocks of one model, in order, each of this quality or, where it cannot be coded
  // so, exact. FailedPrecondition: the profile is not stored, does not fit the model, or has no
  // such level.
  virtual absl::StatusOr<std::vector<EncodedFrame>> Encode(const ModelSpec& spec,
                                                           std::span<const BlockToEncode> blocks,
                                                           const ProfileId& profile,
                                                           Quality quality,
                                                           ProfileStore& profiles) const = 0;

  // Whether blocks are coded against references with this profile. False: they are not, or the
  // profile cannot be used.
  virtual bool CodesDifferences(const ModelSpec& spec, const ProfileId& profile,
                                ProfileStore& profiles) const = 0;

  // The profile was deleted: what was made of it may go.
  virtual void Forget(const ProfileId& profile) const = 0;

  virtual BlockCodecStats Stats() const = 0;
};

}  // namespace kvtrie
