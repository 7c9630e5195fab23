// Many threads on one store, on the machine's own file system.

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "storage/base/file_system.h"
#include "storage/payload/segment_store.h"
#include "tests/storage/base/scratch_folder.h"
#include "tests/storage/payload/payload_test_support.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kPage = PayloadLocation::kPageBytes;

struct Written {
  PayloadLocation at;
  std::uint64_t seed = 0;
};

std::size_t BytesOf(std::uint64_t seed) {
  return 1 + seed * 7919 % (seed % 4 == 0 ? 12 * kPage : kPage);
}

// Records that were appended and not freed; those that were freed lately are kept to be read late.
class Board {
 public:
  void Add(const Written& record) {
    absl::MutexLock lock(&mutex_);
    live_.push_back(record);
  }
  std::optional<Written> Any(std::uint64_t random) {
    absl::MutexLock lock(&mutex_);
    if (live_.empty()) return std::nullopt;
    return live_[random % live_.size()];
  }
  // One of the older ones.
  std::optional<Written> TakeOld(std::uint64_t random) {
    absl::MutexLock lock(&mutex_);
    if (live_.size() < 40) return std::nullopt;
    std::swap(live_[random % 20], live_.front());
    const Written old = live_.front();
    live_.pop_front();
    return old;
  }
  std::deque<Written> live() const {
    absl::MutexLock lock(&mutex_);
    return live_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::deque<Written> live_ ABSL_GUARDED_BY(mutex_);
};

TEST(SegmentStoreParallelTest, ReadersSeeWholeRecordsOrNothing) {
  ScratchFolder folder;
  SegmentStoreOptions options;
  options.segment_bytes = 64 * kPage;
  options.allocate_ahead_bytes = 16 * kPage;
  auto store = OpenEmpty(PosixFileSystem(), folder.path(), options);
  Board board;
  constexpr std::uint64_t kAppends = 400;
  constexpr std::uint64_t kAppenders = 2;
  constexpr std::uint64_t kGroupMax = 9;
  std::atomic<std::uint64_t> appenders = kAppenders;
  std::atomic<int> wrong = 0;
  std::atomic<int> failed = 0;

  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < kAppenders; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t i = 0; i < kAppends; ++i) {
        const std::uint64_t first_seed = (i * kAppenders + thread) * kGroupMax;
        std::vector<PayloadRecord> records;
        for (std::uint64_t seed = first_seed; seed <= first_seed + i % kGroupMax; ++seed) {
          records.push_back(MakeRecord(RandomText(seed, BytesOf(seed))));
        }
        const auto places = AppendAll(*store, records);
        if (!places.ok()) {
          ++failed;
          continue;
        }
        for (std::size_t k = 0; k < places->size(); ++k) {
          board.Add({(*places)[k], first_seed + k});
        }
      }
      --appenders;
    });
  }
  for (std::uint64_t thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      while (appenders > 0) {
        const auto record = board.Any(random());
        if (!record) continue;
        const auto bytes = store->Read(record->at);
        // It may be freed at this moment.
        if (bytes.ok() ? TextOf(*bytes) != RandomText(record->seed, BytesOf(record->seed))
                       : !absl::IsDataLoss(bytes.status())) {
          ++wrong;
        }
      }
    });
  }
  // Two, that often free neighbours at the same time.
  for (std::uint64_t thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      while (appenders > 0) {
        if (const auto record = board.TakeOld(random())) store->Free(record->at);
      }
    });
  }
  threads.emplace_back([&] {
    while (appenders > 0) {
      if (!store->Sync().ok()) ++failed;
    }
  });
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(failed, 0);
  std::uint64_t live_bytes = 0;
  for (const Written& record : board.live()) {
    live_bytes += record.at.disk_bytes();
    const auto bytes = store->Read(record.at);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(TextOf(*bytes), RandomText(record.seed, BytesOf(record.seed)));
  }
  EXPECT_EQ(store->Usage().live_bytes, live_bytes);

  std::uint64_t allocated_bytes = 0;
  ASSERT_TRUE(store->Sync().ok());
  const std::vector<std::string> names = PosixFileSystem().List(folder.path()).value();
  for (const std::string& name : names) {
    const auto file = PosixFileSystem().Open(folder.path() + "/" + name,
                                             FileSystem::Mode::kReadOnly, /*direct=*/false);
    allocated_bytes += (*file)->AllocatedBytes().value();
  }
  EXPECT_EQ(store->Usage().disk_bytes, allocated_bytes);
}

}  // namespace
}  // namespace kvtrie
