// Opening what damage, deletions by hand and other hands have left.
//
// KV_FLIPS: how many files are opened with a flipped bit (default 24).

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "storage/meta/node_row.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

constexpr std::uint32_t kBlocks = 6;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class EngineRecoveryTest : public EngineFixture {
 protected:
  EngineRecoveryTest() {
    options_.segment_bytes = kMiB;
    options_.disk_limit_bytes = 64 * kMiB;
    options_.memory_tier_bytes = 0;
  }

  // Sessions that share beginnings in pairs.
  static std::vector<TokenId> TokensOf(std::uint64_t session) {
    auto tokens = SessionTokens(10'000 + session / 2, 2 * kTestBlockTokens);
    const auto own = SessionTokens(session, (kBlocks - 2) * kTestBlockTokens);
    tokens.insert(tokens.end(), own.begin(), own.end());
    return tokens;
  }
  void PutSessions(std::uint64_t count) {
    for (std::uint64_t session = 0; session < count; ++session) MustPut(TokensOf(session));
  }
  std::vector<std::uint32_t> BlocksOfSessions(std::uint64_t count) {
    std::vector<std::uint32_t> blocks;
    for (std::uint64_t session = 0; session < count; ++session) {
      blocks.push_back(ExpectOwnBytes(TokensOf(session)));
    }
    return blocks;
  }
  void ExpectAllSessions(std::uint64_t count) {
    for (const std::uint32_t blocks : BlocksOfSessions(count)) EXPECT_EQ(blocks, kBlocks);
  }

  std::string PathOfFile(const std::string& name) const { return options_.data_dir + "/" + name; }
  std::vector<fs::path> Files(const std::string& folder) const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }
  static void FlipBit(const fs::path& path, std::uint64_t offset, unsigned bit) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    char byte = 0;
    file.get(byte);
    byte = static_cast<char>(byte ^ (1 << bit));
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
    ASSERT_TRUE(file.good()) << path;
  }
  // Flips a bit of a block's bytes, wherever they lie. REQUIRES: the engine is closed.
  void DamageBlock(std::span<const TokenId> tokens, std::uint32_t block) const {
    const auto bytes = Pattern(PathOf(tokens), block);
    for (const fs::path& file : Files(PathOfFile("payload"))) {
      std::ifstream stream(file, std::ios::binary);
      const std::string all{std::istreambuf_iterator<char>(stream), {}};
      const std::size_t at = all.find({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      if (at != std::string::npos) return FlipBit(file, at + bytes.size() / 2, 1);
    }
    FAIL() << "block " << block << " is in no file";
  }
  static void Overwrite(const fs::path& path, char with) {
    const auto size = static_cast<std::size_t>(fs::file_size(path));
    std::ofstream(path, std::ios::binary) << std::string(size, with);
  }
};

TEST_F(EngineRecoveryTest, MetadataThatIsGoneIsRebuiltWithTheSameBlocks) {
  Open();
  PutSessions(10);
  const EngineStats before = engine_->Stats();
  const TrieNodeId node = Lookup(TokensOf(3)).blocks.front().back().node;
  engine_.reset();
  fs::remove_all(PathOfFile("meta"));
  fs::remove_all(PathOfFile("meta.synced"));
  Open();
  ExpectAllSessions(10);
  EXPECT_EQ(engine_->Stats().node_count, before.node_count);
  EXPECT_EQ(engine_->Stats().live_bytes, before.live_bytes);
  EXPECT_EQ(Lookup(TokensOf(3)).blocks.front().back().node, node);  // identity is kept
  ExpectSound();
  Reopen();
  ExpectAllSessions(10);
}

TEST_F(EngineRecoveryTest, MetadataOfManyTenantsIsRebuiltAndDropped) {
  Open();
  PutSessions(2);
  tenant_ = TenantId{7};
  ModelSpec second = spec_;
  second.name = "second";  // ids of tenants are of one namespace
  UseModel(second);
  PutSessions(4);
  engine_.reset();
  fs::remove_all(PathOfFile("meta"));
  fs::remove_all(PathOfFile("meta.synced"));
  Open();
  ExpectAllSessions(4);
  ExpectSound();
  const auto pin = engine_->Pin(tenant_, SelectionOf(PathOf(TokensOf(0))), seconds(10));
  ASSERT_TRUE(pin.ok()) << pin.status();
  // All of the payload is gone: every row goes, the pin with it.
  engine_.reset();
  for (const fs::path& file : Files(PathOfFile("payload"))) {
    if (file.filename().string().starts_with("seg-")) fs::remove(file);
  }
  clock_.Advance(seconds(60));
  Open();
  EXPECT_EQ(engine_->Stats().node_count, 0u);
  EXPECT_GT(engine_->recovery().nodes_dropped, 0u);
  EXPECT_TRUE(engine_->ListPins(tenant_).empty());
  PutSessions(4);
  ExpectAllSessions(4);
  ExpectSound();
}

// Damage that shows while rows are read: what was read before it must not count as taken.
TEST_F(EngineRecoveryTest, DamageInTheMiddleOfTheRowsLosesNothing) {
  Open();
  PutSessions(200);
  const EngineStats before = engine_->Stats();
  // RocksDB flushes its log into a table when it is opened.
  Reopen();
  engine_.reset();
  std::vector<fs::path> tables;
  for (const fs::path& file : Files(PathOfFile("meta"))) {
    if (file.extension() == ".sst") tables.push_back(file);
  }
  const auto largest = std::max_element(
      tables.begin(), tables.end(),
      [](const auto& a, const auto& b) { return fs::file_size(a) < fs::file_size(b); });
  ASSERT_NE(largest, tables.end());
  FlipBit(*largest, fs::file_size(*largest) * 2 / 3, 3);
  Open();
  EXPECT_TRUE(engine_->recovery().rebuilt_from_segments);
  EXPECT_FALSE(engine_->recovery().notes.empty());
  EXPECT_EQ(engine_->Stats().node_count, before.node_count);
  ExpectAllSessions(200);
  ExpectSound();
  // The models that were known then are so after the next start too.
  engine_.reset();
  auto engine = Engine::OpenEmbedded(options_, clock_);
  ASSERT_TRUE(engine.ok());
  EXPECT_TRUE((*engine)->GetModel(tenant_, model_).ok());
}

TEST_F(EngineRecoveryTest, ADamagedIdentityFileIsHealedFromItsRow) {
  Open();
  PutSessions(4);
  for (const auto& damage : {+[](const fs::path& path) { FlipBit(path, 10, 2); },
                             +[](const fs::path& path) { Overwrite(path, 0); },
                             +[](const fs::path& path) { fs::resize_file(path, 3); },
                             +[](const fs::path& path) { fs::remove(path); }}) {
    engine_.reset();
    damage(PathOfFile("identity"));
    Open();
    ExpectAllSessions(4);
  }
  // And the other way round.
  engine_.reset();
  fs::remove_all(PathOfFile("meta"));
  Open();
  ExpectAllSessions(4);
}

TEST_F(EngineRecoveryTest, AnIdentityOfANewerReleaseStopsTheStartAndStays) {
  Open();
  PutSessions(1);
  engine_.reset();
  std::ifstream file(PathOfFile("identity"), std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  text[0] = 2;
  const auto sealed = std::as_bytes(std::span(text)).first(text.size() - 4);
  const std::uint32_t crc = Crc32c(sealed);
  std::memcpy(text.data() + sealed.size(), &crc, sizeof crc);
  std::ofstream(PathOfFile("identity"), std::ios::binary) << text;
  const auto engine = Engine::OpenEmbedded(options_, clock_);
  EXPECT_TRUE(absl::IsFailedPrecondition(engine.status())) << engine.status();
}

TEST_F(EngineRecoveryTest, OneProcessAtATime) {
  Open();
  PutSessions(1);
  const auto second = Engine::OpenEmbedded(options_, clock_);
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  ExpectAllSessions(1);
}

TEST_F(EngineRecoveryTest, ForeignFilesAreReportedAndLeftAlone) {
  Open();
  PutSessions(2);
  engine_.reset();
  std::ofstream(PathOfFile("payload/notes.txt")) << "mine";
  Open();
  EXPECT_THAT(engine_->recovery().foreign_files, testing::ElementsAre("notes.txt"));
  EXPECT_TRUE(fs::exists(PathOfFile("payload/notes.txt")));
  ExpectAllSessions(2);
}

TEST_F(EngineRecoveryTest, LostSegmentsTakeTheirBlocksOnly) {
  Open();
  PutSessions(120);
  engine_.reset();
  std::vector<fs::path> segments;
  for (const fs::path& file : Files(PathOfFile("payload"))) {
    if (file.filename().string().starts_with("seg-")) segments.push_back(file);
  }
  ASSERT_GE(segments.size(), 3u);
  fs::remove(segments[1]);
  Open();
  const auto found = BlocksOfSessions(120);
  const auto whole = std::count(found.begin(), found.end(), kBlocks);
  EXPECT_GT(whole, 60);
  EXPECT_LT(whole, 120);
  EXPECT_GT(engine_->recovery().nodes_dropped, 0u);
  ExpectSound();
  // Holes are filled by putting again.
  PutSessions(120);
  ExpectAllSessions(120);
  ExpectSound();
  Reopen();
  ExpectAllSessions(120);
  ExpectSound();
}

TEST_F(EngineRecoveryTest, ASmallerLimitShrinksTheStoreBeforeItServes) {
  spec_.kv_groups.front().layer_runs = {{2, 8, 512, 512}};  // 256 KiB
  options_.disk_limit_bytes = 128 * kMiB;
  Open();
  PutSessions(70);
  const std::uint64_t before = engine_->Stats().node_count;
  ASSERT_GT(DuBytes(), 64 * kMiB);
  engine_.reset();
  options_.disk_limit_bytes = 64 * kMiB;
  Open();
  EXPECT_LE(DuBytes(), options_.disk_limit_bytes);
  EXPECT_LE(engine_->Stats().disk_bytes, options_.disk_limit_bytes);
  EXPECT_LT(engine_->Stats().node_count, before);
  EXPECT_GT(engine_->Stats().node_count, before / 4);
  std::set<std::vector<TokenId>> reachable;
  for (std::uint64_t session = 0; session < 70; ++session) {
    const auto tokens = TokensOf(session);
    for (std::uint32_t block = ExpectOwnBytes(tokens); block > 0; --block) {
      reachable.emplace(tokens.begin(),
                        tokens.begin() + static_cast<std::ptrdiff_t>(block * kTestBlockTokens));
    }
  }
  EXPECT_EQ(reachable.size(), engine_->Stats().node_count);
  ExpectSound();
}

TEST_F(EngineRecoveryTest, VerifyNamesDamagedBlocksAndRepairsThem) {
  Open();
  PutSessions(10);
  engine_.reset();
  DamageBlock(TokensOf(4), 3);
  Open();
  ASSERT_EQ(Findings().size(), 1u);
  EXPECT_EQ(engine_->Stats().corrupt_frames_total, 1u);
  EXPECT_EQ(Findings(/*repair=*/true).size(), 1u);
  ExpectSound();
  PutSessions(10);
  ExpectAllSessions(10);
  Reopen();
  ExpectAllSessions(10);
  ExpectSound();
}

// A read that meets damage is a miss, is counted, and is never answered with other bytes; the block
// can be put again.
TEST_F(EngineRecoveryTest, DamagedBlocksAreMissesUntilTheyArePutAgain) {
  Open();
  PutSessions(6);
  engine_.reset();
  for (const fs::path& file : Files(PathOfFile("payload"))) {
    if (!file.filename().string().starts_with("seg-")) continue;
    // Wherever records lie, each is hit.
    for (std::uint64_t at = 4096 + 200; at < fs::file_size(file); at += 2048) {
      FlipBit(file, at, 5);
    }
  }
  Open();
  std::ostringstream log;
  const auto logger = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  for (const std::uint32_t blocks : BlocksOfSessions(6)) EXPECT_LT(blocks, kBlocks);
  spdlog::set_default_logger(logger);
  EXPECT_THAT(log.str(), testing::HasSubstr("is damaged and dropped"));
  EXPECT_GT(engine_->Stats().corrupt_frames_total, 0u);
  for (std::uint32_t pass = 0; pass < kBlocks; ++pass) {  // behind a mended one the next shows
    PutSessions(6);
    BlocksOfSessions(6);
  }
  PutSessions(6);
  ExpectAllSessions(6);
  ExpectSound();
}

// Public report 41.
TEST_F(EngineRecoveryTest, AFlippedBitAnywhereIsNeverServed) {
  const char* text = std::getenv("KV_FLIPS");
  const int flips = text == nullptr ? 24 : std::atoi(text);
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kSessions = 24;
  Open();
  PutSessions(kSessions / 2);
  Reopen();  // some rows lie in tables, some in the log
  PutSessions(kSessions);
  engine_.reset();
  fs::remove(PathOfFile("ballast"));
  const std::string original = options_.data_dir;
  const auto files = Files(original);
  int with_loss = 0;
  for (int flip = 0; flip < flips; ++flip) {
    const std::string copy = folder_.path() + "/flipped";
    fs::remove_all(copy);
    fs::copy(original, copy, fs::copy_options::recursive);
    // Half of them in any file, half in the payload, which is most of the bytes.
    fs::path victim;
    do {
      victim = files[random() % files.size()];
    } while (fs::file_size(victim) == 0 ||
             (flip % 2 == 0 && victim.string().find("/payload/") == std::string::npos));
    const std::uint64_t offset = random() % fs::file_size(victim);
    SCOPED_TRACE(testing::Message() << victim << " offset " << offset);
    FlipBit(copy + victim.string().substr(original.size()), offset,
            static_cast<unsigned>(random() % 8));
    options_.data_dir = copy;
    Open();
    ASSERT_FALSE(HasFatalFailure());
    const auto found = BlocksOfSessions(kSessions);
    const bool lost = std::any_of(found.begin(), found.end(),
                                  [](std::uint32_t blocks) { return blocks < kBlocks; });
    if (lost) {
      ++with_loss;
      const RecoveryReport& report = engine_->recovery();
      EXPECT_GT(engine_->Stats().corrupt_frames_total + report.nodes_dropped + report.lost_batches +
                    report.notes.size(),
                0u)
          << "lost without a word";
      PutSessions(kSessions);
    }
    engine_->RunMaintenance();
    for (const VerifyFinding& finding : Findings(/*repair=*/true)) {
      EXPECT_TRUE(lost) << finding.what;
    }
    ExpectSound();
    engine_.reset();
    if (HasFailure()) break;
  }
  options_.data_dir = original;
  std::printf("%d flips, %d with a loss\n", flips, with_loss);
}

}  // namespace
}  // namespace kvtrie
