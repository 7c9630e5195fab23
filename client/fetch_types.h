#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/kv/ids.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// How blocks travel to and from the caller.
enum class BlockForm {
  kRaw,    // raw KV
  kFrame,  // frames as they are stored
};

// A block to read and the memory that it goes to: of the block's raw size, or for a frame at least
// of the frame's (a Lookup's stored_bytes is enough).
struct FetchTarget {
  TrieNodeId node;
  std::span<std::byte> raw;
  // Of the block, and the position of the first of them: what decodes a frame has to know. Left
  // empty in any target of a Fetch, the server decodes.
  std::span<const TokenId> tokens{};
  std::uint32_t first_position = 0;
};

// What became of one target.
struct FetchedBlock {
  enum class State {
    kPending,  // only seen in FetchOptions::on_layer
    kLoaded,   // every byte is in place and has passed its check
    kMissed,   // `status` says why; the target's memory is undefined
  };
  State state = State::kPending;
  // kMissed: NotFound (not stored at this quality), DataLoss (bytes failed their check twice, or
  // cannot be decoded), FailedPrecondition (the profile to decode it is not to be had, and which
  // one), or why the call failed.
  absl::Status status;
  Quality quality = Quality::kExact;
  Rung rung = Rung::kExact;
  CodecId codec = CodecId::kRaw;  // of the stored frame, decoded or not
  std::uint64_t bytes = 0;        // that lie in the target's memory
  std::vector<TokenId> tokens{};  // of the block, with FetchOptions::want_tokens

  bool loaded() const { return state == State::kLoaded; }
};

struct FetchOptions {
  // Below exact, raw blocks come as frames and are decoded in this process (ClientOptions::coding),
  // where their targets have tokens and the model was registered through the same client.
  Quality min_quality = Quality::kExact;
  BlockForm form = BlockForm::kRaw;
  // Fill FetchedBlock::tokens. Goes over gRPC, whatever ClientOptions::lane says.
  bool want_tokens = false;
  // Dropped by the server when the blocks were read.
  LeaseId release_lease{};
  // Zero: the client's default.
  std::chrono::milliseconds timeout{0};
  // If set, bytes come layer by layer, and this is called (on the calling thread, in order of
  // layers, each once) when all bytes of a layer are in place for every block that is not missed.
  // Blocks that are missed after a layer was reported stay missed. Of frames a layer is decoded as
  // soon as what it needs has come. REQUIRES: raw blocks, and the
  // model was registered through the same client.
  std::function<void(std::uint32_t layer, std::span<const FetchedBlock> blocks)> on_layer{};
};

struct FetchReport {
  std::vector<FetchedBlock> blocks;  // one per target, in order
  std::size_t loaded_blocks = 0;

  bool all_loaded() const { return loaded_blocks == blocks.size(); }
};

}  // namespace kvtrie
