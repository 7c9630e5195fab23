#include "storage/meta/sync_record.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {
namespace {

void Append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::app) << text;
}

bool IsLog(std::string_view name) { return name.ends_with(".log"); }

SyncRecord Record() {
  return {.sync_count = 3,
          .sequence = 1'000'000'007,
          .files = {{"000012.log", 4096, 0xdeadbeef}, {"MANIFEST-000004", 77, 1}}};
}

TEST(SyncRecordTest, DecodesWhatItEncodes) {
  for (const SyncRecord& record : {Record(), SyncRecord{}}) {
    const auto decoded = SyncRecord::Decode(record.Encode());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, record);
  }
}

TEST(SyncRecordTest, RefusesEveryByteFlipAndCut) {
  const std::string bytes = Record().Encode();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    EXPECT_TRUE(absl::IsDataLoss(SyncRecord::Decode(damaged).status())) << i;
    EXPECT_TRUE(absl::IsDataLoss(SyncRecord::Decode(bytes.substr(0, i)).status())) << i;
  }
}

TEST(SyncRecordTest, IsReplacedAndReadBack) {
  const ScratchFolder folder;
  const std::string path = folder / "meta.synced";
  FileSystem& files = PosixFileSystem();
  EXPECT_EQ(ReadSyncRecord(files, path).value(), std::nullopt);
  // What a crash may have left.
  Append(path + ".tmp", "half of a record");
  ASSERT_TRUE(WriteSyncRecord(files, path, SyncRecord{}).ok());
  ASSERT_TRUE(WriteSyncRecord(files, path, Record()).ok());
  EXPECT_EQ(ReadSyncRecord(files, path).value(), Record());
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  Append(path, "x");
  EXPECT_TRUE(absl::IsDataLoss(ReadSyncRecord(files, path).status()));
}

TEST(CheckSyncedFileTest, TellsGrowthFromDamage) {
  const ScratchFolder folder;
  const std::string path = folder / "a.log";
  FileSystem& files = PosixFileSystem();
  const SyncedFile synced{"a.log", 5, Crc32c(AsBytes("hello"))};
  const auto check = [&] { return CheckSyncedFile(files, folder.path(), synced); };
  EXPECT_TRUE(absl::IsNotFound(check()));
  Append(path, "hell");
  EXPECT_TRUE(absl::IsDataLoss(check()));
  Append(path, "o");
  EXPECT_TRUE(check().ok());
  Append(path, " world");
  EXPECT_TRUE(check().ok());
  std::filesystem::remove(path);
  Append(path, "jello world");
  EXPECT_TRUE(absl::IsDataLoss(check()));
}

TEST(GrowingFilesTest, KnowsFilesAsTheyGrowAndGo) {
  const ScratchFolder folder;
  const std::string text(700'000, 't');
  GrowingFiles growing(PosixFileSystem(), folder.path(), IsLog);
  EXPECT_TRUE(growing.Sync()->empty());

  Append(folder / "a.log", text);
  Append(folder / "b.log", "");
  Append(folder / "c.sst", "not one of them");
  EXPECT_EQ(*growing.Sync(),
            (std::vector<SyncedFile>{{"a.log", 700'000, Crc32c(AsBytes(text))}, {"b.log", 0, 0}}));
  Append(folder / "a.log", "more");
  std::filesystem::remove(folder / "b.log");
  EXPECT_EQ(*growing.Sync(),
            (std::vector<SyncedFile>{{"a.log", 700'004, Crc32c(AsBytes(text + "more"))}}));
  std::filesystem::remove(folder / "a.log");
  EXPECT_TRUE(growing.Sync()->empty());
}

}  // namespace
}  // namespace kvtrie
