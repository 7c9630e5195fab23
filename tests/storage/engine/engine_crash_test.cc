// Kills a process that puts, deletes and evicts, and looks at what it left: what was acknowledged
// is there with its own bytes, what was deleted stays gone, and the accounts are right.
//
// KV_CRASH_CYCLES: how many kills, a third of them of each kind of work (default 9).

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "gmock/gmock.h"
#include "tests/storage/engine/coded_fixture.h"

extern char** environ;

namespace kvtrie {
namespace {

constexpr std::uint32_t kSharedBlocks = 2;
constexpr std::uint32_t kOwnBlocks = 4;
constexpr std::uint32_t kBlocks = kSharedBlocks + kOwnBlocks;
constexpr std::uint64_t kSessions = 40;
constexpr unsigned kThreads = 3;

int IntFromEnvironment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

// What a victim does beside putting and deleting.
struct Work {
  bool evicts = false;  // not all sessions fit
  // Blocks are coded in the background, and the text of sessions stands in others too, so that they
  // are coded against each other.
  bool codes = false;
};

constexpr std::uint64_t kTexts = 5;

// Four sessions share their first blocks, which are never deleted.
std::vector<TokenId> TokensOf(std::uint64_t session, Work work) {
  auto tokens = SessionTokens(10'000 + session / 4, kSharedBlocks * kTestBlockTokens);
  const auto own = SessionTokens(work.codes ? 20'000 + session % kTexts : session,
                                 kOwnBlocks * kTestBlockTokens);
  tokens.insert(tokens.end(), own.begin(), own.end());
  return tokens;
}

class EngineCrashTest : public CodedFixture {
 protected:
  void UseStore(const std::string& folder, Work work) {
    options_.data_dir = folder;
    options_.segment_bytes = std::uint64_t{1} << 20;
    options_.memory_tier_bytes = std::uint64_t{1} << 20;
    options_.sync_interval = std::chrono::milliseconds(20);
    if (work.evicts) {
      // Small enough that the sessions do not all fit.
      options_.index_bytes_max = std::uint64_t{1} << 20;
      options_.disk_limit_bytes = std::uint64_t{64} << 20;
      spec_.kv_groups.front().layer_runs = {{2, 8, 512, 512}};
    }
  }

  // What a block may have been stored as: its own KV, a frame of it at the level, or what became of
  // one at high when that which it was coded against went.
  std::vector<std::vector<std::byte>> WhatItMayBe(const PathView& path, std::uint32_t block,
                                                  Quality quality) const {
    if (quality == Quality::kExact) return {Pattern(path, block)};
    std::vector<std::byte> coded = DecodedBytes(path, block, Residual(quality));
    const std::uint32_t again = LoadLittle<std::uint32_t>(coded.data()) * 8 +
                                static_cast<std::uint32_t>(Quality::kNearExact);
    return {std::move(coded), CodedPattern(again, raw_block_bytes_)};
  }

  // How many leading blocks are there at high quality, each with its own bytes.
  std::uint32_t ExpectOwnBytesAtHigh(std::span<const TokenId> tokens) {
    const PathView path = PathOf(tokens);
    const std::uint32_t matched = LookupAt(path, Quality::kHigh).matched_blocks;
    const auto frames = FramesAt(path, Quality::kHigh);
    for (std::uint32_t block = 0; block < matched; ++block) {
      if (block >= frames.size() || !frames[block]) return block;
      const auto raw = RawBytes(*frames[block]);
      if (!raw.ok()) {
        EXPECT_TRUE(absl::IsNotFound(raw.status())) << raw.status();
        return block;
      }
      EXPECT_THAT(WhatItMayBe(path, block, frames[block]->quality), testing::Contains(*raw));
    }
    return matched;
  }
};

// The process that is killed. Journal: "p session" before a put, "A session block" after a block
// was acknowledged; "c session" and "C session block" the same for coded frames of the session's
// own blocks; "l session" before the exact frames of these are dropped where coded ones are stored;
// "d session" before a delete of the session's own blocks, "D session" after it.
TEST_F(EngineCrashTest, DISABLED_Victim) {
  const char* const folder = std::getenv("KVTRIE_CRASH_FOLDER");
  if (folder == nullptr) GTEST_SKIP() << "run by the other tests";
  const int journal = IntFromEnvironment("KVTRIE_CRASH_JOURNAL", -1);
  const auto seed = static_cast<unsigned>(IntFromEnvironment("KVTRIE_CRASH_SEED", 0));
  const Work work = {.evicts = IntFromEnvironment("KVTRIE_CRASH_EVICTS", 0) != 0,
                     .codes = IntFromEnvironment("KVTRIE_CRASH_CODES", 0) != 0};
  UseStore(folder, work);
  if (work.codes) options_.recode_quality = Quality::kHigh;
  options_.recode_cpu_percent = 100;
  OpenWithProfile();
  ASSERT_FALSE(HasFatalFailure());
  const auto note = [journal](const std::string& line) {
    // One write below PIPE_BUF: lines do not mix.
    if (::write(journal, line.data(), line.size()) < 0) std::abort();
  };
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < kThreads; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(seed + id);
      while (true) {
        // Each thread has sessions of its own, so that the journal is in order for each.
        const std::uint64_t session = random() % kSessions / kThreads * kThreads + id;
        const auto tokens = TokensOf(session, work);
        const std::string name = std::to_string(session);
        const auto what = random() % 8;
        if (what == 0) {
          note("l " + name + "\n");
          // Not found: nothing of it is stored.
          engine_->SetRetention(tenant_, SelectionOf(PathOf(tokens)), {.quality = Quality::kHigh})
              .status()
              .IgnoreError();
        } else if (what <= 2) {
          note("c " + name + "\n");
          PutAnnouncement put;
          put.path = PathOf(tokens);
          put.first_block = kSharedBlocks;
          put.quality = Quality::kHigh;
          put.beside_exact = true;
          put.durable = random() % 8 == 0;
          std::vector<std::uint32_t> sent;
          const auto results = PutFrames(put, Residual(Quality::kHigh), &sent);
          for (std::size_t i = 0; i < sent.size(); ++i) {
            if (results[i].ok()) note("C " + name + " " + std::to_string(sent[i]) + "\n");
          }
        } else if (what <= 5) {
          note("p " + name + "\n");
          PutAnnouncement put;
          put.path = PathOf(tokens);
          put.durable = random() % 8 == 0;
          put.session_id = name;
          auto begun = engine_->BeginPut(tenant_, put);
          if (!begun.ok()) std::abort();
          const auto missing = (*begun)->missing_blocks();
          absl::BlockingCounter open(static_cast<int>(missing.size()));
          const std::size_t blocks_per_write = 1 + random() % 4;
          std::vector<PutSession::FinishedBlock> together;
          for (const std::uint32_t block : missing) {
            auto writer = FilledBlock(**begun, put.path, block);
            if (!writer.ok()) std::abort();
            together.push_back({*std::move(writer), [&, block](auto result) {
                                  if (result.ok()) {
                                    note("A " + name + " " + std::to_string(block) + "\n");
                                  }
                                  open.DecrementCount();
                                }});
            if (together.size() == blocks_per_write || block == missing.back()) {
              (*begun)->FinishBlocks(std::exchange(together, {}));
            }
          }
          open.Wait();
        } else {
          note("d " + name + "\n");
          const auto own = std::span(tokens).first((kSharedBlocks + 1) * kTestBlockTokens);
          if (!engine_->Delete(tenant_, SelectionOf(PathOf(own))).ok()) std::abort();
          note("D " + name + "\n");
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A victim at work.
class Victim {
 public:
  Victim(const std::string& folder, unsigned seed, Work work) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    journal_ = ends[0];
    std::vector<std::string> environment = {
        "KVTRIE_CRASH_FOLDER=" + folder, "KVTRIE_CRASH_JOURNAL=3",
        "KVTRIE_CRASH_SEED=" + std::to_string(seed),
        std::string("KVTRIE_CRASH_EVICTS=") + (work.evicts ? "1" : "0"),
        std::string("KVTRIE_CRASH_CODES=") + (work.codes ? "1" : "0")};
    std::vector<char*> variables;
    for (char** at = environ; *at != nullptr; ++at) variables.push_back(*at);
    for (std::string& variable : environment) variables.push_back(variable.data());
    variables.push_back(nullptr);
    std::string program = "/proc/self/exe";
    std::string filter = "--gtest_filter=EngineCrashTest.DISABLED_Victim";
    std::string disabled = "--gtest_also_run_disabled_tests";
    char* const arguments[] = {program.data(), filter.data(), disabled.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    if (posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, variables.data()) != 0) {
      std::abort();
    }
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
  }
  ~Victim() { ::close(journal_); }

  // Kills it after so many bytes of its journal, and returns the journal.
  std::string KillAfter(std::size_t bytes) {
    std::string text;
    bool killed = false;
    while (true) {
      char buffer[4096];
      const ssize_t count = ::read(journal_, buffer, sizeof buffer);
      if (count <= 0) break;
      text.append(buffer, static_cast<std::size_t>(count));
      if (text.size() >= bytes && !killed) {
        ::kill(pid_, SIGKILL);
        killed = true;
      }
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "victim ended by itself";
    return text;
  }

 private:
  pid_t pid_ = 0;
  int journal_ = -1;
};

// What the journals promise of a session.
struct Promise {
  std::uint32_t blocks = 0;        // leading blocks that must be there, exact
  std::uint32_t coded_blocks = 0;  // and those at high quality at least
  bool is_deleted = false;         // all but the shared ones, and no put was begun since
};

class EngineCrashCyclesTest : public EngineCrashTest, public testing::WithParamInterface<Work> {};

TEST_P(EngineCrashCyclesTest, NothingAcknowledgedIsLostAndNothingForeignIsServed) {
  const Work work = GetParam();
  const int all_cycles = IntFromEnvironment("KV_CRASH_CYCLES", 9);
  const int cycles = all_cycles / 3;
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  UseStore(options_.data_dir, work);
  std::map<std::uint64_t, Promise> promises;
  std::size_t acknowledged = 0;
  std::uint64_t references = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int cycle = 0; cycle < cycles; ++cycle) {
    SCOPED_TRACE(testing::Message() << "cycle " << cycle);
    Victim victim(options_.data_dir, static_cast<unsigned>(random()), work);
    std::istringstream journal(victim.KillAfter(1 + random() % 8000));
    std::string kind;
    std::uint64_t session = 0;
    while (journal >> kind >> session) {
      Promise& promise = promises[session];
      if (kind == "A") {
        std::uint32_t block = 0;
        journal >> block;
        ++acknowledged;
        // Blocks that were not asked for were there already.
        promise.blocks = std::max(promise.blocks, block + 1);
        promise.coded_blocks = std::max(promise.coded_blocks, promise.blocks);
      } else if (kind == "C") {
        std::uint32_t block = 0;
        journal >> block;
        ++acknowledged;
        promise.coded_blocks = std::max(promise.coded_blocks, block + 1);
      } else if (kind == "p" || kind == "c") {
        promise.is_deleted = false;
      } else if (kind == "l") {
        promise.blocks = std::min(promise.blocks, kSharedBlocks);
      } else {
        promise.blocks = std::min(promise.blocks, kSharedBlocks);
        promise.coded_blocks = std::min(promise.coded_blocks, kSharedBlocks);
        promise.is_deleted = kind == "D";
      }
    }

    OpenWithProfile();
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(engine_->recovery().nodes_dropped, 0u);
    EXPECT_EQ(engine_->recovery().lost_batches, 0u);
    EXPECT_FALSE(engine_->recovery().rebuilt_from_segments);
    // Where blocks are coded, a session's exact frames may go with those that it shares.
    for (std::uint64_t at = 0; at < kSessions + kThreads; ++at) {
      const auto tokens = TokensOf(at, work);
      const std::uint32_t found = ExpectOwnBytes(tokens);
      const Promise promise = promises[at];
      EXPECT_GE(found, work.evicts || work.codes ? 0 : promise.blocks) << "session " << at;
      const std::uint32_t at_high = ExpectOwnBytesAtHigh(tokens);
      EXPECT_GE(at_high, work.evicts ? 0 : promise.coded_blocks) << "session " << at;
      EXPECT_GE(at_high, found) << "session " << at;
      EXPECT_LE(at_high, promise.is_deleted ? kSharedBlocks : kBlocks) << "session " << at;
    }
    ExpectSound();
    engine_->RunMaintenance();
    const EngineStats stats = engine_->Stats();
    references += stats.reference_count;
    EXPECT_EQ(stats.lost_members_total, 0u);
    std::uint64_t frame_bytes = 0;
    ASSERT_TRUE(engine_
                    ->Verify(false, false,
                             [&](const VerifyProgress& progress) {
                               frame_bytes = progress.bytes_read;
                               return true;
                             })
                    .ok());
    EXPECT_EQ(stats.live_bytes, frame_bytes);
    EXPECT_NEAR(static_cast<double>(stats.disk_bytes), static_cast<double>(DuBytes()),
                0.01 * static_cast<double>(DuBytes()) + 65536);
    EXPECT_EQ(stats.pending_free_bytes, 0u);
    EXPECT_EQ(stats.open_puts, 0u);
    engine_.reset();
    if (HasFailure()) break;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  std::printf("%d kills, %zu blocks acknowledged, %.2f kills per second\n", cycles, acknowledged,
              cycles / elapsed.count());
  EXPECT_GT(acknowledged, 0u);
  // Of many kills, some came when blocks had been coded against others.
  EXPECT_TRUE(references > 0 || !work.codes || cycles < 20);
}

INSTANTIATE_TEST_SUITE_P(, EngineCrashCyclesTest,
                         testing::Values(Work{}, Work{.evicts = true}, Work{.codes = true},
                                         Work{.evicts = true, .codes = true}),
                         [](const auto& param) {
                           const std::string room =
                               param.param.evicts ? "WhileEvicting" : "WithRoomForAll";
                           return room + (param.param.codes ? "AndCoding" : "");
                         });

}  // namespace
}  // namespace kvtrie
