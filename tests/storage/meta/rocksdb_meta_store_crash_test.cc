// What the store promises about the end of its process and about a full disk.
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/rocksdb_meta_store.h"
#include "tests/storage/base/scratch_folder.h"
#include "tests/storage/meta/child_process.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRowBytes = 700;

RocksDbMetaStoreOptions SmallBuffers() {
  RocksDbMetaStoreOptions options;
  options.write_buffer_bytes = std::size_t{256} << 10;
  return options;
}

std::string Key(std::uint64_t n) {
  return TenantPrefix(kBuiltInTenant) + absl::StrFormat("%08d", n);
}

std::string Value(std::uint64_t n, std::size_t bytes = kRowBytes) {
  std::mt19937_64 random(n);
  std::string value(bytes, '\0');
  for (char& byte : value) byte = static_cast<char>(random());
  return value;
}

// One row in each of two tables, so that half of a batch would show.
MetaBatch BatchOf(std::uint64_t n) {
  MetaBatch batch(kBuiltInTenant);
  batch.Put(MetaTable::kNodes, Key(n), Value(n));
  batch.Put(MetaTable::kPins, Key(n), Value(n));
  return batch;
}

// How many batches are there; fails the test unless they are 0, 1, ... without a gap, whole and
// right.
std::uint64_t BatchCount(const MetaStore& store) {
  std::uint64_t counts[2] = {0, 0};
  const MetaTable tables[2] = {MetaTable::kNodes, MetaTable::kPins};
  for (int i = 0; i < 2; ++i) {
    std::uint64_t& count = counts[i];
    const absl::Status status = store.Scan(
        tables[i], {}, {}, [&count](std::string_view row_key, std::string_view row_value) {
          EXPECT_EQ(row_key, Key(count));
          EXPECT_EQ(row_value, Value(count));
          ++count;
          return true;
        });
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(counts[0], counts[1]);
  return counts[0];
}

// Writes batches on and on, and each one's number once it is acknowledged.
const ChildRole kWriter("writer", [](const std::string& folder, int output) {
  auto opened = OpenRocksDbMetaStore(folder, SmallBuffers());
  if (!opened.ok()) return 1;
  for (std::uint64_t n = BatchCount(*opened->store);; ++n) {
    if (!opened->store->Write(BatchOf(n)).ok()) return 1;
    if (n % 64 == 63 && !opened->store->Sync().ok()) return 1;
    if (::write(output, &n, sizeof n) != sizeof n) return 1;
  }
});

TEST(RocksDbMetaStoreCrashTest, EveryAcknowledgedBatchSurvivesKill) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const ScratchFolder temp;
  const std::string folder = temp / "meta";

  std::uint64_t acknowledged = 0;
  for (int round = 0; round < 20; ++round) {
    ChildProcess child("writer", folder);
    std::uint64_t n = 0;
    for (std::uint64_t left = 1 + random() % 400; left > 0 && child.Read(&n, sizeof n); --left) {
      acknowledged = n + 1;
    }
    child.Kill();
    while (child.Read(&n, sizeof n)) acknowledged = n + 1;
    ASSERT_EQ(child.ExitStatus(), -1) << "the writer gave up by itself";

    const auto opened = OpenRocksDbMetaStore(folder, SmallBuffers());
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->report.lost_batches, 0u);
    EXPECT_FALSE(opened->report.log_truncated);
    EXPECT_FALSE(opened->report.recreated);
    // One more may have been written and not acknowledged yet.
    const std::uint64_t count = BatchCount(*opened->store);
    ASSERT_GE(count, acknowledged);
    ASSERT_LE(count, acknowledged + 1);
    acknowledged = count;
  }
}

constexpr int kCannotMount = 77;

int Fail(const absl::Status& status, const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  return 1;
}

// Fills a small file system of its own (which goes with the process), makes room, and goes on.
// `argument`: bytes of write buffers | folder.
int FillTheDisk(const std::string& argument, int /*output*/) {
  const std::size_t separator = argument.find('|');
  RocksDbMetaStoreOptions options;
  options.write_buffer_bytes = std::stoul(argument.substr(0, separator));
  const std::string mount_point = argument.substr(separator + 1);
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", mount_point.c_str(), "tmpfs", 0, "size=32m") != 0) {
    return kCannotMount;
  }
  const std::string folder = mount_point + "/meta";
  const std::string ballast = mount_point + "/ballast";
  std::ofstream(ballast) << std::string(std::size_t{20} << 20, 'b');

  auto opened = OpenRocksDbMetaStore(folder, options);
  if (!opened.ok()) return Fail(opened.status(), "open");
  MetaStore* store = opened->store.get();
  const auto write = [&store](std::uint64_t n) {
    MetaBatch batch(kBuiltInTenant);
    batch.Put(MetaTable::kNodes, Key(n), Value(n, 50'000));
    return store->Write(batch);
  };
  std::uint64_t count = 0;
  absl::Status status;
  for (int times_full = 0; times_full < 2; ++times_full) {
    while ((status = write(count)).ok()) ++count;
    if (!absl::IsResourceExhausted(status)) return Fail(status, "write to a full disk");
    // Reading goes on, and so does saying that the disk is full, whatever is called meanwhile.
    for (int i = 0; i < 3; ++i) {
      store->Sync().IgnoreError();
      status = write(count);
      // A flush that ends meanwhile gives the space of a log back.
      if (status.ok()) ++count;
      if (!status.ok() && !absl::IsResourceExhausted(status)) {
        return Fail(status, "write to a full disk");
      }
      const auto row_value = store->Get(MetaTable::kNodes, Key(count / 2));
      if (!row_value.ok() || *row_value != Value(count / 2, 50'000)) {
        return Fail(row_value.status(), "get from a full disk");
      }
    }

    // The first time the store goes on, the second time it is closed as it is.
    if (times_full == 0) {
      std::ofstream(ballast) << std::string(std::size_t{8} << 20, 'b');
      // A flush that has failed holds its successor back for a second.
      for (int i = 0; i < 3 && !(status = write(count)).ok(); ++i) continue;
      if (!status.ok()) return Fail(status, "write after space was made");
      ++count;
      if (status = store->Sync(); !status.ok()) return Fail(status, "sync after space was made");
    }
  }

  // With the largest buffers the log is larger than what is free then, and stays where it is.
  opened->store.reset();
  std::ofstream(ballast, std::ios::trunc).close();
  opened = OpenRocksDbMetaStore(folder, options);
  if (!opened.ok()) return Fail(opened.status(), "open again");
  if (opened->report.lost_batches != 0 || opened->report.recreated) {
    return Fail(absl::DataLossError(absl::StrJoin(opened->report.notes, "; ")), "open again");
  }
  std::uint64_t rows = 0;
  status = opened->store->Scan(MetaTable::kNodes, {}, {},
                               [&rows](std::string_view row_key, std::string_view row_value) {
                                 if (row_key != Key(rows) || row_value != Value(rows, 50'000)) {
                                   return false;
                                 }
                                 ++rows;
                                 return true;
                               });
  if (!status.ok()) return Fail(status, "scan");
  if (rows != count) {
    return Fail(absl::DataLossError(absl::StrCat(rows, " of ", count, " rows")), "scan");
  }
  return 0;
}
const ChildRole kDiskFiller("disk filler", &FillTheDisk);

class FullDiskTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(FullDiskTest, WritesWorkAgainOnceThereIsSpace) {
  const ScratchFolder folder;
  ChildProcess child("disk filler", absl::StrCat(GetParam(), "|", folder.path()));
  const int status = child.ExitStatus();
  if (status == kCannotMount) GTEST_SKIP() << "may not mount a tmpfs";
  EXPECT_EQ(status, 0);
}

// The size of the buffers decides whether the log, a flush or a compaction finds the disk full.
INSTANTIATE_TEST_SUITE_P(WriteBuffers, FullDiskTest,
                         ::testing::Values(std::size_t{1} << 20, std::size_t{3} << 20,
                                           std::size_t{8} << 20, std::size_t{64} << 20));

}  // namespace
}  // namespace kvtrie
