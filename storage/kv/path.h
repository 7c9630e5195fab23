#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "storage/kv/ids.h"

namespace kvtrie {

// What, beside the tokens, decides the KV of one block.
struct ExtraKey {
  std::uint32_t block_index = 0;
  std::string_view key;
};

// A session prefix as a request names it: tokens from position 0. A view; what it points to outlives it.
struct PathView {
  ModelId model;
  std::span<const TokenId> tokens;
  std::string_view salt;
  std::span<const ExtraKey> extra_keys;  // ascending block_index
};

inline constexpr std::size_t kPathTokensMax = std::size_t{1} << 20;
inline constexpr std::size_t kSaltBytesMax = 256;
inline constexpr std::size_t kExtraKeyBytesMax = 1024;
inline constexpr std::size_t kExtraKeysMax = 65'536;
inline constexpr std::size_t kSessionIdBytesMax = 64;

}  // namespace kvtrie
