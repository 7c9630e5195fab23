#include "storage/meta/rocksdb_meta_store.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/meta/meta_keys.h"
#include "tests/storage/base/scratch_folder.h"
#include "tests/storage/meta/meta_store_conformance.h"

namespace kvtrie {
namespace {

namespace fs = std::filesystem;

OpenedMetaStore OpenStore(const std::string& folder) {
  auto opened = OpenRocksDbMetaStore(folder, {});
  EXPECT_TRUE(opened.ok()) << opened.status();
  return opened.ok() ? *std::move(opened) : OpenedMetaStore{};
}

class RocksDbBackend final : public MetaStoreBackend {
 public:
  std::unique_ptr<MetaStore> Open() override {
    // Small enough that the tests flush and compact too.
    RocksDbMetaStoreOptions options;
    options.write_buffer_bytes = std::size_t{128} << 10;
    auto opened = OpenRocksDbMetaStore(folder_ / "meta", options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (!opened.ok()) return nullptr;
    EXPECT_EQ(opened->report.lost_batches, 0u);
    EXPECT_FALSE(opened->report.log_truncated);
    EXPECT_FALSE(opened->report.recreated);
    EXPECT_TRUE(opened->report.notes.empty());
    return std::move(opened->store);
  }

 private:
  ScratchFolder folder_;
};

std::unique_ptr<MetaStoreBackend> MakeRocksDbBackend() {
  return std::make_unique<RocksDbBackend>();
}

INSTANTIATE_TEST_SUITE_P(RocksDb, MetaStoreConformanceTest, ::testing::Values(&MakeRocksDbBackend),
                         [](const auto&) { return "Embedded"; });

class RocksDbMetaStoreTest : public ::testing::Test {
 protected:
  static std::string Key(int n) { return TenantPrefix(kBuiltInTenant) + absl::StrCat(n); }

  static void Put(MetaStore& store, int n) {
    MetaBatch batch(kBuiltInTenant);
    batch.Put(MetaTable::kNodes, Key(n), std::string(1000, 'v'));
    ASSERT_TRUE(store.Write(batch).ok());
  }

  static std::size_t RowCount(const MetaStore& store) {
    return ScanAll(store, MetaTable::kNodes).size();
  }

  // Leaves ten rows, all of them synced, and no store open.
  void WriteTenSyncedRows() {
    const OpenedMetaStore opened = OpenStore(folder_);
    for (int n = 0; n < 10; ++n) Put(*opened.store, n);
    ASSERT_TRUE(opened.store->Sync().ok());
  }

  // The log that has the rows.
  fs::path LogFile() {
    fs::path log;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() == ".log" && entry.file_size() > 0) log = entry.path();
    }
    EXPECT_FALSE(log.empty());
    return log;
  }

  const ScratchFolder temp_;
  const std::string folder_ = temp_ / "meta";
};

TEST_F(RocksDbMetaStoreTest, SecondOpenerIsToldUnavailable) {
  const OpenedMetaStore opened = OpenStore(folder_);
  EXPECT_TRUE(absl::IsUnavailable(OpenRocksDbMetaStore(folder_, {}).status()));
  Put(*opened.store, 1);
  EXPECT_FALSE(fs::exists(folder_ + ".damaged-1"));
}

TEST_F(RocksDbMetaStoreTest, FolderThatCannotBeMadeIsUnavailable) {
  std::ofstream(temp_ / "file") << "x";
  EXPECT_TRUE(absl::IsUnavailable(OpenRocksDbMetaStore(temp_ / "file/meta", {}).status()));
}

TEST_F(RocksDbMetaStoreTest, SlashAtTheEndNamesTheSameStore) {
  WriteTenSyncedRows();
  EXPECT_EQ(RowCount(*OpenStore(folder_ + "/").store), 10u);
}

TEST_F(RocksDbMetaStoreTest, LostEndOfASyncedLogRecreates) {
  WriteTenSyncedRows();
  fs::resize_file(LogFile(), fs::file_size(LogFile()) / 2);
  const OpenedMetaStore opened = OpenStore(folder_);
  EXPECT_TRUE(opened.report.recreated);
  EXPECT_FALSE(opened.report.notes.empty());
  EXPECT_EQ(RowCount(*opened.store), 0u);
  EXPECT_TRUE(fs::exists(folder_ + ".damaged-1"));
}

TEST_F(RocksDbMetaStoreTest, MissingLogIsReportedUntilTheNextSync) {
  WriteTenSyncedRows();
  fs::remove(LogFile());
  {
    const OpenedMetaStore opened = OpenStore(folder_);
    EXPECT_EQ(RowCount(*opened.store), 0u);
    EXPECT_EQ(opened.report.lost_batches, 10u);
  }
  {
    const OpenedMetaStore opened = OpenStore(folder_);
    EXPECT_EQ(opened.report.lost_batches, 10u);
    ASSERT_TRUE(opened.store->Sync().ok());
  }
  EXPECT_EQ(OpenStore(folder_).report.lost_batches, 0u);
}

TEST_F(RocksDbMetaStoreTest, CutOffLastWriteIsNotDamage) {
  WriteTenSyncedRows();
  {
    const OpenedMetaStore opened = OpenStore(folder_);
    Put(*opened.store, 10);
    Put(*opened.store, 11);
  }
  fs::resize_file(LogFile(), fs::file_size(LogFile()) - 100);
  const OpenedMetaStore opened = OpenStore(folder_);
  EXPECT_EQ(RowCount(*opened.store), 11u);
  EXPECT_EQ(opened.report.lost_batches, 0u);
  EXPECT_FALSE(opened.report.log_truncated);
}

TEST_F(RocksDbMetaStoreTest, MissingCurrentRecreatesInsteadOfStartingEmptyWithoutAWord) {
  WriteTenSyncedRows();
  fs::remove(fs::path(folder_) / "CURRENT");
  const OpenedMetaStore opened = OpenStore(folder_);
  EXPECT_TRUE(opened.report.recreated);
  EXPECT_EQ(RowCount(*opened.store), 0u);
  EXPECT_TRUE(fs::exists(folder_ + ".damaged-1"));
  Put(*opened.store, 1);
  EXPECT_TRUE(opened.store->Sync().ok());
}

TEST_F(RocksDbMetaStoreTest, MissingFolderBesideARecordIsReported) {
  WriteTenSyncedRows();
  fs::remove_all(folder_);
  EXPECT_TRUE(OpenStore(folder_).report.recreated);
  EXPECT_FALSE(OpenStore(folder_).report.recreated);
}

TEST_F(RocksDbMetaStoreTest, DamagedRecordIsNotedAndTheStoreOpens) {
  WriteTenSyncedRows();
  std::ofstream(folder_ + ".synced", std::ios::app) << "x";
  {
    const OpenedMetaStore opened = OpenStore(folder_);
    EXPECT_EQ(RowCount(*opened.store), 10u);
    EXPECT_EQ(opened.report.notes.size(), 1u);
  }
  EXPECT_TRUE(OpenStore(folder_).report.notes.empty());
}

TEST_F(RocksDbMetaStoreTest, MovedAsideStoreCountsAsUsedAndLeavesAFreshOne) {
  WriteTenSyncedRows();
  ASSERT_TRUE(MoveAsideRocksDbMetaStore(folder_).ok());
  EXPECT_TRUE(fs::exists(folder_ + ".damaged-1"));
  std::uint64_t bytes = 0;
  {
    const OpenedMetaStore opened = OpenStore(folder_);
    EXPECT_FALSE(opened.report.recreated);
    EXPECT_EQ(opened.report.lost_batches, 0u);
    EXPECT_EQ(RowCount(*opened.store), 0u);
    bytes = opened.store->DiskBytes();
    fs::remove_all(folder_ + ".damaged-1");
    EXPECT_LT(opened.store->DiskBytes(), bytes);
  }
  ASSERT_TRUE(MoveAsideRocksDbMetaStore(folder_).ok());
  EXPECT_TRUE(MoveAsideRocksDbMetaStore(folder_).ok()) << "there is none";
}

TEST_F(RocksDbMetaStoreTest, MovingAsideTwiceKeepsBoth) {
  WriteTenSyncedRows();
  ASSERT_TRUE(MoveAsideRocksDbMetaStore(folder_).ok());
  WriteTenSyncedRows();
  ASSERT_TRUE(MoveAsideRocksDbMetaStore(folder_).ok());
  EXPECT_TRUE(fs::exists(folder_ + ".damaged-1"));
  EXPECT_TRUE(fs::exists(folder_ + ".damaged-2"));
}

TEST_F(RocksDbMetaStoreTest, EmptyStoreTakesLittleDisk) {
  const OpenedMetaStore opened = OpenStore(folder_);
  EXPECT_LT(opened.store->DiskBytes(), std::uint64_t{512} << 10);
}

TEST_F(RocksDbMetaStoreTest, LogsStayBounded) {
  RocksDbMetaStoreOptions options;
  options.write_buffer_bytes = std::size_t{1} << 20;
  const auto opened = OpenRocksDbMetaStore(folder_, options);
  ASSERT_TRUE(opened.ok()) << opened.status();
  // The same hundred rows over and over: 50 MB are written, 100 kB are alive.
  for (int n = 0; n < 50'000; ++n) Put(*opened->store, n % 100);
  EXPECT_LT(opened->store->DiskBytes(), std::uint64_t{16} << 20);
}

TEST_F(RocksDbMetaStoreTest, RowOfAnotherTenantIsABug) {
  const OpenedMetaStore opened = OpenStore(folder_);
  MetaBatch batch(TenantId{2});
  batch.Put(MetaTable::kNodes, Key(1), "v");
  EXPECT_DEATH(opened.store->Write(batch).IgnoreError(), "tenant_prefix");
}

}  // namespace
}  // namespace kvtrie
