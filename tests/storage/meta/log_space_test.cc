#include "storage/meta/log_space.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {
namespace {

rocksdb::Status MakeFile(const std::string& path) {
  std::unique_ptr<rocksdb::WritableFile> file;
  return EnvWithLogSpace()->NewWritableFile(path, &file, rocksdb::EnvOptions());
}

std::uint64_t AllocatedBytes(const std::string& path) {
  struct stat status;
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

TEST(LogSpaceTest, LogsHaveRoomFromTheBeginningAndOtherFilesNone) {
  const ScratchFolder folder;
  ASSERT_TRUE(MakeFile(folder / "000001.log").ok());
  ASSERT_TRUE(MakeFile(folder / "000002.sst").ok());
  EXPECT_EQ(std::filesystem::file_size(folder / "000001.log"), 0u);
  EXPECT_GE(AllocatedBytes(folder / "000001.log"), 256u << 10);
  EXPECT_EQ(AllocatedBytes(folder / "000002.sst"), 0u);
}

TEST(LogSpaceTest, NoLogIsMadeOnAFullDisk) {
  constexpr int kCannotMount = 77;
  const ScratchFolder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // A file system of its own, which goes with the process.
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.path().c_str(), "tmpfs", 0, "size=128k") != 0) {
      ::_exit(kCannotMount);
    }
    const rocksdb::Status status = MakeFile(folder / "000001.log");
    ::_exit(status.IsNoSpace() && !std::filesystem::exists(folder / "000001.log") ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kCannotMount) GTEST_SKIP() << "may not mount a tmpfs";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace kvtrie
