#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "storage/kv/ids.h"
#include "storage/kv/path.h"
#include "storage/kv/trie_node_id.h"

namespace kvtrie {

// Keyed 64-bit hashes of paths, by which the index finds nodes: a chain over blocks, so that all
// hashes of a prompt are known before the first probe. Only a guide: what it finds is compared
// token by token. `seed` belongs to the store and is secret, since hashes of chosen tokens could be
// made to collide.
class PathHasher {
 public:
  explicit PathHasher(std::uint64_t seed) : seed_(seed) {}

  // Of the root of (tenant, model, salt).
  std::uint64_t Root(TenantId tenant, const ModelId& model, std::string_view salt) const;

  std::uint64_t Extend(std::uint64_t parent_hash, Provenance provenance, std::string_view extra_key,
                       std::span<const TokenId> tokens) const;

 private:
  std::uint64_t seed_;
};

// Cuts a path into blocks and gives each its tokens, extra key and hash (of exact provenance).
class HashedPath {
 public:
  HashedPath(const PathHasher& hasher, TenantId tenant, const PathView& path,
             std::uint32_t block_tokens);

  std::uint32_t block_count() const { return static_cast<std::uint32_t>(hashes_.size()); }
  std::uint32_t ignored_tail_tokens() const { return ignored_tail_tokens_; }
  std::span<const TokenId> tokens(std::uint32_t block) const {
    return path_.tokens.subspan(std::size_t{block} * block_tokens_, block_tokens_);
  }
  std::string_view extra_key(std::uint32_t block) const;
  std::string_view salt() const { return path_.salt; }
  std::uint64_t hash(std::uint32_t block) const { return hashes_[block]; }
  // Hash of the path above `block`.
  std::uint64_t hash_above(std::uint32_t block) const {
    return block == 0 ? root_hash_ : hashes_[block - 1];
  }

 private:
  PathView path_;
  std::uint32_t block_tokens_;
  std::uint32_t ignored_tail_tokens_;
  std::uint64_t root_hash_;
  std::vector<std::uint64_t> hashes_;
};

}  // namespace kvtrie
