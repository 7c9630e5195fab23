#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/put_stream.h"
#include "storage/base/crc32c.h"
#include "storage/engine/engine.h"

namespace kvtrie {

inline constexpr std::uint32_t kBlockTokens = 4;
inline constexpr std::size_t kBlockBytes = 100;

// A store of blocks in memory, whose answers come when the test says so.
class FakeStore {
 public:
  std::set<std::uint32_t> stored;
  CodingPlan coding_plan;  // of every session
  std::map<std::uint32_t, std::string> published;
  std::vector<std::uint32_t> abandoned;
  int live_sessions = 0;
  int live_writers = 0;
  bool hold_finishes = false;
  std::deque<std::function<void()>> held_finishes;

  void ReleaseFinishes() {
    while (!held_finishes.empty()) {
      const auto finish = std::move(held_finishes.front());
      held_finishes.pop_front();
      finish();
    }
  }
};

class FakeWriter final : public BlockWriter {
 public:
  FakeWriter(FakeStore& store, std::uint32_t block_index, std::uint64_t bytes)
      : BlockWriter(block_index, bytes), store_(store) {
    ++store_.live_writers;
  }
  ~FakeWriter() override { --store_.live_writers; }

  absl::Status AppendChunk(std::span<const std::span<const std::byte>> pieces,
                           std::uint32_t crc32c) override {
    const std::size_t before = content_.size();
    for (const auto piece : pieces) {
      content_.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    if (content_.size() > total_bytes_) return absl::InvalidArgumentError("too many bytes");
    const std::string_view added = std::string_view(content_).substr(before);
    if (Crc32c({reinterpret_cast<const std::byte*>(added.data()), added.size()}) != crc32c) {
      return absl::InvalidArgumentError("crc32c differs");
    }
    received_bytes_ = content_.size();
    return absl::OkStatus();
  }
  const std::string& content() const { return content_; }

 private:
  FakeStore& store_;
  std::string content_;
};

class FakeSession final : public PutSession {
 public:
  FakeSession(FakeStore& store, std::uint32_t first_block, std::uint32_t block_count)
      : store_(store), block_count_(block_count) {
    ++store_.live_sessions;
    for (std::uint32_t i = first_block; i < block_count; ++i) {
      if (!store_.stored.contains(i)) missing_.push_back(i);
    }
  }
  ~FakeSession() override { --store_.live_sessions; }

  const std::vector<std::uint32_t>& missing_blocks() const override { return missing_; }
  const CodingPlan& coding_plan() const override { return store_.coding_plan; }
  std::uint32_t block_count() const override { return block_count_; }
  std::uint32_t ignored_tail_tokens() const override { return 0; }
  std::uint64_t raw_block_bytes() const override { return kBlockBytes; }
  bool IsStored(std::uint32_t block_index, TrieNodeId* node) const override {
    *node = NodeOf(block_index);
    return store_.stored.contains(block_index);
  }
  absl::StatusOr<std::unique_ptr<BlockWriter>> StartBlock(std::uint32_t block_index,
                                                          std::uint64_t bytes) override {
    return std::make_unique<FakeWriter>(store_, block_index, bytes);
  }
  absl::StatusOr<std::unique_ptr<BlockWriter>> StartFrame(std::uint32_t block_index,
                                                          const FrameView& head) override {
    return std::make_unique<FakeWriter>(store_, block_index, head.frame_bytes());
  }
  void FinishBlocks(std::vector<FinishedBlock> blocks) override {
    for (auto& [writer, on_done] : blocks) Finish(std::move(writer), std::move(on_done));
  }
  void Finish(std::unique_ptr<BlockWriter> writer, DoneCallback on_done) {
    const std::uint32_t block_index = writer->block_index();
    store_.published[block_index] = static_cast<FakeWriter&>(*writer).content();
    writer.reset();
    auto finish = [block_index, on_done = std::move(on_done)] {
      on_done(PutBlockResult{NodeOf(block_index), PutOutcome::kStored});
    };
    if (store_.hold_finishes) {
      store_.held_finishes.push_back(std::move(finish));
    } else {
      finish();
    }
  }
  void AbandonBlock(std::uint32_t block_index) override { store_.abandoned.push_back(block_index); }

  static TrieNodeId NodeOf(std::uint32_t block_index) {
    TrieNodeId node;
    node.bytes[0] = static_cast<std::uint8_t>(block_index + 1);
    return node;
  }

 private:
  FakeStore& store_;
  const std::uint32_t block_count_;
  std::vector<std::uint32_t> missing_;
};

class FakeHost final : public PutHost {
 public:
  FakeStore store;
  ByteBudget blocks{4 * kBlockBytes};
  ByteBudget announces{std::size_t{1} << 20};
  bool hold_begins = false;
  std::optional<std::function<void()>> held_begin;
  absl::Status begin_status;
  double compute_seconds_per_token = 0;  // as it was announced last

  void BeginPut(const PutAnnouncement& put, BeginCallback on_begun) override {
    compute_seconds_per_token = put.compute_seconds_per_token;
    auto begin = [this, first_block = put.first_block,
                  block_count = static_cast<std::uint32_t>(put.path.tokens.size() / kBlockTokens),
                  on_begun = std::move(on_begun)] {
      if (!begin_status.ok()) {
        on_begun(begin_status);
      } else {
        on_begun(std::make_unique<FakeSession>(store, first_block, block_count));
      }
    };
    if (hold_begins) {
      held_begin = std::move(begin);
    } else {
      begin();
    }
  }
  ByteBudget& block_budget() override { return blocks; }
  ByteBudget& announce_budget() override { return announces; }
  void Post(std::function<void()> work) override { posted.push_back(std::move(work)); }

  void RunPosted() {
    while (!posted.empty()) {
      const auto work = std::move(posted.front());
      posted.pop_front();
      work();
    }
  }
  std::deque<std::function<void()>> posted;
};

}  // namespace kvtrie
