#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/codec/codec_cache.h"
#include "storage/codec/frame_codec.h"
#include "storage/engine/profile_store.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

struct BlockDecoderStats {
  std::uint64_t missing_profiles_total = 0;   // blocks whose profile is not stored
  std::uint64_t unusable_profiles_total = 0;  // blocks whose profile cannot be read, or does not fit
  CodecCacheStats codecs;
};

// Turns frames that are not raw back into raw KV: the seam between the engine and the codecs.
//
// The same frame gives the same bytes on every call. Thread-safe: the engine calls it on several
// threads at once.
class BlockDecoder {
 public:
  virtual ~BlockDecoder() = default;

  // Writes the raw KV of blocks of one model; codecs are fastest over 64 and more tokens. `frames`
  // are whole and intact, bound to these tokens; none is raw. Profiles are read from `profiles`, by
  // the ids that frames name; what is made of one may be kept.
  // One status per frame, in order; where it is not OK, anything is in its memory. DataLoss: the
  // frame itself cannot be decoded; the engine drops it then. FailedPrecondition: it could be, with
  // something that is missing here; the message names it.
  virtual std::vector<absl::Status> Decode(const ModelSpec& spec,
                                           std::span<const FrameToDecode> frames,
                                           ProfileStore& profiles) const = 0;

  // The profile was deleted: what was made of it may go.
  virtual void Forget(const ProfileId& profile) const = 0;

  virtual BlockDecoderStats Stats() const = 0;
};

}  // namespace kvtrie
