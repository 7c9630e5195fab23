#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "storage/kv/ids.h"

namespace kvtrie {

// Whether the KV of a node was computed on exact KV only, or on top of a restored lossy prefix.
// Part of the node's identity, so that the two never meet. Stored; zero is never valid.
enum class Provenance : std::uint8_t { kExact = 1, kOnLossy = 2 };

// Names nodes of one namespace:
//   HMAC-SHA-256(secret, version | model id | parent id | provenance | len salt | salt | len extra
//   | extra |
//                n tokens | tokens as u32le) cut to 128 bits,
// with version 1 and provenance as u8 and the three counts as u32le.
// The salt enters below the root only (depth 1); the chain of parents carries it on.
// Thread-safe: computing does not change the object.
class TrieNodeNamer {
 public:
  static constexpr std::size_t kSecretBytes = 32;

  // `secret` is of one namespace. REQUIRES: it has kSecretBytes.
  explicit TrieNodeNamer(std::string_view secret);
  ~TrieNodeNamer();
  TrieNodeNamer(TrieNodeNamer&&) noexcept;
  TrieNodeNamer& operator=(TrieNodeNamer&&) noexcept;

  TrieNodeId Name(const ModelId& model, const TrieNodeId& parent, Provenance provenance,
                  std::string_view salt, std::string_view extra_key,
                  std::span<const TokenId> tokens) const;

 private:
  struct Context;  // OpenSSL's digest contexts, keyed once
  std::unique_ptr<Context> context_;
};

}  // namespace kvtrie
