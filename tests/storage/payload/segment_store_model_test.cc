// Random operations, crashes and damage against a map of what the store was told. The store may
// lose what was not synced and what was damaged; it may never return other bytes.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "storage/payload/segment_store.h"
#include "tests/storage/base/faulty_file_system.h"
#include "tests/storage/payload/payload_test_support.h"

namespace kvtrie {
namespace {

constexpr char kFolder[] = "data";
constexpr std::uint64_t kPage = PayloadLocation::kPageBytes;
constexpr std::uint64_t kUnit = PayloadLocation::kUnitBytes;

// KV_TEST_ROUNDS makes a long run of the same tests.
std::uint64_t Rounds(std::uint64_t usual) {
  const char* const text = std::getenv("KV_TEST_ROUNDS");
  return text == nullptr ? usual : std::strtoull(text, nullptr, 10);
}

class Model {
 public:
  explicit Model(std::uint64_t seed) : random_(seed) {
    options_.segment_bytes = (2 + random_() % 60) * kPage;
    options_.allocate_ahead_bytes = (1 + random_() % 30) * kPage;
    punches_holes_ = random_() % 4 != 0;
    files_.SetPunchesHoles(punches_holes_);
    files_.SetAllocates(random_() % 4 != 0);
    files_.SetDirect(random_() % 4 != 0);
    Open();
  }

  void Step() {
    switch (random_() % 32) {
      default:
        Append();
        break;
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
        Free();
        break;
      case 6:
      case 7:
      case 8:
      case 9:
        CheckOne();
        break;
      case 10:
        Sync();
        break;
      case 11:
        store_.reset();
        Open();
        break;
      case 12:
        files_.KillProcess();
        Open();
        break;
      case 13:
        files_.LosePower(random_);
        Open();
        break;
      case 14:
        files_.TearWrites(1);
        Append();
        files_.TearWrites(0);
        break;
      case 15:
        files_.SetReadOnly(true);
        Append();
        CheckOne();
        files_.SetReadOnly(false);
        break;
      case 16:
        files_.SetCapacity(files_.AllocatedBytes() + random_() % 8 * kPage);
        for (int i = 0; i < 4; ++i) Append();
        files_.SetCapacity(FaultyFileSystem::kNoLimit);
        break;
    }
  }

  // Every record that must be there is; nothing else reads as anything but its own bytes.
  void CheckAll() {
    std::uint64_t live_bytes = 0;
    for (const auto& [at, record] : live_) {
      live_bytes += at.disk_bytes();
      Check(at, record.seed, /*required=*/true);
    }
    ASSERT_EQ(store_->Usage().live_bytes, live_bytes);
    for (const auto& [at, seed] : gone_) Check(at, seed, /*required=*/false);
    // Failed writes may have left something behind that is counted at the next sync.
    Sync();
    ASSERT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  }

  void CloseAndDamage() {
    store_.reset();
    auto names = files_.List(kFolder);
    ASSERT_TRUE(names.ok());
    files_.FlipBit(absl::StrCat(kFolder, "/", (*names)[random_() % names->size()]), random_);
    damaged_ = true;
    Open();
  }

  std::size_t live_count() const { return live_.size(); }

 private:
  struct Record {
    std::uint64_t seed = 0;
    bool synced = false;
  };

  static std::size_t BytesOf(std::uint64_t seed) {
    return 1 + seed * 7919 % (seed % 5 == 0 ? 40 * kPage : seed % 2 == 0 ? 3 * kPage : kPage);
  }

  // Pages that hold a part of a live record.
  std::set<std::pair<std::uint32_t, std::uint64_t>> LivePages() const {
    std::set<std::pair<std::uint32_t, std::uint64_t>> pages;
    for (const auto& [at, record] : live_) {
      const std::uint64_t end = at.offset_units * kUnit + at.record_bytes;
      for (std::uint64_t page = at.offset_units * kUnit / kPage; page * kPage < end; ++page) {
        pages.emplace(at.segment, page);
      }
    }
    return pages;
  }

  void Append() {
    const std::uint64_t count = random_() % 2 == 0 ? 1 : 1 + random_() % 12;
    const std::uint64_t first_seed = last_seed_ + 1;
    std::vector<PayloadRecord> records;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t seed = ++last_seed_;
      records.push_back(MakeRecord(RandomText(seed, BytesOf(seed)), std::to_string(seed)));
    }
    const auto places = AppendAll(*store_, records);
    if (!places.ok()) {
      ASSERT_TRUE(absl::IsUnavailable(places.status()) ||
                  absl::IsResourceExhausted(places.status()))
          << places.status();
      return;
    }
    ASSERT_EQ(places->size(), count);
    for (std::uint64_t i = 0; i < count; ++i) {
      ASSERT_TRUE(live_.emplace((*places)[i], Record{first_seed + i, false}).second);
      gone_.erase((*places)[i]);
    }
  }

  PayloadLocation Any() {
    auto any = live_.begin();
    std::advance(any, static_cast<std::ptrdiff_t>(random_() % live_.size()));
    return any->first;
  }

  void Free() {
    if (live_.empty()) return;
    const PayloadLocation at = Any();
    store_->Free(at);
    gone_[at] = live_.at(at).seed;
    live_.erase(at);
  }

  void CheckOne() {
    if (live_.empty()) return;
    const PayloadLocation at = Any();
    Check(at, live_.at(at).seed, /*required=*/true);
  }

  void Sync() {
    ASSERT_TRUE(store_->Sync().ok());
    for (auto& [at, record] : live_) record.synced = true;
  }

  void Check(const PayloadLocation& at, std::uint64_t seed, bool required) {
    const auto bytes = store_->Read(at);
    if (bytes.ok()) {
      ASSERT_EQ(TextOf(*bytes), RandomText(seed, BytesOf(seed)))
          << at.segment << ":" << at.offset_units;
    } else {
      ASSERT_TRUE(absl::IsDataLoss(bytes.status())) << bytes.status();
      ASSERT_FALSE(required && !damaged_) << bytes.status();
    }
  }

  // Opens what is on disk; the map is the metadata, and survives.
  void Open() {
    store_.reset();
    auto store = OpenSegmentStore(files_, kFolder, options_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);

    // What a scan finds is what was written, and every synced record is among it.
    std::map<PayloadLocation, std::string> found;
    ASSERT_TRUE(store_
                    ->Scan([&](const PayloadLocation& at, std::string_view descriptor) {
                      found.emplace(at, descriptor);
                    })
                    .ok());
    for (const auto& [at, record] : live_) {
      const auto one = found.find(at);
      if (one != found.end()) {
        ASSERT_EQ(one->second, std::to_string(record.seed));
      } else {
        ASSERT_FALSE(record.synced && !damaged_) << at.segment << ":" << at.offset_units;
      }
    }

    std::vector<PayloadLocation> lost;
    for (const auto& [at, record] : live_) {
      const absl::Status status = store_->MarkLive(at);
      if (!status.ok()) {
        ASSERT_TRUE(absl::IsNotFound(status)) << status;
        ASSERT_FALSE(record.synced);
        lost.push_back(at);
      }
    }
    ASSERT_TRUE(store_->FinishRecovery().ok());
    for (const PayloadLocation& at : lost) live_.erase(at);
    if (punches_holes_) {
      // Beside what lives: STORE, and the first page of each segment. Less where power was lost.
      ASSERT_LE(files_.AllocatedBytes(),
                (1 + store_->Usage().segment_count + LivePages().size()) * kPage);
    }
    lost.clear();
    for (const auto& [at, record] : live_) {
      Check(at, record.seed, record.synced);
      if (!store_->Read(at).ok()) lost.push_back(at);
    }
    for (const PayloadLocation& at : lost) {
      store_->Free(at);
      live_.erase(at);
    }
  }

  std::mt19937_64 random_;
  FaultyFileSystem files_;
  SegmentStoreOptions options_;
  std::unique_ptr<PayloadStore> store_;
  std::map<PayloadLocation, Record> live_;
  std::map<PayloadLocation, std::uint64_t> gone_;  // freed
  std::uint64_t last_seed_ = 0;
  bool damaged_ = false;
  bool punches_holes_ = false;
};

TEST(SegmentStoreModelTest, KeepsEverySyncedRecordThroughCrashes) {
  for (std::uint64_t seed = 0; seed < Rounds(30); ++seed) {
    SCOPED_TRACE(seed);
    Model model(seed);
    for (int step = 0; step < 400; ++step) {
      model.Step();
      if (step % 50 == 49) model.CheckAll();
      ASSERT_FALSE(::testing::Test::HasFatalFailure()) << "step " << step;
    }
    EXPECT_GT(model.live_count(), 0u);
  }
}

TEST(SegmentStoreModelTest, DamageIsNeverServed) {
  for (std::uint64_t seed = 0; seed < Rounds(60); ++seed) {
    SCOPED_TRACE(seed);
    Model model(seed);
    for (int step = 0; step < 60; ++step) model.Step();
    for (int flip = 0; flip < 20; ++flip) {
      model.CloseAndDamage();
      ASSERT_FALSE(::testing::Test::HasFatalFailure()) << "flip " << flip;
    }
  }
}

}  // namespace
}  // namespace kvtrie
