#include "storage/meta/rocksdb_log.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "gtest/gtest.h"
#include "rocksdb/env.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {
namespace {

std::string Content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(RocksDbLogTest, KeepsWarningsAndDropsTheRest) {
  const ScratchFolder folder;
  const auto log = OpenRocksDbLog(folder.path());
  rocksdb::Info(log, "all is well");
  rocksdb::Warn(log, "file %d is %s", 7, "odd");
  rocksdb::Error(log, "%s", std::string(5000, 'x').c_str());
  const std::string content = Content(folder / "LOG");
  EXPECT_NE(content.find("file 7 is odd"), std::string::npos);
  EXPECT_NE(content.find("xxx"), std::string::npos);
  EXPECT_EQ(content.find("all is well"), std::string::npos);
}

TEST(RocksDbLogTest, TakesNoMoreThanTwoFiles) {
  const ScratchFolder folder;
  const auto log = OpenRocksDbLog(folder.path());
  const std::string line(1000, 'x');
  for (int i = 0; i < 5000; ++i) rocksdb::Warn(log, "%s", line.c_str());
  std::uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    bytes += entry.file_size();
  }
  EXPECT_LE(bytes, std::uintmax_t{2} << 20);
}

TEST(RocksDbLogTest, FolderThatTakesNoFileIsNoReasonToFail) {
  const auto log = OpenRocksDbLog("/proc/no/such/folder");
  rocksdb::Warn(log, "into the void");
}

}  // namespace
}  // namespace kvtrie
