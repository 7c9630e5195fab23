#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/fetch_types.h"
#include "kvtrie/v1/cache.pb.h"
#include "storage/kv/ids.h"
#include "storage/kv/path.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// Blocks of one path to store. A view: what it points to stays as it is until Put returns.
struct PutPath {
  PathView path;
  // Blocks of `path` from this one on; what stands before it is expected to be stored.
  std::uint32_t first_block = 0;
  // Raw KV, each of the model's raw block size, or frames. Tokens of `path` beyond the last of them
  // are not announced.
  std::span<const std::span<const std::byte>> blocks;

  BlockForm form = BlockForm::kRaw;
  // What is stored at less is replaced or added to, what is stored at that or better is a
  // duplicate. Frames are at least so good. Raw blocks are exact; below exact they are encoded to
  // this quality in this process (ClientOptions::coding) with the model's newest profile, as they
  // are sent; what that cannot do is coded without loss.
  Quality quality = Quality::kExact;
  // For less than exact quality: store it although something better is stored.
  bool beside_exact = false;
  // With raw blocks of less than exact quality: code text that is stored under another prefix too
  // against that (storage/codec/REFERENCED.md), which is fetched where it is not in memory, and
  // text that stands in several places a level finer, for those that come later. Takes twice as
  // long to encode, and a tenth of the room. Not with `eager`.
  bool use_references = false;
  // Raw blocks of exact quality travel and lie packed, without loss: smaller, and dearer to put and
  // to get.
  bool pack_exact = false;

  std::string_view session_id;
  // The first `restored_blocks` of the path were restored from a store, at this quality.
  std::uint32_t restored_blocks = 0;
  Quality restored_quality = Quality::kExact;
  // KV from this block on was reused from other text, or computed on such (RunsReport): it is kept
  // apart from the exact path, and served as unrated only.
  std::optional<std::uint32_t> first_reused_block{};
  // Null: not known.
  const v1::TokenProbabilities* probabilities = nullptr;

  // Send without asking first which blocks are missing: one round trip less, and wasted bytes for
  // what is stored.
  bool eager = false;
  // Acknowledge only what survives a loss of power.
  bool durable = false;
  std::chrono::seconds ttl{0};
  std::uint32_t priority = 0;
  // What computing the KV of the blocks that are new took, per token, mean over them; 0: not known.
  // By that the server knows what it costs to lose them.
  double compute_seconds_per_token = 0;
};

struct PutBlockReport {
  // OK: stored, by this call or before it.
  absl::Status status;
  bool duplicate = false;
  TrieNodeId node;  // empty where the server did not name it
  // Of the frame that was encoded here and sent; zero bytes: none was.
  std::uint64_t frame_bytes = 0;
  Quality quality = Quality::kExact;
  CodecId codec = CodecId::kRaw;
};

struct PutReport {
  std::vector<PutBlockReport> blocks;  // one per block of the PutPath, in order
  std::size_t stored_blocks = 0;       // OK, duplicates among them
  std::size_t duplicate_blocks = 0;

  bool all_stored() const { return stored_blocks == blocks.size(); }
};

}  // namespace kvtrie
