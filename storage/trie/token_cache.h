#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "storage/kv/ids.h"
#include "storage/trie/ref_table.h"

namespace kvtrie {

// Tokens of nodes in memory, at most `limit_bytes` of them: one pool of equal slots per block size.
// A full pool drops what was not used since the hand last passed (CLOCK). Not thread-safe;
// concurrent Get are.
class TokenCache {
 public:
  using Slot = std::uint32_t;  // 0 = not in memory

  explicit TokenCache(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}

  std::span<const TokenId> Get(std::size_t block_tokens, Slot slot) const;

  // Copies the tokens of `owner` in. `on_evicted(owner)` is called for whom the place was taken
  // from.
  template <typename OnEvicted>
  Slot Insert(std::span<const TokenId> tokens, NodeRef owner, const OnEvicted& on_evicted) {
    Pool& pool = PoolOf(tokens.size());
    const Slot slot = TakeSlot(pool);
    Place place = Find(pool, slot);
    if (*place.owner != 0) on_evicted(*place.owner);
    *place.owner = owner;
    Write(place, tokens);
    return slot;
  }

  void Erase(std::size_t block_tokens, Slot slot);

  std::size_t memory_bytes() const { return memory_bytes_; }

 private:
  static constexpr std::size_t kChunkBytes = std::size_t{256} << 10;

  struct Chunk {
    std::unique_ptr<TokenId[]> tokens;
    std::unique_ptr<NodeRef[]> owners;
    std::unique_ptr<std::uint8_t[]> used;  // since the hand last passed
  };
  struct Pool {
    std::size_t block_tokens = 0;
    std::size_t chunk_slots = 0;
    std::vector<Chunk> chunks;
    std::vector<Slot> free_slots;
    std::size_t hand = 0;
  };
  struct Place {
    TokenId* tokens;
    NodeRef* owner;
    std::uint8_t* used;
  };

  Pool& PoolOf(std::size_t block_tokens);
  Slot TakeSlot(Pool& pool);
  static Place Find(const Pool& pool, Slot slot);
  static void Write(const Place& place, std::span<const TokenId> tokens);

  const std::size_t limit_bytes_;
  std::size_t memory_bytes_ = 0;
  std::map<std::size_t, Pool> pools_;
};

}  // namespace kvtrie
