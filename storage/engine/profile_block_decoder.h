#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/codec/codec_cache.h"
#include "storage/engine/block_decoder.h"

namespace kvtrie {

// Decodes every codec of storage/codec on the calling thread. Codecs that are made of profiles are
// kept within a bound of memory. Thread-safe.
class ProfileBlockDecoder final : public BlockDecoder {
 public:
  explicit ProfileBlockDecoder(std::size_t codec_bytes_max) : codecs_(codec_bytes_max) {}

  std::vector<absl::Status> Decode(const ModelSpec& spec, std::span<const FrameToDecode> frames,
                                   ProfileStore& profiles) const override;
  void Forget(const ProfileId& profile) const override { codecs_.Forget(profile); }
  BlockDecoderStats Stats() const override;

 private:
  mutable CodecCache codecs_;
  mutable std::atomic<std::uint64_t> missing_profiles_{0};
  mutable std::atomic<std::uint64_t> unusable_profiles_{0};
};

}  // namespace kvtrie
