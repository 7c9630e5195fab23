#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/kv/ids.h"
#include "storage/kv/quality.h"
#include "storage/meta/node_row.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// How many frames the nodes of the index hold, and how large they are: by model, by codec, by
// profile. Not thread-safe: belongs under the index's lock.
class FrameCensus {
 public:
  struct Usage {
    std::uint64_t frames = 0;
    std::uint64_t bytes = 0;  // of records

    bool operator==(const Usage&) const = default;
  };

  void Add(ModelSlot model, const RungRow& rung);
  // REQUIRES: it was added.
  void Remove(ModelSlot model, const RungRow& rung);

  Usage OfModel(ModelSlot model) const;
  Usage OfCodec(CodecId codec) const;
  Usage Total() const;
  // Frames that name this profile.
  std::uint64_t FramesOf(const ProfileId& profile) const;
  const absl::flat_hash_map<ProfileId, std::uint64_t>& profiles() const { return profiles_; }

  bool operator==(const FrameCensus& other) const;

 private:
  static std::size_t Index(CodecId codec);

  std::vector<Usage> models_;  // by slot
  std::array<Usage, std::size(kAllCodecs)> codecs_{};
  absl::flat_hash_map<ProfileId, std::uint64_t> profiles_;  // none of them 0
};

}  // namespace kvtrie
