#include "tests/bench/eviction/index_cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "storage/base/check.h"
#include "tests/bench/eviction/engine_cache.h"

namespace kvtrie::bench {
namespace {

// A digest, as far as the tables that see it care.
std::uint64_t Mixed(std::uint64_t value) {
  value = (value ^ value >> 31) * 0x7fb5d329728ea185u;
  value = (value ^ value >> 27) * 0x81dadef4bc2dd44du;
  return value ^ value >> 33;
}

TrieNodeId IdOf(BlockIndex block) {
  TrieNodeId id;
  const std::uint64_t words[] = {Mixed(2 * std::uint64_t{block} + 1),
                                 Mixed(2 * std::uint64_t{block} + 2)};
  std::memcpy(id.bytes.data(), words, sizeof(words));
  return id;
}

}  // namespace

IndexCache::IndexCache(const RequestTrace& trace, std::size_t capacity_blocks)
    : trace_(trace), capacity_(capacity_blocks), refs_(trace.blocks.size()) {
  ModelId model;
  model.bytes[0] = 1;
  slot_ = *index_.AddModel(kBuiltInTenant, model, trace.block_tokens);
  retention_.SetModel(slot_, SmallModelSpec(trace.block_tokens));
}

std::uint32_t IndexCache::Serve(const TraceRequest& request) {
  ++request_;
  const auto now = static_cast<std::uint32_t>(1'700'000'001 + request.seconds);
  std::uint32_t hits = 0;
  while (hits < request.prompt_blocks && refs_[request.path[hits]] != 0) ++hits;
  {
    RetentionPolicy::Uses uses(retention_);
    for (std::uint32_t i = 0; i < hits; ++i) {
      uses.Add(refs_[request.path[i]], now);
      index_.Touch(refs_[request.path[i]], now);
    }
  }
  std::size_t stored = 0;  // blocks of the path that are there
  while (stored < request.path.size() && refs_[request.path[stored]] != 0) {
    on_path_of_[refs_[request.path[stored++]]] = request_;
  }
  const std::size_t missing = request.path.size() - stored;
  if (index_.node_count() + missing > capacity_) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<NodeRef> victims = retention_.ChooseVictims(
        0, index_.node_count() + missing - capacity_ + 1 + index_.node_count() / 1024, now,
        [](const IndexNode& node) -> std::uint64_t { return node.frame.record_bytes; },
        [this](NodeRef ref) { return on_path_of_[ref] == request_; });
    choose_seconds_ +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (const NodeRef victim : victims) {
      const NodeRef parent = index_.parent(victim);
      retention_.BeforeErase(victim, /*evicted=*/true, now);
      index_.Erase(victim);
      retention_.AfterErase(parent);
      refs_[blocks_[victim]] = 0;
    }
    evicted_ += victims.size();
  }
  for (std::size_t i = stored; i < request.path.size() && index_.node_count() < capacity_; ++i) {
    const BlockIndex block = request.path[i];
    const NodeRef parent = i == 0 ? 0 : refs_[request.path[i - 1]];
    const TrieNodeId id = IdOf(block);
    const NodeRef ref =
        index_.Insert({.id = id,
                       .parent = parent,
                       .model = slot_,
                       .path_hash = Mixed(block),
                       .frames = {.frame = {1, block, 1024}},
                       .last_used_seconds = now,
                       .traffic = retention_.Arrives(
                           id, parent, {.new_blocks = missing, .is_first = i == stored}, now)});
    retention_.OnInsert(ref);
    refs_[block] = ref;
    if (blocks_.size() < index_.ref_end()) {
      blocks_.resize(index_.ref_end());
      on_path_of_.resize(index_.ref_end());
    }
    blocks_[ref] = block;
    on_path_of_[ref] = request_;
  }
  return hits;
}

}  // namespace kvtrie::bench
