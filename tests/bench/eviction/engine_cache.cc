#include "tests/bench/eviction/engine_cache.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <span>
#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "storage/base/check.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/meta/node_row.h"
#include "storage/trie/trie_index.h"

namespace kvtrie::bench {
namespace {

std::vector<TokenId> TokensOf(const RequestTrace& trace, std::span<const BlockIndex> path) {
  std::vector<TokenId> tokens;
  tokens.reserve(path.size() * trace.block_tokens);
  for (const BlockIndex block : path) {
    for (std::uint32_t i = 0; i < trace.block_tokens; ++i) tokens.push_back(i == 0 ? block : i);
  }
  return tokens;
}

}  // namespace

ModelSpec SmallModelSpec(std::uint32_t block_tokens) {
  ModelSpec spec;
  spec.name = "small";
  spec.weights_revision = "1";
  spec.tokenizer_digest = "1";
  spec.dtype = DType::kUint8;
  spec.kv_groups = {
      {.layer_runs = {{.layer_count = 1, .kv_heads = 1, .k_head_dim = 8, .v_head_dim = 8}}}};
  spec.rope.pairing = RopePairing::kHalfSplit;
  spec.rope.theta = 10000;
  spec.block_tokens = block_tokens;
  return spec;
}

absl::StatusOr<std::unique_ptr<EngineCache>> EngineCache::Open(const std::string& folder,
                                                               const RequestTrace& trace,
                                                               std::size_t capacity_blocks) {
  EngineOptions options;
  options.data_dir = folder;
  options.disk_limit_bytes = std::uint64_t{16} << 30;
  options.index_bytes_max = capacity_blocks * TrieIndex::kNodeBytesMax;
  options.memory_tier_bytes = 0;
  options.prefault_memory = false;
  options.token_cache_bytes = std::uint64_t{1} << 30;
  options.sync_interval = std::chrono::hours(1000);
  // A store draws the secret that names its nodes, and where ghosts meet depends on names: with one
  // secret, runs are equal.
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  StoreConfig identity;
  identity.path_hash_seed = 1;
  identity.namespace_secret.assign(32, 'e');
  std::ofstream(folder + "/identity", std::ios::binary) << identity.Encode();
  std::unique_ptr<EngineCache> cache(new EngineCache(trace));
  KV_ASSIGN_OR_RETURN(cache->engine_, Engine::OpenEmbedded(options, cache->clock_));
  KV_ASSIGN_OR_RETURN(
      const ModelInfo model,
      cache->engine_->RegisterModel(kBuiltInTenant, SmallModelSpec(trace.block_tokens)));
  cache->model_ = model.id;
  cache->raw_.resize(model.raw_block_bytes);
  cache->raw_crc_ = Crc32c(cache->raw_);
  return cache;
}

std::uint32_t EngineCache::Serve(const TraceRequest& request) {
  clock_.Advance(std::chrono::duration_cast<Clock::Duration>(
      std::chrono::duration<double>(request.seconds - seconds_)));
  seconds_ = request.seconds;
  const std::vector<TokenId> tokens = TokensOf(trace_, request.path);
  PutAnnouncement put;
  put.path = {.model = model_, .tokens = tokens, .salt = {}, .extra_keys = {}};
  LookupQuery query;
  query.models = {model_};
  query.path = put.path;
  query.path.tokens =
      put.path.tokens.first(std::size_t{request.prompt_blocks} * trace_.block_tokens);
  const auto found = engine_->Lookup(kBuiltInTenant, query);
  KV_CHECK(found.ok());

  auto session = engine_->BeginPut(kBuiltInTenant, put);
  KV_CHECK(session.ok());
  std::vector<PutSession::FinishedBlock> finished;
  absl::BlockingCounter open(static_cast<int>((*session)->missing_blocks().size()));
  for (const std::uint32_t block : (*session)->missing_blocks()) {
    auto writer = (*session)->StartBlock(block, raw_.size());
    KV_CHECK(writer.ok());
    const std::span<const std::byte> piece = raw_;
    KV_CHECK((*writer)->AppendChunk({&piece, 1}, raw_crc_).ok());
    finished.push_back({*std::move(writer),
                        [&open](const absl::StatusOr<PutBlockResult>&) { open.DecrementCount(); }});
  }
  (*session)->FinishBlocks(std::move(finished));
  open.Wait();
  session->reset();
  // It closes in the background, and holds its path until then.
  while (engine_->Stats().open_puts != 0) std::this_thread::yield();
  return found->matched_blocks;
}

}  // namespace kvtrie::bench
