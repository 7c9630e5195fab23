#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "storage/base/byte_reader.h"
#include "storage/base/file_system.h"
#include "storage/base/shared_bytes.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {
namespace {

using ::testing::UnorderedElementsAre;
using Mode = FileSystem::Mode;

constexpr std::uint64_t kPage = AlignedBuffer::kAlignment;

// Runs on the folder of temporary files and, where there is one, on a tmpfs, which has no direct
// I/O.
class PosixFileSystemTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!GetParam().empty() && !std::filesystem::exists(GetParam())) {
      GTEST_SKIP() << "no " << GetParam();
    }
    ASSERT_FALSE(folder_.path().empty());
  }

  std::unique_ptr<File> Create(const std::string& name) {
    auto file = files_.Open(folder_.path() + "/" + name, Mode::kCreateNew, /*direct=*/true);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  AlignedBuffer Pages(std::size_t count, char fill) {
    AlignedBuffer buffer(count * kPage);
    std::fill_n(buffer.data(), buffer.size(), static_cast<std::byte>(fill));
    return buffer;
  }

  std::string ReadText(File& file, std::uint64_t offset, std::size_t bytes) {
    AlignedBuffer buffer(bytes);
    const auto count = file.Read(offset, {buffer.data(), buffer.size()});
    EXPECT_TRUE(count.ok()) << count.status();
    return std::string(AsText({buffer.data(), std::min(bytes, count.value_or(0))}));
  }

  FileSystem& files_ = PosixFileSystem();
  ScratchFolder folder_{GetParam().empty() ? testing::TempDir() : GetParam()};
};

TEST_P(PosixFileSystemTest, ReadsWhatWasWritten) {
  const auto file = Create("a");
  const AlignedBuffer pages = Pages(3, 'x');
  ASSERT_TRUE(file->Write(kPage, {pages.data(), pages.size()}).ok());
  EXPECT_EQ(file->Size().value(), 4 * kPage);
  EXPECT_EQ(ReadText(*file, 2 * kPage, kPage), std::string(kPage, 'x'));
  EXPECT_EQ(ReadText(*file, 0, kPage), std::string(kPage, '\0'));
  ASSERT_TRUE(file->SyncData().ok());
}

TEST_P(PosixFileSystemTest, ReadStopsAtTheEndOfTheFile) {
  const auto file = Create("a");
  const AlignedBuffer pages = Pages(2, 'x');
  ASSERT_TRUE(file->Write(0, {pages.data(), pages.size()}).ok());
  ASSERT_TRUE(file->Truncate(kPage + 100).ok());
  EXPECT_EQ(ReadText(*file, 0, 8 * kPage), std::string(kPage + 100, 'x'));
  EXPECT_EQ(ReadText(*file, 8 * kPage, kPage), "");
}

TEST_P(PosixFileSystemTest, AllocatedPagesCountAndReadAsZeros) {
  const auto file = Create("a");
  ASSERT_TRUE(file->Allocate(0, 64 * kPage).ok());
  EXPECT_EQ(file->AllocatedBytes().value(), 64 * kPage);
  EXPECT_EQ(file->Size().value(), 64 * kPage);
  EXPECT_EQ(ReadText(*file, 5 * kPage, kPage), std::string(kPage, '\0'));
}

TEST_P(PosixFileSystemTest, HolesGiveTheirPagesBack) {
  const auto file = Create("a");
  const AlignedBuffer pages = Pages(8, 'x');
  ASSERT_TRUE(file->Write(0, {pages.data(), pages.size()}).ok());
  ASSERT_TRUE(file->SyncData().ok());
  const absl::Status status = file->PunchHole(2 * kPage, 3 * kPage);
  if (absl::IsUnimplemented(status)) GTEST_SKIP() << status;
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(file->AllocatedBytes().value(), 5 * kPage);
  EXPECT_EQ(file->Size().value(), 8 * kPage);
  EXPECT_EQ(ReadText(*file, kPage, 5 * kPage),
            std::string(kPage, 'x') + std::string(3 * kPage, '\0') + std::string(kPage, 'x'));
}

TEST_P(PosixFileSystemTest, NextDataSkipsHoles) {
  const auto file = Create("a");
  const AlignedBuffer page = Pages(1, 'x');
  ASSERT_TRUE(file->Write(5 * kPage, {page.data(), page.size()}).ok());
  ASSERT_TRUE(file->Allocate(6 * kPage, 10 * kPage).ok());
  EXPECT_EQ(file->NextData(0).value(), 5 * kPage);
  EXPECT_EQ(file->NextData(5 * kPage).value(), 5 * kPage);
  // What is only allocated may count as data.
  EXPECT_GE(file->NextData(6 * kPage).value(), 6 * kPage);
  EXPECT_EQ(file->NextData(16 * kPage).value(), 16 * kPage);
}

// More pieces than the system takes in one call.
TEST_P(PosixFileSystemTest, PiecesAreWrittenBehindEachOther) {
  constexpr std::size_t kPieces = 3200;
  AlignedBuffer memory(kPieces * kPage);
  std::vector<std::span<const std::byte>> pieces;
  std::string all;
  for (std::size_t i = 0; i < kPieces; ++i) {
    const std::size_t bytes = 512 * (1 + i % 8);
    std::byte* const at = memory.data() + i * kPage;
    std::fill_n(at, bytes, static_cast<std::byte>(i));
    pieces.emplace_back(at, bytes);
    all += AsText(pieces.back());
  }
  ASSERT_EQ(all.size() % kPage, 0u);
  auto file = Create("a");
  ASSERT_TRUE(file->WritePieces(kPage, pieces).ok());
  AlignedBuffer read(all.size());
  ASSERT_EQ(file->Read(kPage, {read.data(), read.size()}).value(), all.size());
  EXPECT_EQ(AsText({read.data(), all.size()}), all);
}

// As on a disk with large sectors: direct I/O goes on, with a copy.
TEST_P(PosixFileSystemTest, PiecesThatADeviceRefusesAreJoined) {
  AlignedBuffer memory(4 * kPage);
  std::fill_n(memory.data(), memory.size(), std::byte{7});
  auto file = Create("a");
  const bool direct = file->direct();
  for (int round = 0; round < 2; ++round) {
    const std::vector<std::span<const std::byte>> pieces = {{memory.data() + 1, kPage + 100},
                                                            {memory.data() + 9, kPage - 100}};
    ASSERT_TRUE(file->WritePieces(0, pieces).ok());
    EXPECT_EQ(file->direct(), direct);
    AlignedBuffer read(2 * kPage);
    ASSERT_EQ(file->Read(0, {read.data(), read.size()}).value(), 2 * kPage);
    EXPECT_EQ(AsText({read.data(), read.size()}), AsText({memory.data(), read.size()}));
  }
}

TEST_P(PosixFileSystemTest, CreateRefusesAnExistingFile) {
  Create("a");
  EXPECT_FALSE(files_.Open(folder_.path() + "/a", Mode::kCreateNew, true).ok());
  EXPECT_TRUE(files_.Open(folder_.path() + "/a", Mode::kReadWrite, true).ok());
}

TEST_P(PosixFileSystemTest, WhatIsNotThereIsNotFound) {
  const std::string path = folder_.path() + "/nothing";
  EXPECT_TRUE(absl::IsNotFound(files_.Open(path, Mode::kReadWrite, true).status()));
  EXPECT_TRUE(absl::IsNotFound(files_.Open(path, Mode::kReadOnly, false).status()));
  EXPECT_TRUE(absl::IsNotFound(files_.Remove(path)));
  EXPECT_FALSE(files_.List(path).ok());
}

TEST_P(PosixFileSystemTest, WritingToAReadOnlyFileIsUnavailable) {
  Create("a");
  auto file = files_.Open(folder_.path() + "/a", Mode::kReadOnly, true);
  ASSERT_TRUE(file.ok());
  const AlignedBuffer page = Pages(1, 'x');
  EXPECT_TRUE(absl::IsUnavailable((*file)->Write(0, {page.data(), page.size()})));
}

TEST_P(PosixFileSystemTest, FolderHoldsWhatWasCreatedRenamedAndNotRemoved) {
  const std::string folder = folder_.path() + "/deep/er";
  ASSERT_TRUE(files_.CreateFolder(folder).ok());
  ASSERT_TRUE(files_.CreateFolder(folder).ok());
  for (const char* name : {"/a", "/b", "/c"}) {
    ASSERT_TRUE(files_.Open(folder + name, Mode::kCreateNew, false).ok());
  }
  ASSERT_TRUE(files_.Rename(folder + "/a", folder + "/d").ok());
  ASSERT_TRUE(files_.Remove(folder + "/b").ok());
  ASSERT_TRUE(files_.SyncFolder(folder).ok());
  EXPECT_THAT(files_.List(folder).value(), UnorderedElementsAre("c", "d"));
}

TEST_P(PosixFileSystemTest, FolderUnderAFileIsRefused) {
  Create("a");
  EXPECT_FALSE(files_.CreateFolder(folder_.path() + "/a").ok());
  EXPECT_FALSE(files_.CreateFolder(folder_.path() + "/a/b").ok());
}

// A device that is always full.
TEST(PosixFileSystemErrorTest, FullDeviceIsResourceExhausted) {
  auto file = PosixFileSystem().Open("/dev/full", Mode::kReadWrite, /*direct=*/false);
  if (!file.ok()) GTEST_SKIP() << file.status();
  EXPECT_TRUE(absl::IsResourceExhausted((*file)->Write(0, AsBytes("x"))));
}

INSTANTIATE_TEST_SUITE_P(Folders, PosixFileSystemTest, ::testing::Values("", "/dev/shm"),
                         [](const auto& instance) {
                           return instance.param.empty() ? "TempDir" : "SharedMemory";
                         });

}  // namespace
}  // namespace kvtrie
