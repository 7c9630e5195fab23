#include "storage/trie/path_hash.h"

#include <xxhash.h>

#include <algorithm>

namespace kvtrie {

std::uint64_t PathHasher::Root(TenantId tenant, const ModelId& model, std::string_view salt) const {
  std::uint64_t hash = XXH3_64bits_withSeed(model.bytes.data(), model.bytes.size(), seed_);
  hash = XXH3_64bits_withSeed(&tenant.value, sizeof tenant.value, hash);
  return XXH3_64bits_withSeed(salt.data(), salt.size(), hash);
}

std::uint64_t PathHasher::Extend(std::uint64_t parent_hash, Provenance provenance,
                                 std::string_view extra_key,
                                 std::span<const TokenId> tokens) const {
  std::uint64_t hash =
      XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), parent_hash ^ seed_);
  if (provenance != Provenance::kExact) hash = ~hash * 0x9e3779b97f4a7c15u;
  if (!extra_key.empty()) hash = XXH3_64bits_withSeed(extra_key.data(), extra_key.size(), hash);
  return hash;
}

HashedPath::HashedPath(const PathHasher& hasher, TenantId tenant, const PathView& path,
                       std::uint32_t block_tokens)
    : path_(path),
      block_tokens_(block_tokens),
      ignored_tail_tokens_(static_cast<std::uint32_t>(path.tokens.size() % block_tokens)),
      root_hash_(hasher.Root(tenant, path.model, path.salt)) {
  const std::size_t block_count = path.tokens.size() / block_tokens;
  hashes_.reserve(block_count);
  std::uint64_t hash = root_hash_;
  for (std::uint32_t block = 0; block < block_count; ++block) {
    hash = hasher.Extend(hash, Provenance::kExact, extra_key(block), tokens(block));
    hashes_.push_back(hash);
  }
}

std::string_view HashedPath::extra_key(std::uint32_t block) const {
  if (path_.extra_keys.empty()) return {};
  const auto found = std::lower_bound(
      path_.extra_keys.begin(), path_.extra_keys.end(), block,
      [](const ExtraKey& extra, std::uint32_t index) { return extra.block_index < index; });
  if (found == path_.extra_keys.end() || found->block_index != block) return {};
  return found->key;
}

}  // namespace kvtrie
