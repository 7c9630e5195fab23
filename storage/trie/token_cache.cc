#include "storage/trie/token_cache.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "storage/base/check.h"

namespace kvtrie {

TokenCache::Place TokenCache::Find(const Pool& pool, Slot slot) {
  const std::size_t index = slot - 1;
  const Chunk& chunk = pool.chunks[index / pool.chunk_slots];
  const std::size_t at = index % pool.chunk_slots;
  return {&chunk.tokens[at * pool.block_tokens], &chunk.owners[at], &chunk.used[at]};
}

std::span<const TokenId> TokenCache::Get(std::size_t block_tokens, Slot slot) const {
  const Pool& pool = pools_.find(block_tokens)->second;
  const Place place = Find(pool, slot);
  // Readers race only to write the same value.
  std::atomic_ref<std::uint8_t>(*place.used).store(1, std::memory_order_relaxed);
  return {place.tokens, block_tokens};
}

void TokenCache::Write(const Place& place, std::span<const TokenId> tokens) {
  std::memcpy(place.tokens, tokens.data(), tokens.size_bytes());
  *place.used = 1;
}

void TokenCache::Erase(std::size_t block_tokens, Slot slot) {
  Pool& pool = PoolOf(block_tokens);
  const Place place = Find(pool, slot);
  KV_CHECK(*place.owner != 0);
  *place.owner = 0;
  *place.used = 0;
  pool.free_slots.push_back(slot);
}

TokenCache::Pool& TokenCache::PoolOf(std::size_t block_tokens) {
  Pool& pool = pools_[block_tokens];
  if (pool.block_tokens == 0) {
    pool.block_tokens = block_tokens;
    pool.chunk_slots = std::max<std::size_t>(1, kChunkBytes / (block_tokens * sizeof(TokenId)));
  }
  return pool;
}

TokenCache::Slot TokenCache::TakeSlot(Pool& pool) {
  if (!pool.free_slots.empty()) {
    const Slot slot = pool.free_slots.back();
    pool.free_slots.pop_back();
    return slot;
  }
  const std::size_t chunk_bytes =
      pool.chunk_slots * (pool.block_tokens * sizeof(TokenId) + sizeof(NodeRef) + 1);
  // Each pool may have one chunk, whatever the others hold.
  if (pool.chunks.empty() || memory_bytes_ + chunk_bytes <= limit_bytes_) {
    Chunk chunk;
    chunk.tokens = std::make_unique_for_overwrite<TokenId[]>(pool.chunk_slots * pool.block_tokens);
    chunk.owners = std::make_unique<NodeRef[]>(pool.chunk_slots);
    chunk.used = std::make_unique<std::uint8_t[]>(pool.chunk_slots);
    pool.chunks.push_back(std::move(chunk));
    memory_bytes_ += chunk_bytes;
    const std::size_t first = (pool.chunks.size() - 1) * pool.chunk_slots;
    for (std::size_t i = pool.chunk_slots; i > 1; --i) {
      pool.free_slots.push_back(static_cast<Slot>(first + i));
    }
    return static_cast<Slot>(first + 1);
  }
  const std::size_t slot_count = pool.chunks.size() * pool.chunk_slots;
  while (true) {
    const Slot slot = static_cast<Slot>(pool.hand + 1);
    pool.hand = (pool.hand + 1) % slot_count;
    const Place place = Find(pool, slot);
    if (*place.used == 0) return slot;
    *place.used = 0;
  }
}

}  // namespace kvtrie
