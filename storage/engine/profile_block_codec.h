#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/codec/block_coder.h"
#include "storage/codec/codec_cache.h"
#include "storage/engine/block_codec.h"

namespace kvtrie {

// All codecs of storage/codec, on the calling thread or, what takes a profile, on a device. Codecs
// that are made of profiles are kept within a bound of memory. Thread-safe.
class ProfileBlockCodec final : public BlockCodec {
 public:
  // `backend` outlives this; null: the calling thread codes.
  explicit ProfileBlockCodec(std::size_t codec_bytes_max, const CodecBackend* backend = nullptr)
      : codecs_(codec_bytes_max, backend) {}

  std::vector<absl::Status> Decode(const ModelSpec& spec, std::span<const FrameToDecode> frames,
                                   ProfileStore& profiles) const override;
  absl::StatusOr<std::vector<EncodedFrame>> Encode(const ModelSpec& spec,
                                                   std::span<const BlockToEncode> blocks,
                                                   const ProfileId& profile, Quality quality,
                                                   ProfileStore& profiles) const override;
  bool CodesDifferences(const ModelSpec& spec, const ProfileId& profile,
                        ProfileStore& profiles) const override;
  void Forget(const ProfileId& profile) const override { codecs_.Forget(profile); }
  BlockCodecStats Stats() const override;

 private:
  mutable CodecCache codecs_;
  mutable std::atomic<std::uint64_t> missing_profiles_{0};
  mutable std::atomic<std::uint64_t> unusable_profiles_{0};
};

}  // namespace kvtrie
