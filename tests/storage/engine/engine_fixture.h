#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "storage/base/crc32c.h"
#include "storage/engine/engine.h"

namespace kvtrie {

// A clock that a test moves.
class FakeClock final : public Clock {
 public:
  Duration Monotonic() const override { return Duration(nanoseconds_.load()); }
  std::int64_t UnixSeconds() const override {
    return 1'700'000'000 + nanoseconds_.load() / 1'000'000'000;
  }
  void Advance(std::chrono::nanoseconds by) { nanoseconds_ += by.count(); }

 private:
  std::atomic<std::int64_t> nanoseconds_{1'000'000'000};
};

// A folder that goes with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "kvtrie-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) std::abort();
    path_ = path;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

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
inline std::vector<std::byte> PatternBlock(std::span<const TokenId> tokens, std::uint32_t block,
                                           std::size_t bytes, std::string_view salt = {}) {
  const auto prefix = tokens.first(std::size_t{block + 1} * kTestBlockTokens);
  std::uint32_t seed = Crc32c(std::as_bytes(prefix));
  seed = Crc32c({reinterpret_cast<const std::byte*>(salt.data()), salt.size()}, seed);
  std::mt19937 random(seed);
  std::vector<std::byte> pattern(bytes);
  for (std::size_t at = 0; at + 4 <= bytes; at += 4) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(pattern.data() + at, &word, 4);
  }
  return pattern;
}

// An engine in a folder of its own, with a clock that stands still.
class EngineFixture : public testing::Test {
 protected:
  EngineFixture() {
    options_.data_dir = folder_.path() + "/store";
    options_.disk_limit_bytes = std::uint64_t{256} << 20;
    options_.segment_bytes = std::uint64_t{4} << 20;
    options_.memory_tier_bytes = std::uint64_t{32} << 20;
  }

  void Open() {
    auto engine = Engine::OpenEmbedded(options_, clock_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    auto model = engine_->RegisterModel(kBuiltInTenant, TestModelSpec());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = model->id;
    raw_block_bytes_ = model->raw_block_bytes;
  }
  void Reopen() {
    engine_.reset();
    Open();
  }

  PathView PathOf(std::span<const TokenId> tokens, std::string_view salt = {}) const {
    return {.model = model_, .tokens = tokens, .salt = salt, .extra_keys = {}};
  }

  // Puts all missing blocks of a path; the status of each that was sent.
  std::vector<absl::StatusOr<PutBlockResult>> Put(PutAnnouncement put) {
    auto session = engine_->BeginPut(kBuiltInTenant, put);
    if (!session.ok()) return {session.status()};
    const auto missing = (*session)->missing_blocks();
    std::vector<absl::StatusOr<PutBlockResult>> results(missing.size(),
                                                        absl::UnknownError("no answer"));
    absl::Mutex mutex;
    std::size_t open = missing.size();
    for (std::size_t i = 0; i < missing.size(); ++i) {
      auto writer =
          (*session)->StartBlock(missing[i], PutSession::Encoding::kRaw, raw_block_bytes_);
      EXPECT_TRUE(writer.ok()) << writer.status();
      const auto bytes = PatternBlock(put.path.tokens, missing[i], raw_block_bytes_, put.path.salt);
      const std::span<const std::byte> piece = bytes;
      EXPECT_TRUE((*writer)->AppendChunk({&piece, 1}, Crc32c(bytes)).ok());
      (*session)->FinishBlock(*std::move(writer), [&, i](absl::StatusOr<PutBlockResult> result) {
        absl::MutexLock lock(&mutex);
        results[i] = std::move(result);
        --open;
      });
    }
    absl::MutexLock lock(&mutex);
    const auto none_open = [&open] { return open == 0; };
    mutex.Await(absl::Condition(&none_open));
    return results;
  }
  std::vector<absl::StatusOr<PutBlockResult>> Put(std::span<const TokenId> tokens,
                                                  std::string_view salt = {}) {
    PutAnnouncement put;
    put.path = PathOf(tokens, salt);
    return Put(put);
  }

  LookupResult Lookup(std::span<const TokenId> tokens, std::string_view salt = {},
                      std::chrono::milliseconds lease = {}) {
    auto result = engine_->Lookup(kBuiltInTenant, {.models = {model_},
                                                   .path = PathOf(tokens, salt),
                                                   .min_quality = Quality::kExact,
                                                   .lease = lease,
                                                   .want_blocks = true});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LookupResult{};
  }

  absl::StatusOr<LoadedFrame> ReadBlock(const StoredFrame& frame) {
    absl::Notification done;
    absl::StatusOr<LoadedFrame> loaded = absl::UnknownError("no answer");
    engine_->ReadFrame(frame, [&](absl::StatusOr<LoadedFrame> result) {
      loaded = std::move(result);
      done.Notify();
    });
    done.WaitForNotification();
    return loaded;
  }

  // How many leading blocks of a path are there, each with exactly its own bytes. A block with
  // other bytes fails the test.
  std::uint32_t ExpectOwnBytes(std::span<const TokenId> tokens, std::string_view salt = {}) {
    const LookupResult found = Lookup(tokens, salt);
    std::vector<TrieNodeId> ids;
    for (const MatchedBlock& block : found.blocks.front()) ids.push_back(block.node);
    const auto frames = engine_->FindFrames(kBuiltInTenant, model_, ids, Quality::kExact);
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
      const auto pattern = PatternBlock(tokens, block, raw_block_bytes_, salt);
      EXPECT_TRUE(std::equal(body.begin(), body.end(), pattern.begin(), pattern.end()))
          << "block " << block << " has foreign bytes";
    }
    return found.matched_blocks;
  }

  void ExpectSound() {
    std::vector<VerifyFinding> findings;
    ASSERT_TRUE(engine_
                    ->Verify(/*structure_only=*/false, /*repair=*/false,
                             [&](const VerifyProgress& progress) {
                               findings.insert(findings.end(), progress.findings.begin(),
                                               progress.findings.end());
                               return true;
                             })
                    .ok());
    for (const VerifyFinding& finding : findings) {
      ADD_FAILURE() << finding.node.ToHex() << ": " << finding.what;
    }
  }

  TemporaryFolder folder_;
  FakeClock clock_;
  EngineOptions options_;
  std::unique_ptr<Engine> engine_;
  ModelId model_;
  std::size_t raw_block_bytes_ = 0;
};

}  // namespace kvtrie
