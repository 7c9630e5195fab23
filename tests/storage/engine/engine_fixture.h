#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "storage/base/crc32c.h"
#include "storage/engine/engine.h"
#include "tests/storage/base/fake_clock.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {

inline constexpr std::uint32_t kTestBlockTokens = 16;

// A small model: 2 layers of 1 KV head, K and V of 64 bytes each per token: 4 KiB raw per block.
inline ModelSpec TestModelSpec(const std::string& name = "test") {
  ModelSpec spec;
  spec.name = name;
  spec.weights_revision = "r1";
  spec.tokenizer_digest = "t1";
  spec.dtype = DType::kUint8;
  spec.kv_groups = {
      {.layer_runs = {{.layer_count = 2, .kv_heads = 1, .k_head_dim = 64, .v_head_dim = 64}}}};
  spec.rope.pairing = RopePairing::kHalfSplit;
  spec.rope.theta = 10000;
  spec.block_tokens = kTestBlockTokens;
  return spec;
}

// `count` tokens of the session `seed`; sessions of other seeds share nothing.
inline std::vector<TokenId> SessionTokens(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens(count);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 50'000);
  return tokens;
}

// Bytes that tell whose they are: of block `block` of a path, from all that makes its identity.
inline std::vector<std::byte> PatternBlock(const PathView& path, std::uint32_t block_tokens,
                                           std::uint32_t block, std::size_t bytes) {
  std::uint32_t seed = Crc32c(std::as_bytes(std::span(path.model.bytes)));
  seed = Crc32c(std::as_bytes(path.tokens.first(std::size_t{block + 1} * block_tokens)), seed);
  seed = Crc32c(std::as_bytes(std::span(path.salt)), seed);
  for (const ExtraKey& extra : path.extra_keys) {
    if (extra.block_index <= block) seed = Crc32c(std::as_bytes(std::span(extra.key)), seed);
  }
  std::mt19937 random(seed);
  std::vector<std::byte> pattern(bytes);
  for (std::size_t at = 0; at < bytes; at += 4) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(pattern.data() + at, &word, std::min<std::size_t>(4, bytes - at));
  }
  return pattern;
}

// An engine in a folder of its own, with a clock that stands still and maintenance that runs when
// the test says so.
class EngineFixture : public testing::Test {
 protected:
  EngineFixture() {
    options_.data_dir = folder_.path() + "/store";
    options_.disk_limit_bytes = std::uint64_t{256} << 20;
    options_.segment_bytes = std::uint64_t{4} << 20;
    options_.memory_tier_bytes = std::uint64_t{32} << 20;
    options_.sync_interval = std::chrono::hours(1);
  }

  void Open() {
    auto engine = Engine::OpenEmbedded(options_, clock_, {}, codec_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    UseModel(spec_);
  }
  void Reopen() {
    engine_.reset();
    Open();
  }
  // What the calls below work with.
  void UseModel(const ModelSpec& spec) {
    auto model = engine_->RegisterModel(tenant_, spec);
    ASSERT_TRUE(model.ok()) << model.status();
    spec_ = spec;
    model_ = model->id;
    raw_block_bytes_ = model->raw_block_bytes;
  }

  PathView PathOf(std::span<const TokenId> tokens, std::string_view salt = {},
                  std::span<const ExtraKey> extra_keys = {}) const {
    return {.model = model_, .tokens = tokens, .salt = salt, .extra_keys = extra_keys};
  }

  std::vector<std::byte> Pattern(const PathView& path, std::uint32_t block) const {
    return PatternBlock(path, spec_.block_tokens, block, raw_block_bytes_);
  }

  // A block of a put with all its bytes, ready to be finished.
  absl::StatusOr<std::unique_ptr<BlockWriter>> FilledBlock(PutSession& session,
                                                           const PathView& path,
                                                           std::uint32_t block) {
    auto writer = session.StartBlock(block, raw_block_bytes_);
    if (!writer.ok()) return writer.status();
    const auto bytes = Pattern(path, block);
    const std::span<const std::byte> piece = bytes;
    if (absl::Status status = (*writer)->AppendChunk({&piece, 1}, Crc32c(bytes)); !status.ok()) {
      return status;
    }
    return writer;
  }

  // Puts all missing blocks of a path (or the first `block_count_max` of them); the status of each
  // that was sent.
  using PutResults = std::vector<absl::StatusOr<PutBlockResult>>;
  PutResults Put(const PutAnnouncement& put, std::size_t block_count_max = SIZE_MAX) {
    auto session = engine_->BeginPut(tenant_, put);
    if (!session.ok()) return {session.status()};
    auto missing = (*session)->missing_blocks();
    missing.resize(std::min(missing.size(), block_count_max));
    PutResults results(missing.size(), absl::UnknownError("no answer"));
    absl::Mutex mutex;
    std::size_t open = missing.size();
    std::vector<PutSession::FinishedBlock> together;
    for (std::size_t i = 0; i < missing.size(); ++i) {
      auto writer = FilledBlock(**session, put.path, missing[i]);
      EXPECT_TRUE(writer.ok()) << writer.status();
      together.push_back({*std::move(writer), [&, i](absl::StatusOr<PutBlockResult> result) {
                            absl::MutexLock lock(&mutex);
                            results[i] = std::move(result);
                            --open;
                          }});
      if (together.size() == blocks_per_write_ || i + 1 == missing.size()) {
        (*session)->FinishBlocks(std::exchange(together, {}));
      }
    }
    absl::MutexLock lock(&mutex);
    const auto none_open = [&open] { return open == 0; };
    mutex.Await(absl::Condition(&none_open));
    return results;
  }
  PutResults Put(const PathView& path) {
    PutAnnouncement put;
    put.path = path;
    return Put(put);
  }
  PutResults Put(std::span<const TokenId> tokens, std::string_view salt = {}) {
    return Put(PathOf(tokens, salt));
  }
  // Sessions close in the background: waits until none holds anything any more.
  void AwaitNoOpenPuts() {
    while (engine_->Stats().open_puts != 0) std::this_thread::yield();
  }
  // Puts that must succeed.
  void MustPut(const PathView& path) {
    for (const auto& result : Put(path)) ASSERT_TRUE(result.ok()) << result.status();
  }
  void MustPut(std::span<const TokenId> tokens) { MustPut(PathOf(tokens)); }

  LookupResult Lookup(const PathView& path, std::chrono::milliseconds lease = {}) {
    auto result = engine_->Lookup(tenant_, {.models = {path.model},
                                            .path = path,
                                            .min_quality = Quality::kExact,
                                            .lease = lease,
                                            .want_blocks = true});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LookupResult{};
  }
  LookupResult Lookup(std::span<const TokenId> tokens, std::string_view salt = {},
                      std::chrono::milliseconds lease = {}) {
    return Lookup(PathOf(tokens, salt), lease);
  }
  std::uint32_t Matched(std::span<const TokenId> tokens) { return Lookup(tokens).matched_blocks; }

  absl::StatusOr<LoadedFrame> ReadBlock(const StoredFrame& frame, ReadAs as = ReadAs::kFrame) {
    absl::Notification done;
    absl::StatusOr<LoadedFrame> loaded = absl::UnknownError("no answer");
    engine_->ReadFrame(frame, as, [&](absl::StatusOr<LoadedFrame> result) {
      loaded = std::move(result);
      done.Notify();
    });
    done.WaitForNotification();
    return loaded;
  }

  // How many leading blocks of a path are there, each with exactly its own bytes. A block with
  // other bytes fails the test.
  std::uint32_t ExpectOwnBytes(const PathView& path) {
    const LookupResult found = Lookup(path);
    std::vector<TrieNodeId> ids;
    for (const MatchedBlock& block : found.blocks.front()) ids.push_back(block.node);
    const auto frames = engine_->FindFrames(tenant_, path.model, ids, Quality::kExact);
    EXPECT_TRUE(frames.ok());
    for (std::uint32_t block = 0; block < ids.size(); ++block) {
      if (!(*frames)[block]) return block;
      const auto loaded = ReadBlock(*(*frames)[block]);
      if (!loaded.ok()) {
        EXPECT_TRUE(absl::IsNotFound(loaded.status()) || absl::IsDataLoss(loaded.status()))
            << loaded.status();
        return block;
      }
      const auto body = loaded->view.body();
      const auto pattern = Pattern(path, block);
      EXPECT_TRUE(std::equal(body.begin(), body.end(), pattern.begin(), pattern.end()))
          << "block " << block << " has foreign bytes";
    }
    return found.matched_blocks;
  }
  std::uint32_t ExpectOwnBytes(std::span<const TokenId> tokens, std::string_view salt = {}) {
    return ExpectOwnBytes(PathOf(tokens, salt));
  }

  std::vector<VerifyFinding> Findings(bool repair = false) {
    std::vector<VerifyFinding> findings;
    const absl::Status status =
        engine_->Verify(/*structure_only=*/false, repair, [&](const VerifyProgress& progress) {
          findings.insert(findings.end(), progress.findings.begin(), progress.findings.end());
          return true;
        });
    EXPECT_TRUE(status.ok()) << status;
    return findings;
  }
  void ExpectSound() {
    for (const VerifyFinding& finding : Findings()) {
      ADD_FAILURE() << finding.node.ToHex() << ": " << finding.what;
    }
  }

  // What `du` shows of the store.
  std::uint64_t DuBytes() const {
    std::uint64_t bytes = 0;
    std::error_code ignored;
    for (std::filesystem::recursive_directory_iterator at(options_.data_dir, ignored), end;
         at != end; at.increment(ignored)) {
      struct stat status;
      if (::lstat(at->path().c_str(), &status) == 0) {
        bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
      }
    }
    return bytes;
  }

  Selection SelectionOf(const PathView& path) const {
    Selection selection;
    selection.path = path;
    return selection;
  }

  ScratchFolder folder_;
  FakeClock clock_;
  EngineOptions options_;
  std::shared_ptr<const BlockCodec> codec_;
  TenantId tenant_ = kBuiltInTenant;
  ModelSpec spec_ = TestModelSpec();
  std::unique_ptr<Engine> engine_;
  ModelId model_;
  std::size_t raw_block_bytes_ = 0;
  std::size_t blocks_per_write_ = 1;  // that Put finishes in one call
};

}  // namespace kvtrie
