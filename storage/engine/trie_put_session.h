#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "storage/engine/engine_core.h"
#include "storage/engine/record_block_writer.h"

namespace kvtrie {

// One announced put as the engine keeps it; the caller's handle and the blocks on their way share
// it.
class TriePutSession : public std::enable_shared_from_this<TriePutSession> {
 public:
  // As a block index: the caller has dropped its session.
  static constexpr std::uint32_t kClose = 0xffffffffu;

  enum class State : std::uint8_t {
    kMissing,
    kPending,  // its row is being written
    kStored,
    kFailed,
  };
  struct Block {
    State state = State::kMissing;
    TrieNodeId id;
    std::uint64_t path_hash = 0;
    Provenance provenance = Provenance::kExact;
  };

  std::span<const TokenId> tokens_of(std::uint32_t block) const {
    return std::span(tokens).subspan(std::size_t{block} * block_tokens, block_tokens);
  }
  // The row of a block; `rungs` is left empty.
  NodeRow MakeRow(std::uint32_t block) const;
  ExpectedBlock Expect(std::uint32_t block) const;
  // At which KV of this put may be served: on a lossy prefix at no more than that was restored at.
  Quality ServedMax(std::uint32_t block) const {
    const Quality prefix = block >= first_reused_block ? Quality::kUnrated : lossy_quality;
    const Quality restored =
        blocks[block].provenance == Provenance::kExact ? Quality::kExact : prefix;
    return detaches_at ? LowerOf(restored, *detaches_at) : restored;
  }
  // What a stored frame must be served at for the put to have nothing to add.
  Quality Wanted(std::uint32_t block) const { return LowerOf(quality, ServedMax(block)); }

  // Constant after BeginPut.
  TenantId tenant;
  ModelSlot slot = 0;
  ModelId model;
  std::shared_ptr<const RegisteredModel> registered;
  std::uint32_t block_tokens = 0;
  std::vector<TokenId> tokens;
  std::string salt;
  std::map<std::uint32_t, std::string> extra_keys;
  std::string session_id;
  std::vector<float> block_surprisal_bits;
  Quality quality = Quality::kExact;        // announced
  Quality lossy_quality = Quality::kExact;  // at which the prefix was restored
  // KV from there on is of no rated quality.
  std::uint32_t first_reused_block = UINT32_MAX;
  bool beside_exact = false;
  bool only_existing = false;
  bool replaces_larger = false;
  std::optional<Quality> detaches_at;
  std::shared_ptr<const std::vector<OfferedReference>> references;
  CodingPlan coding_plan;
  bool durable = false;
  std::uint32_t expires_seconds = 0;
  std::uint32_t priority = 0;
  std::int64_t created_unix_seconds = 0;
  std::uint32_t ignored_tail_tokens = 0;
  std::vector<std::uint32_t> missing_blocks;
  std::vector<bool> begun;  // only the caller's thread

  std::atomic<bool> closed{false};

  // Complete blocks, by call, that the write pool was told of and has not taken yet.
  absl::Mutex finished_mutex;
  std::deque<std::vector<PutSession::FinishedBlock>> finished ABSL_GUARDED_BY(finished_mutex);

  // Guarded by the core's change_mutex_.
  std::vector<Block> blocks;
  std::map<std::uint32_t, Engine::Core::PublishItem> parked;  // wait for the block before them

  // Guarded by the core's index_mutex_.
  HoldTable::Hold hold;  // the deepest stored block
  std::vector<HoldTable::Hold> reference_holds;
};

}  // namespace kvtrie
