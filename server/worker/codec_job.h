#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/reference_cache.h"
#include "storage/base/byte_budget.h"
#include "storage/base/clock.h"
#include "storage/base/shared_bytes.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/reference_table.h"
#include "storage/kv/ids.h"
#include "storage/kv/model_spec.h"
#include "storage/kv/quality.h"
#include "storage/kv/trie_node_id.h"

namespace kvtrie {

enum class CodecOp : std::uint8_t { kEncode = 1, kDecode = 2 };

// A model as a stream names it.
struct CodecModel {
  explicit CodecModel(const ModelSpec& from) : spec(from), id(from.Digest()), geometry(from) {}

  ModelSpec spec;
  ModelId id;
  KvGeometry geometry;
};

// Bytes that a caller sent, in memory that is as large as they were said to be.
struct ReceivedBytes {
  AlignedBuffer memory;
  std::size_t bytes = 0;

  std::span<const std::byte> view() const { return {memory.data(), bytes}; }
};

// One block that waits to be coded, with all that it takes, and then what became of it.
struct CodecJob {
  struct Reference {
    TrieNodeId node;
    std::uint32_t first_position = 0;
    std::shared_ptr<ReferenceFrame> frame;
  };

  // Jobs that agree in these are coded together.
  CodecOp op = CodecOp::kEncode;
  std::shared_ptr<const CodecModel> model;
  ProfileId profile;                  // of frames that are decoded: the one that they name
  Quality quality = Quality::kExact;  // of encoding

  std::string tenant;
  Clock::Duration deadline{};  // its coding begins before that
  std::uint32_t first_position = 0;
  std::uint32_t session_tokens = 0;
  std::vector<TokenId> tokens;
  std::vector<float> importance;
  ReceivedBytes block;  // raw KV, or a frame
  std::vector<Reference> references;
  std::vector<ReferenceRun> runs;
  ByteReservation memory;  // for all of it, and for what it becomes

  absl::Status status;
  ProfileId missing_profile;  // that it would take
  std::chrono::milliseconds retry_after{0};
  EncodedFrame frame;  // of kEncode
  AlignedBuffer raw;   // of kDecode: the geometry's raw_block_bytes
  // What the level cost the model at calibration.
  float mean_kl = 0;
  float kl_p99 = 0;
  Clock::Duration submitted{};
  Clock::Duration queued{};
  Clock::Duration coding{};
  std::uint32_t batch_blocks = 0;

  // True: nobody waits for it any more. Null: somebody always does.
  std::shared_ptr<const std::atomic<bool>> abandoned;
  // Called once with itself, however it ends, without locks; short.
  std::function<void(std::unique_ptr<CodecJob>)> on_done;

  bool is_abandoned() const {
    return abandoned != nullptr && abandoned->load(std::memory_order_relaxed);
  }
  bool SharesBatch(const CodecJob& other) const {
    return op == other.op && quality == other.quality && profile == other.profile &&
           model->id == other.model->id;
  }
};

}  // namespace kvtrie
