// A store on disks that fill up or turn read-only: file systems of their own, so these tests need
// root and are skipped without.

#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// A mounted file system, gone with the test.
class MountedDisk {
 public:
  // `kind`: "tmpfs", or "ext4" in a file.
  MountedDisk(const std::string& kind, const std::string& folder, std::uint64_t bytes)
      : point_(folder + "/mounted") {
    std::filesystem::create_directories(point_);
    const std::string size = std::to_string(bytes);
    if (kind == "tmpfs") {
      mounted_ = ::mount("tmpfs", point_.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
      return;
    }
    const std::string image = folder + "/image";
    std::ofstream(image).close();
    std::filesystem::resize_file(image, bytes);
    mounted_ = Run("mkfs.ext4 -q -m 0 " + image) && Run("mount -o loop " + image + " " + point_);
  }
  ~MountedDisk() {
    if (mounted_) Run("umount -l " + point_);  // the engine may still be there
  }
  MountedDisk(const MountedDisk&) = delete;
  MountedDisk& operator=(const MountedDisk&) = delete;

  bool mounted() const { return mounted_; }
  const std::string& point() const { return point_; }

  static bool Run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }

 private:
  const std::string point_;
  bool mounted_ = false;
};

class EngineDiskTest : public EngineFixture {
 protected:
  static constexpr std::uint32_t kBlocks = 4;

  static std::vector<TokenId> TokensOf(std::uint64_t session) {
    return SessionTokens(session, kBlocks * kTestBlockTokens);
  }
  // 64 KiB per block.
  void UseDisk(const MountedDisk& disk) {
    options_.data_dir = disk.point() + "/store";
    options_.disk_limit_bytes = 512 * kMiB;  // more than the disk has
    options_.segment_bytes = 4 * kMiB;
    options_.memory_tier_bytes = 0;
    blocks_per_write_ = 3;
    spec_.kv_groups.front().layer_runs = {{2, 2, 512, 512}};
  }
  // Puts sessions until some are refused; how many blocks of each were acknowledged.
  std::vector<std::uint32_t> PutUntilFull(std::uint64_t sessions_max) {
    std::vector<std::uint32_t> stored;
    int refused = 0;
    for (std::uint64_t session = 0; session < sessions_max && refused < 5; ++session) {
      stored.push_back(0);
      const auto results = Put(TokensOf(session));
      for (const auto& result : results) {
        if (result.ok()) {
          ++stored.back();
        } else {
          EXPECT_TRUE(absl::IsResourceExhausted(result.status()) ||
                      absl::IsFailedPrecondition(result.status()))
              << result.status();
        }
      }
      refused += stored.back() < kBlocks ? 1 : 0;
    }
    EXPECT_EQ(refused, 5) << "the disk did not fill up";
    return stored;
  }
  void ExpectExactly(const std::vector<std::uint32_t>& stored) {
    for (std::uint64_t session = 0; session < stored.size(); ++session) {
      EXPECT_EQ(ExpectOwnBytes(TokensOf(session)), stored[session]) << "session " << session;
    }
  }
};

class EngineFullDiskTest : public EngineDiskTest,
                           public testing::WithParamInterface<const char*> {};

// Public report 1.
TEST_P(EngineFullDiskTest, AFullDiskRefusesPutsServesTheRestAndRecovers) {
  const MountedDisk disk(GetParam(), folder_.path(), 80 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount " << GetParam();
  UseDisk(disk);
  options_.eviction = false;
  Open();
  auto stored = PutUntilFull(400);
  ASSERT_GT(stored.size(), 100u);
  EXPECT_THAT(engine_->Stats().degraded, testing::Contains("disk full"));
  ExpectExactly(stored);
  engine_->RunMaintenance();
  ExpectExactly(stored);
  // Deletes work on the full disk, and make room.
  for (std::uint64_t session = 0; session < 60; ++session) {
    const auto tokens = TokensOf(session);
    const auto deleted =
        engine_->Delete(tenant_, SelectionOf(PathOf(std::span(tokens).first(kTestBlockTokens))));
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    EXPECT_EQ(deleted->blocks, stored[session]);
    stored[session] = 0;
  }
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  ExpectExactly(stored);
  for (std::uint64_t session = 1000; session < 1030; ++session) {
    for (const auto& result : Put(TokensOf(session))) {
      ASSERT_TRUE(result.ok()) << result.status();
    }
  }
  engine_->RunMaintenance();
  EXPECT_THAT(engine_->Stats().degraded, testing::IsEmpty());
  ExpectSound();
  Reopen();
  ExpectExactly(stored);
  for (std::uint64_t session = 1000; session < 1030; ++session) {
    EXPECT_EQ(ExpectOwnBytes(TokensOf(session)), kBlocks);
  }
  ExpectSound();
}

TEST_P(EngineFullDiskTest, SpaceThatOthersFreeIsUsedWithoutARestart) {
  const MountedDisk disk(GetParam(), folder_.path(), 80 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount " << GetParam();
  UseDisk(disk);
  options_.eviction = false;
  const std::string other = disk.point() + "/other";
  std::ofstream(other, std::ios::binary) << std::string(30 * kMiB, 'x');
  Open();
  const auto stored = PutUntilFull(400);
  std::filesystem::remove(other);
  for (std::uint64_t session = 1000; session < 1050; ++session) {
    for (const auto& result : Put(TokensOf(session))) {
      ASSERT_TRUE(result.ok()) << result.status();
    }
  }
  ExpectExactly(stored);
  ExpectSound();
}

TEST_P(EngineFullDiskTest, WithEvictionOldBlocksMakeWayOnAFullDisk) {
  const MountedDisk disk(GetParam(), folder_.path(), 80 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount " << GetParam();
  UseDisk(disk);
  Open();
  std::size_t refused = 0;
  for (std::uint64_t session = 0; session < 500; ++session) {
    for (const auto& result : Put(TokensOf(session))) refused += result.ok() ? 0 : 1;
    if (session % 20 == 0) engine_->RunMaintenance();
    clock_.Advance(std::chrono::seconds(1));
  }
  // Blocks race for what is freed: a few may come too late.
  EXPECT_LT(refused, 100u);
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 500u);
  for (const auto& result : Put(TokensOf(5000))) EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(ExpectOwnBytes(TokensOf(5000)), kBlocks);
  for (std::uint64_t session = 0; session < 500; ++session) ExpectOwnBytes(TokensOf(session));
  ExpectSound();
}

// Rows fill the disk rather than payload: many, with long keys.
TEST_P(EngineFullDiskTest, ADiskFullOfRowsStillTakesDeletes) {
  const MountedDisk disk(GetParam(), folder_.path(), 64 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount " << GetParam();
  UseDisk(disk);
  spec_.kv_groups.front().layer_runs = {{1, 1, 1, 0}};
  options_.eviction = false;
  const std::string long_key(kExtraKeyBytesMax, 'k');
  Open();
  const auto path_of = [&](const std::vector<TokenId>& tokens, std::vector<ExtraKey>& extra_keys) {
    extra_keys.clear();
    for (std::uint32_t block = 0; block < 64; ++block) extra_keys.push_back({block, long_key});
    return PathOf(tokens, {}, extra_keys);
  };
  std::uint64_t session = 0;
  bool full = false;
  std::vector<ExtraKey> extra_keys;
  for (; !full && session < 400; ++session) {
    const auto tokens = SessionTokens(session, 64 * kTestBlockTokens);
    for (const auto& result : Put(path_of(tokens, extra_keys))) full = full || !result.ok();
  }
  ASSERT_TRUE(full);
  for (std::uint64_t at = 0; at < session; at += 2) {
    const auto tokens = SessionTokens(at, 64 * kTestBlockTokens);
    const auto path = path_of(tokens, extra_keys);
    const auto deleted = engine_->Delete(
        tenant_,
        SelectionOf(PathOf(std::span(tokens).first(kTestBlockTokens), {}, path.extra_keys)));
    ASSERT_TRUE(deleted.ok()) << "session " << at << ": " << deleted.status();
  }
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  const auto tokens = SessionTokens(9999, 8 * kTestBlockTokens);
  for (const auto& result : Put(tokens)) EXPECT_TRUE(result.ok()) << result.status();
  ExpectSound();
}

INSTANTIATE_TEST_SUITE_P(, EngineFullDiskTest, testing::Values("tmpfs", "ext4"),
                         [](const auto& param) { return std::string(param.param); });

TEST_F(EngineDiskTest, ADiskThatTakesNoRecordsServesReadsAndTakesPutsAgainLater) {
  const MountedDisk disk("ext4", folder_.path(), 100 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount ext4";
  UseDisk(disk);
  Open();
  const std::vector<std::uint32_t> stored(20, kBlocks);
  for (std::uint64_t session = 0; session < stored.size(); ++session) MustPut(TokensOf(session));
  AwaitNoOpenPuts();
  engine_->RunMaintenance();
  const auto late = TokensOf(100);
  for (int round = 0; round < 2; ++round) {
    // The kernel does not turn a mount read-only under open files; for immutable files it refuses
    // the same calls.
    ASSERT_TRUE(MountedDisk::Run("chattr -R +i " + options_.data_dir + "/payload"));
    ExpectExactly(stored);
    for (const auto& result : Put(late)) {
      EXPECT_TRUE(absl::IsUnavailable(result.status()) ||
                  absl::IsFailedPrecondition(result.status()))
          << result.status();
    }
    EXPECT_EQ(Matched(late), 0u);
    EXPECT_THAT(engine_->Stats().degraded, testing::Not(testing::IsEmpty()));
    AwaitNoOpenPuts();
    engine_->RunMaintenance();
    ExpectExactly(stored);
    ASSERT_TRUE(MountedDisk::Run("chattr -R -i " + options_.data_dir + "/payload"));
    engine_->RunMaintenance();
    MustPut(late);
    EXPECT_EQ(ExpectOwnBytes(late), kBlocks);
    AwaitNoOpenPuts();
    engine_->RunMaintenance();
    EXPECT_THAT(engine_->Stats().degraded, testing::IsEmpty());
    ExpectSound();
    const auto path = PathOf(std::span(late).first(kTestBlockTokens));
    EXPECT_EQ(engine_->Delete(tenant_, SelectionOf(path))->blocks, kBlocks);
  }
  ExpectExactly(stored);
  Reopen();
  ExpectExactly(stored);
  ExpectSound();
}

// As a failing disk does it: the file system gives up and refuses all writes.
TEST_F(EngineDiskTest, AFileSystemThatGaveUpStillServesReads) {
  const MountedDisk disk("ext4", folder_.path(), 100 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount ext4";
  UseDisk(disk);
  Open();
  const std::vector<std::uint32_t> stored(20, kBlocks);
  for (std::uint64_t session = 0; session < stored.size(); ++session) MustPut(TokensOf(session));
  engine_->RunMaintenance();
  if (!MountedDisk::Run("mount -o remount,abort " + disk.point())) GTEST_SKIP() << "cannot abort";
  ExpectExactly(stored);
  for (const auto& result : Put(TokensOf(100))) EXPECT_FALSE(result.ok());
  EXPECT_EQ(Matched(TokensOf(100)), 0u);
  engine_->RunMaintenance();
  EXPECT_THAT(engine_->Stats().degraded, testing::Not(testing::IsEmpty()));
  ExpectExactly(stored);
  engine_.reset();
}

}  // namespace
}  // namespace kvtrie
