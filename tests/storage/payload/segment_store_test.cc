#include "storage/payload/segment_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "storage/base/file_system.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/base/faulty_file_system.h"
#include "tests/storage/base/scratch_folder.h"
#include "tests/storage/payload/payload_test_support.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

constexpr std::uint64_t kPage = PayloadLocation::kPageBytes;
constexpr std::uint64_t kUnit = PayloadLocation::kUnitBytes;
constexpr char kFolder[] = "data";

SegmentStoreOptions SmallSegments() {
  SegmentStoreOptions options;
  options.segment_bytes = 64 * kPage;
  options.allocate_ahead_bytes = 16 * kPage;
  return options;
}

class SegmentStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { store_ = OpenEmpty(files_, kFolder, SmallSegments()); }

  PayloadLocation Put(const std::string& payload, const std::string& descriptor = "d") {
    auto record = MakeRecord(payload, descriptor);
    const auto at = store_->Append(record);
    EXPECT_TRUE(at.ok()) << at.status();
    return at.value_or(PayloadLocation{});
  }

  std::string Get(const PayloadLocation& at) {
    const auto bytes = store_->Read(at);
    return bytes.ok() ? TextOf(*bytes) : std::string(bytes.status().ToString());
  }

  // Opens again with `live` named by the metadata.
  PayloadRecoveryStats Reopen(const std::vector<PayloadLocation>& live) {
    store_.reset();
    auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    for (const PayloadLocation& at : live) {
      EXPECT_TRUE(store_->MarkLive(at).ok()) << at.segment << ":" << at.offset_units;
    }
    auto stats = store_->FinishRecovery();
    EXPECT_TRUE(stats.ok()) << stats.status();
    return *std::move(stats);
  }

  // Records of so many bytes; record i holds RandomText(i, its bytes).
  static std::vector<PayloadRecord> Group(const std::vector<std::size_t>& sizes) {
    std::vector<PayloadRecord> records;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      records.push_back(MakeRecord(RandomText(i, sizes[i]), "d"));
    }
    return records;
  }
  std::vector<PayloadLocation> PutGroup(const std::vector<std::size_t>& sizes) {
    auto records = Group(sizes);
    const auto places = AppendAll(*store_, records);
    EXPECT_TRUE(places.ok()) << places.status();
    return places.value_or(std::vector<PayloadLocation>(sizes.size()));
  }
  // What record i of a group holds.
  static std::string TextOfGroup(std::size_t i, const std::vector<PayloadLocation>& places) {
    return RandomText(i, places[i].record_bytes - 128);
  }

  // What a scan finds; the store is closed.
  std::vector<PayloadLocation> Scanned() {
    store_.reset();
    auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
    EXPECT_TRUE(store.ok()) << store.status();
    std::vector<PayloadLocation> found;
    EXPECT_TRUE(
        (*store)
            ->Scan([&](const PayloadLocation& at, std::string_view) { found.push_back(at); })
            .ok());
    return found;
  }

  // A folder with segment 7, as a file of tests/golden has it, and nothing else.
  void InstallSegment(const std::string& golden) {
    store_.reset();
    for (const std::string& name : Files()) {
      ASSERT_TRUE(files_.Remove(absl::StrCat(kFolder, "/", name)).ok());
    }
    auto file = files_.Open("data/seg-00000007", FileSystem::Mode::kCreateNew, false);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE((*file)->Write(0, AsBytes(ReadGolden(golden))).ok());
  }

  static std::string SegmentPath(const PayloadLocation& at) {
    return absl::StrFormat("%s/seg-%08u", kFolder, at.segment);
  }

  std::vector<std::string> Files() {
    auto names = files_.List(kFolder);
    EXPECT_TRUE(names.ok());
    return *std::move(names);
  }

  FaultyFileSystem files_;
  std::unique_ptr<PayloadStore> store_;
};

TEST_F(SegmentStoreTest, ReadsWhatWasAppended) {
  std::map<std::string, PayloadLocation> places;
  for (const std::size_t bytes : {1u, 63u, 64u, 4000u, 4096u, 4097u, 40'000u, 100'000u}) {
    const std::string payload = RandomText(bytes, bytes);
    places[payload] = Put(payload);
  }
  for (const auto& [payload, at] : places) EXPECT_EQ(Get(at), payload);
}

TEST_F(SegmentStoreTest, ReadHandsTheDescriptorBack) {
  for (const std::size_t bytes : {0u, 1u, 64u, 16'384u}) {
    const std::string descriptor = RandomText(1, bytes);
    const auto payload = store_->Read(Put("payload", descriptor));
    ASSERT_TRUE(payload.ok()) << payload.status();
    EXPECT_EQ(AsText(payload->descriptor), descriptor);
    EXPECT_EQ(AsText(payload->view), "payload");
  }
}

TEST_F(SegmentStoreTest, KnownChecksumIsTakenOnTrustAndCheckedByReaders) {
  auto record = MakeRecord("payload");
  record.SetPayloadCrc32c(Crc32c(AsBytes("payload")));
  EXPECT_EQ(Get(store_->Append(record).value()), "payload");
  record.SetPayloadCrc32c(1);
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(store_->Append(record).value()).status()));
}

TEST_F(SegmentStoreTest, RecordLargerThanASegmentGetsItsOwn) {
  const auto before = Put("small");
  const std::string large = RandomText(1, 100 * kPage);
  const auto at = Put(large);
  const auto after = Put("small too");
  EXPECT_EQ(Get(at), large);
  EXPECT_NE(at.segment, before.segment);
  EXPECT_EQ(after.segment, before.segment);

  ASSERT_TRUE(store_->Sync().ok());
  store_->Free(at);
  EXPECT_THAT(Files(), UnorderedElementsAre("STORE", "seg-00000001", "seg-00000002"));
  const auto next = Put(RandomText(2, 100 * kPage));
  ASSERT_TRUE(store_->Sync().ok());
  EXPECT_THAT(Files(), UnorderedElementsAre("STORE", "seg-00000001", "seg-00000003"));
  EXPECT_EQ(next.segment, 3u);
}

TEST_F(SegmentStoreTest, LocationsThatNameNothingAreDataLoss) {
  const auto at = Put(RandomText(1, 10'000));
  std::vector<PayloadLocation> wrong(8, at);
  wrong[0].segment = 0;
  wrong[1].segment = 77;
  wrong[2].offset_units = 0;
  wrong[3].offset_units += 1;
  wrong[4].offset_units = 0xffffffff;
  wrong[5].record_bytes = 0;
  wrong[6].record_bytes -= 1;
  wrong[7].record_bytes = 0xffffffff;
  for (const auto& location : wrong) {
    const auto bytes = store_->Read(location);
    EXPECT_TRUE(absl::IsDataLoss(bytes.status())) << bytes.status();
  }
  EXPECT_EQ(Get(at), RandomText(1, 10'000));
}

TEST_F(SegmentStoreTest, FreeGivesSpaceBackAtOnceAndTheRecordIsGone) {
  const auto first = Put(RandomText(1, 5 * kPage));
  const auto second = Put(RandomText(2, 5 * kPage));
  const auto before = store_->Usage();
  store_->Free(first);
  const auto after = store_->Usage();
  EXPECT_EQ(before.disk_bytes - after.disk_bytes, 6 * kPage);
  EXPECT_EQ(before.live_bytes - after.live_bytes, first.disk_bytes());
  EXPECT_EQ(files_.AllocatedBytes(), after.disk_bytes);
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(first).status()));
  EXPECT_EQ(Get(second), RandomText(2, 5 * kPage));
}

// ---- Groups

TEST_F(SegmentStoreTest, RecordsOfAGroupLieBehindEachOther) {
  const auto places = PutGroup({5000, 100, 4096, 1, 20'000});
  std::uint64_t unit = kPage / kUnit;
  for (const PayloadLocation& at : places) {
    EXPECT_EQ(at.segment, 1u);
    EXPECT_EQ(at.offset_units, unit);
    unit += at.disk_bytes() / kUnit;
  }
  // The next write starts on a page of its own.
  const auto next = PutGroup({100, 100});
  EXPECT_EQ(next[0].offset_units, (unit + 7) / 8 * 8);
  EXPECT_EQ(next[1].offset_units, next[0].offset_units + 1);
  for (std::size_t i = 0; i < places.size(); ++i) EXPECT_EQ(Get(places[i]), TextOfGroup(i, places));
}

TEST_F(SegmentStoreTest, GroupOfSmallRecordsTakesHardlyMoreThanTheirBytes) {
  const auto places = PutGroup(std::vector<std::size_t>(100, 5000));
  Reopen(places);
  const std::uint64_t units = 100 * ((64 + 64 + 5000 + kUnit - 1) / kUnit);
  EXPECT_EQ(store_->Usage().live_bytes, units * kUnit);
  EXPECT_EQ(store_->Usage().disk_bytes, 2 * kPage + (units * kUnit + kPage - 1) / kPage * kPage);
}

TEST_F(SegmentStoreTest, LargestGroupIsOneWrite) {
  const auto places = PutGroup(std::vector<std::size_t>(PayloadStore::kGroupRecordsMax, 10));
  EXPECT_EQ(places.back().segment, places.front().segment);
  EXPECT_EQ(places.back().offset_units,
            places.front().offset_units + PayloadStore::kGroupRecordsMax - 1);
  EXPECT_EQ(Get(places[777]), TextOfGroup(777, places));
}

TEST_F(SegmentStoreTest, GroupLargerThanASegmentGetsItsOwn) {
  const auto before = PutGroup({100});
  const auto places = PutGroup(std::vector<std::size_t>(30, 10'000));
  EXPECT_NE(places.front().segment, before.front().segment);
  EXPECT_EQ(places.back().segment, places.front().segment);
  for (std::size_t i = 0; i < places.size(); ++i) EXPECT_EQ(Get(places[i]), TextOfGroup(i, places));
}

// In every order, the page comes back with its last record, once.
TEST_F(SegmentStoreTest, PageComesBackWithTheLastOfItsRecords) {
  std::vector<std::size_t> order(8);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    // Three units each: a record lies on one page or on two, and ends a page at the eighth.
    const auto places = PutGroup(std::vector<std::size_t>(8, 1400));
    std::set<std::size_t> left(order.begin(), order.end());
    for (const std::size_t i : order) {
      store_->Free(places[i]);
      left.erase(i);
      std::set<std::uint64_t> pages;
      for (const std::size_t other : left) {
        const std::uint64_t first = places[other].offset_units - places[0].offset_units;
        pages.insert({first / 8, (first + 2) / 8});
        ASSERT_EQ(Get(places[other]), TextOfGroup(other, places));
      }
      ASSERT_EQ(files_.BytesOfPages(SegmentPath(places[0]), places[0].offset_units * kUnit, 3),
                pages.size() * kPage);
      ASSERT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
    }
    EXPECT_EQ(store_->Usage().live_bytes, 0u);
  }
}

TEST_F(SegmentStoreTest, RecoveryFreesHalvesOfPages) {
  const auto places = PutGroup(std::vector<std::size_t>(64, 1400));  // 24 pages
  files_.KillProcess();
  // All but one of the first two pages, one in the middle, and nothing of the last ones.
  Reopen({places[1], places[30]});
  EXPECT_EQ(store_->Usage().live_bytes, 6 * kUnit);
  // [3, 6) lies on page 0, [90, 93) on page 11.
  EXPECT_EQ(store_->Usage().disk_bytes, 4 * kPage);
  EXPECT_EQ(files_.AllocatedBytes(), 4 * kPage);
  EXPECT_EQ(Get(places[1]), TextOfGroup(1, places));
  EXPECT_EQ(Get(places[30]), TextOfGroup(30, places));
  store_->Free(places[1]);
  EXPECT_EQ(files_.AllocatedBytes(), 3 * kPage);
}

TEST_F(SegmentStoreTest, DiskThatIsFullInTheMiddleOfAGroupKeepsNothingOfIt) {
  for (const bool allocates : {true, false}) {
    SCOPED_TRACE(allocates);
    files_.SetAllocates(allocates);
    const auto before = PutGroup({5000, 5000});
    Reopen(before);
    const auto usage = store_->Usage();
    files_.SetCapacity(files_.AllocatedBytes() + 8 * kPage);
    auto records = Group(std::vector<std::size_t>(16, 5000));
    EXPECT_TRUE(absl::IsResourceExhausted(AppendAll(*store_, records).status()));
    EXPECT_EQ(store_->Usage().live_bytes, usage.live_bytes);
    ASSERT_TRUE(store_->Sync().ok());
    EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
    EXPECT_LE(files_.AllocatedBytes(), usage.disk_bytes + kPage);
    // What there is room for goes in afterwards.
    std::vector<PayloadRecord> fewer;
    for (int i = 0; i < 4; ++i) fewer.push_back(std::move(records[static_cast<std::size_t>(i)]));
    const auto places = AppendAll(*store_, fewer);
    ASSERT_TRUE(places.ok()) << places.status();
    files_.SetCapacity(FaultyFileSystem::kNoLimit);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(Get((*places)[i]), RandomText(i, 5000));
    EXPECT_THAT(Scanned(), UnorderedElementsAreArray([&] {
                  auto all = *places;
                  all.insert(all.end(), before.begin(), before.end());
                  return all;
                }()));
    Reopen({});
  }
}

TEST_F(SegmentStoreTest, FailedWriteOfAGroupLeavesNothing) {
  const auto before = PutGroup({5000, 5000});
  files_.TearWrites(1);
  auto records = Group(std::vector<std::size_t>(16, 5000));
  EXPECT_TRUE(absl::IsUnavailable(AppendAll(*store_, records).status()));
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  const auto again = AppendAll(*store_, records);
  ASSERT_TRUE(again.ok()) << again.status();
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(Get((*again)[i]), RandomText(i, 5000));
  auto all = *again;
  all.insert(all.end(), before.begin(), before.end());
  EXPECT_THAT(Scanned(), UnorderedElementsAreArray(all));
}

// Whatever is torn in a loss of power lies on pages of its own.
TEST_F(SegmentStoreTest, TornGroupsDamageNoSyncedRecord) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::vector<PayloadLocation> synced;
    for (int group = 0; group < 4; ++group) {
      const auto places = PutGroup(std::vector<std::size_t>(1 + random() % 9, 700));
      synced.insert(synced.end(), places.begin(), places.end());
    }
    ASSERT_TRUE(store_->Sync().ok());
    for (int group = 0; group < 4; ++group) {
      PutGroup(std::vector<std::size_t>(1 + random() % 9, 700));
      // Half of a page's records; their page stays.
      const std::size_t at = random() % synced.size();
      store_->Free(synced[at]);
      synced.erase(synced.begin() + static_cast<std::ptrdiff_t>(at));
    }
    files_.LosePower(random);
    Reopen(synced);
    for (const PayloadLocation& at : synced) {
      EXPECT_TRUE(store_->Read(at).ok()) << at.segment << ":" << at.offset_units;
    }
    Reopen({});
  }
}

TEST_F(SegmentStoreTest, ScanFindsTheOtherRecordsOfADamagedGroup) {
  const auto places = PutGroup(std::vector<std::size_t>(9, 1000));
  store_.reset();
  auto file = files_.Open("data/seg-00000001", FileSystem::Mode::kReadWrite, false);
  for (const std::size_t i : {2u, 3u, 7u}) {
    ASSERT_TRUE((*file)->Write(places[i].offset_units * kUnit, AsBytes(RandomText(i, kUnit))).ok());
  }
  EXPECT_THAT(Scanned(),
              ElementsAre(places[0], places[1], places[4], places[5], places[6], places[8]));
}

// The heads of freed records stay on pages that they share with others.
TEST_F(SegmentStoreTest, ScanPassesFreedRecordsWhosePagesAreHoles) {
  const auto places = PutGroup({1000, 20'000, 1000, 20'000, 1000, 1000});
  store_->Free(places[1]);
  store_->Free(places[3]);
  EXPECT_THAT(Scanned(), ElementsAre(places[0], places[2], places[4], places[5]));
}

TEST_F(SegmentStoreTest, RecordsOfVersion1AreServedAndFreed) {
  const PayloadLocation old{7, 8, 1128};
  for (const bool scans : {false, true}) {
    SCOPED_TRACE(scans);
    InstallSegment("v1/record.bin");
    auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    if (scans) {
      std::vector<PayloadLocation> found;
      ASSERT_TRUE(store_
                      ->Scan([&](const PayloadLocation& at, std::string_view descriptor) {
                        EXPECT_EQ(descriptor, "golden descriptor");
                        found.push_back(at);
                      })
                      .ok());
      EXPECT_THAT(found, ElementsAre(old));
    }
    ASSERT_TRUE(store_->MarkLive(old).ok());
    ASSERT_TRUE(store_->FinishRecovery().ok());
    const auto payload = store_->Read(old);
    ASSERT_TRUE(payload.ok()) << payload.status();
    EXPECT_EQ(payload->view.size(), 1000u);
    EXPECT_EQ(AsText(payload->descriptor), "golden descriptor");
    // STORE, and the segment's two pages.
    EXPECT_EQ(files_.AllocatedBytes(), 3 * kPage);
    const auto next = Put("new");
    EXPECT_EQ(next.segment, 8u);
    store_->Free(old);
    ASSERT_TRUE(store_->Sync().ok());
    EXPECT_THAT(Files(), UnorderedElementsAre("STORE", "seg-00000008"));
    EXPECT_EQ(Get(next), "new");
    EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  }
}

TEST_F(SegmentStoreTest, GoldenGroupIsServed) {
  InstallSegment("v2/record.bin");
  const PayloadLocation first{7, 8, 1128};
  const PayloadLocation second{7, 11, 3128};
  EXPECT_THAT(Scanned(), ElementsAre(first, second));
  Reopen({first, second});
  EXPECT_EQ(store_->Read(first).value().view.size(), 1000u);
  EXPECT_EQ(store_->Read(second).value().view.size(), 3000u);
  store_->Free(first);
  EXPECT_EQ(store_->Read(second).value().view.size(), 3000u);
}

TEST_F(SegmentStoreTest, FreeingTwiceCountsOnce) {
  const auto first = Put(RandomText(1, 5 * kPage));
  Put(RandomText(2, 5 * kPage));
  store_->Free(first);
  const auto once = store_->Usage();
  store_->Free(first);
  EXPECT_EQ(store_->Usage().live_bytes, once.live_bytes);
  EXPECT_EQ(store_->Usage().disk_bytes, once.disk_bytes);
}

TEST_F(SegmentStoreTest, SegmentWithoutLiveRecordsIsUnlinked) {
  std::vector<PayloadLocation> places;
  while (places.empty() || places.back().segment < 3)
    places.push_back(Put(RandomText(1, 9 * kPage)));
  ASSERT_TRUE(store_->Sync().ok());
  for (const auto& at : places) {
    if (at.segment == 1) store_->Free(at);
  }
  EXPECT_THAT(Files(), UnorderedElementsAre("STORE", "seg-00000002", "seg-00000003"));
  EXPECT_EQ(store_->Usage().segment_count, 2u);
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
}

// A number that came back could give an old location a new meaning.
TEST_F(SegmentStoreTest, SegmentNumbersAreNeverUsedTwice) {
  std::set<std::pair<std::uint32_t, std::uint32_t>> starts;
  for (int round = 0; round < 6; ++round) {
    std::vector<PayloadLocation> places;
    for (int i = 0; i < 20; ++i) {
      places.push_back(Put(RandomText(1, 9 * kPage)));
      EXPECT_TRUE(starts.insert({places.back().segment, places.back().offset_units}).second);
    }
    if (round % 2 == 0) {
      ASSERT_TRUE(store_->Sync().ok());
    }
    for (const auto& at : places) store_->Free(at);
    if (round % 3 != 0) {
      ASSERT_TRUE(store_->Sync().ok());
    }
    Reopen({});
  }
}

TEST_F(SegmentStoreTest, DiskBytesIsWhatIsAllocated) {
  std::mt19937_64 random(1);
  std::vector<PayloadLocation> places;
  for (int i = 0; i < 500; ++i) {
    if (random() % 3 != 0 || places.empty()) {
      places.push_back(Put(RandomText(random(), 1 + random() % (12 * kPage))));
    } else {
      std::swap(places[random() % places.size()], places.back());
      store_->Free(places.back());
      places.pop_back();
    }
    if (i % 50 == 0) {
      ASSERT_TRUE(store_->Sync().ok());
    }
    ASSERT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  }
  std::uint64_t live_bytes = 0;
  for (const auto& at : places) live_bytes += at.disk_bytes();
  EXPECT_EQ(store_->Usage().live_bytes, live_bytes);
}

TEST_F(SegmentStoreTest, ReopenedStoreHoldsNothingBesideItsRecords) {
  std::vector<PayloadLocation> places;
  for (int i = 0; i < 30; ++i) places.push_back(Put(RandomText(1, 9 * kPage - 128)));
  const auto stats = Reopen(places);
  EXPECT_EQ(stats.unreferenced_bytes, 0u);
  EXPECT_THAT(stats.notes, IsEmpty());
  const auto usage = store_->Usage();
  EXPECT_EQ(usage.disk_bytes, usage.live_bytes + (usage.segment_count + 1) * kPage);
}

TEST_F(SegmentStoreTest, AppendsGoToANewSegmentAfterReopen) {
  const auto before = Put("before");
  Reopen({before});
  const auto after = Put("after");
  EXPECT_GT(after.segment, before.segment);
  EXPECT_EQ(Get(before), "before");
  EXPECT_EQ(Get(after), "after");
}

TEST_F(SegmentStoreTest, RecoveryFreesWhatNobodyNames) {
  std::vector<PayloadLocation> places;
  for (std::uint64_t i = 0; i < 40; ++i) places.push_back(Put(RandomText(i, 7 * kPage - 128)));
  files_.KillProcess();
  std::vector<PayloadLocation> live;
  for (std::size_t i = 0; i < places.size(); i += 3) live.push_back(places[i]);
  const auto stats = Reopen(live);
  EXPECT_GE(stats.unreferenced_bytes, (places.size() - live.size()) * places[0].disk_bytes());
  const auto usage = store_->Usage();
  EXPECT_EQ(usage.live_bytes, live.size() * places[0].disk_bytes());
  EXPECT_EQ(usage.disk_bytes, usage.live_bytes + (usage.segment_count + 1) * kPage);
  EXPECT_EQ(usage.disk_bytes, files_.AllocatedBytes());
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i % 3 == 0) {
      EXPECT_EQ(Get(places[i]), RandomText(i, 7 * kPage - 128));
    } else {
      EXPECT_TRUE(absl::IsDataLoss(store_->Read(places[i]).status()));
    }
  }
}

TEST_F(SegmentStoreTest, RecoveryUnlinksDeadSegments) {
  std::vector<PayloadLocation> places;
  for (std::uint64_t i = 0; i < 40; ++i) places.push_back(Put(RandomText(i, 7 * kPage)));
  const std::uint32_t newest = places.back().segment;
  ASSERT_GE(newest, 4u);
  Reopen({});
  EXPECT_THAT(Files(), UnorderedElementsAre("STORE", absl::StrCat("seg-0000000", newest)));
  EXPECT_EQ(store_->Usage().disk_bytes, 2 * kPage);
}

TEST_F(SegmentStoreTest, MarkLiveKnowsWhatExists) {
  const auto at = Put(RandomText(1, 3 * kPage));
  store_.reset();
  auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
  ASSERT_TRUE(store.ok());
  auto elsewhere = at;
  elsewhere.segment = 9;
  EXPECT_TRUE(absl::IsNotFound((*store)->MarkLive(elsewhere)));
  elsewhere = at;
  elsewhere.offset_units = 60 * 8;
  EXPECT_TRUE(absl::IsNotFound((*store)->MarkLive(elsewhere)));
  EXPECT_TRUE((*store)->MarkLive(at).ok());
  EXPECT_TRUE(absl::IsDataLoss((*store)->MarkLive(at)));
}

TEST_F(SegmentStoreTest, ScanFindsEachRecordWithItsDescriptor) {
  std::map<PayloadLocation, std::string> written;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const std::string descriptor = RandomText(i, i * 400);
    written[Put(RandomText(i, 1 + i * 1000), descriptor)] = descriptor;
  }
  const auto freed = written.begin()->first;
  store_->Free(freed);
  written.erase(freed);
  files_.KillProcess();
  store_.reset();

  auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
  ASSERT_TRUE(store.ok());
  std::map<PayloadLocation, std::string> found;
  ASSERT_TRUE((*store)
                  ->Scan([&](const PayloadLocation& at, std::string_view descriptor) {
                    EXPECT_TRUE(found.emplace(at, descriptor).second);
                  })
                  .ok());
  EXPECT_EQ(found, written);
}

TEST_F(SegmentStoreTest, ScanGoesOnBehindDamage) {
  std::vector<PayloadLocation> places;
  for (std::uint64_t i = 0; i < 5; ++i) places.push_back(Put(RandomText(i, 5 * kPage)));
  store_.reset();
  auto file = files_.Open("data/seg-00000001", FileSystem::Mode::kReadWrite, false);
  ASSERT_TRUE(file.ok());
  const std::string noise = RandomText(9, kPage);
  ASSERT_TRUE((*file)->Write(places[2].offset_units * kUnit, AsBytes(noise)).ok());

  auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
  ASSERT_TRUE(store.ok());
  std::vector<PayloadLocation> found;
  ASSERT_TRUE((*store)
                  ->Scan([&](const PayloadLocation& at, std::string_view) { found.push_back(at); })
                  .ok());
  EXPECT_THAT(found, ElementsAre(places[0], places[1], places[3], places[4]));
}

// A tenant may store bytes that look like a record.
TEST_F(SegmentStoreTest, ScanIgnoresRecordsInsideOfPayloads) {
  const auto inner = Put(RandomText(1, 2 * kPage));
  auto file = files_.Open("data/seg-00000001", FileSystem::Mode::kReadOnly, false);
  ASSERT_TRUE(file.ok());
  std::string image(inner.disk_bytes(), '\0');
  ASSERT_TRUE(
      (*file)->Read(inner.offset_units * kUnit, std::as_writable_bytes(std::span(image))).ok());
  // So placed that the image starts on a page of the file.
  std::string payload(kPage - PayloadRecord::kHeaderBytes, 'x');
  payload += image;
  const auto outer = Put(payload, "");
  store_.reset();
  file = files_.Open("data/seg-00000001", FileSystem::Mode::kReadWrite, false);
  ASSERT_TRUE((*file)->Write(outer.offset_units * kUnit, AsBytes(std::string(64, 'd'))).ok());

  auto store = OpenSegmentStore(files_, kFolder, SmallSegments());
  ASSERT_TRUE(store.ok());
  std::vector<PayloadLocation> found;
  ASSERT_TRUE((*store)
                  ->Scan([&](const PayloadLocation& at, std::string_view) { found.push_back(at); })
                  .ok());
  EXPECT_THAT(found, ElementsAre(inner));
}

TEST_F(SegmentStoreTest, StaleAndForeignCopiesAreDataLoss) {
  const std::string old_payload = RandomText(1, 3 * kPage);
  const auto at = Put(old_payload);
  store_.reset();
  FaultyFileSystem others;
  auto other_store = OpenEmpty(others, kFolder, SmallSegments());
  auto record = MakeRecord(RandomText(2, 3 * kPage));
  ASSERT_EQ(other_store->Append(record).value(), at);
  other_store.reset();
  // The other store's record, at the same place of a file with the same name.
  auto foreign = others.Open("data/seg-00000001", FileSystem::Mode::kReadOnly, false);
  std::vector<std::byte> bytes(at.disk_bytes());
  ASSERT_TRUE((*foreign)->Read(at.offset_units * kUnit, bytes).ok());
  auto own = files_.Open("data/seg-00000001", FileSystem::Mode::kReadWrite, false);
  ASSERT_TRUE((*own)->Write(at.offset_units * kUnit, bytes).ok());
  Reopen({at});
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(at).status()));
}

TEST_F(SegmentStoreTest, CopyOfAnotherSegmentIsDataLoss) {
  std::vector<PayloadLocation> places;
  while (places.empty() || places.back().segment < 2)
    places.push_back(Put(RandomText(places.size(), 9 * kPage)));
  store_.reset();
  files_.CopyFile("data/seg-00000001", "data/seg-00000002");
  auto in_second = places.front();
  in_second.segment = 2;
  const auto stats = Reopen({places.front(), in_second});
  EXPECT_EQ(Get(places.front()), RandomText(0, 9 * kPage));
  EXPECT_TRUE(absl::IsDataLoss(store_->Read(in_second).status()));
  ASSERT_FALSE(stats.notes.empty());
  EXPECT_THAT(stats.notes[0], HasSubstr("seg-00000002"));
}

TEST_F(SegmentStoreTest, SegmentsOfAnotherStoreAreRefused) {
  Put("a");
  store_.reset();
  FaultyFileSystem others;
  OpenEmpty(others, kFolder, SmallSegments());
  auto foreign = others.Open("data/STORE", FileSystem::Mode::kReadOnly, false);
  std::vector<std::byte> bytes(kPage);
  ASSERT_TRUE((*foreign)->Read(0, bytes).ok());
  auto own = files_.Open("data/STORE", FileSystem::Mode::kReadWrite, false);
  ASSERT_TRUE((*own)->Write(0, bytes).ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(OpenSegmentStore(files_, kFolder, SmallSegments()).status()));
}

TEST_F(SegmentStoreTest, DamagedSegmentHeaderIsToleratedWithANote) {
  const auto at = Put("still here");
  ASSERT_TRUE(store_->Sync().ok());
  store_.reset();
  auto file = files_.Open("data/seg-00000001", FileSystem::Mode::kReadWrite, false);
  ASSERT_TRUE((*file)->Write(0, AsBytes(RandomText(1, 64))).ok());
  const auto stats = Reopen({at});
  EXPECT_FALSE(stats.notes.empty());
  EXPECT_EQ(Get(at), "still here");
}

TEST_F(SegmentStoreTest, DamagedStoreFileHealsFromTheSegments) {
  const auto at = Put("still here");
  store_.reset();
  ASSERT_TRUE(files_.Remove("data/STORE").ok());
  EXPECT_THAT(Reopen({at}).notes, ElementsAre(HasSubstr("STORE")));
  EXPECT_EQ(Get(at), "still here");
  EXPECT_THAT(Reopen({at}).notes, IsEmpty());
}

TEST_F(SegmentStoreTest, ForeignFilesAreReportedAndLeftAlone) {
  for (const char* name : {"notes.txt", "seg-1", "seg-00000000", "seg-0000000x", "seg-000000001"}) {
    ASSERT_TRUE(files_.Open(absl::StrCat("data/", name), FileSystem::Mode::kCreateNew, false).ok());
  }
  EXPECT_THAT(Reopen({}).foreign_files, UnorderedElementsAre("notes.txt", "seg-1", "seg-00000000",
                                                             "seg-0000000x", "seg-000000001"));
  EXPECT_EQ(Files().size(), 6u);
}

TEST_F(SegmentStoreTest, FullDiskRefusesAndRecovers) {
  std::vector<PayloadLocation> places;
  files_.SetCapacity(200 * kPage);
  absl::Status refused;
  while (refused.ok()) {
    auto record = MakeRecord(RandomText(places.size(), 9 * kPage));
    const auto at = store_->Append(record);
    if (at.ok()) places.push_back(*at);
    refused = at.status();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  // All but a record's worth is used, and nothing leaks however often it is tried.
  EXPECT_GT(files_.AllocatedBytes(), 185 * kPage);
  for (int i = 0; i < 100; ++i) {
    auto record = MakeRecord(RandomText(1, 9 * kPage));
    EXPECT_TRUE(absl::IsResourceExhausted(store_->Append(record).status()));
  }
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  for (std::size_t i = 0; i < places.size(); ++i)
    EXPECT_EQ(Get(places[i]), RandomText(i, 9 * kPage));

  store_->Free(places[3]);
  store_->Free(places[4]);
  const auto at = Put(RandomText(99, 9 * kPage));
  EXPECT_EQ(Get(at), RandomText(99, 9 * kPage));
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
}

TEST_F(SegmentStoreTest, ReadOnlyDiskStillServes) {
  const auto at = Put("here");
  files_.SetReadOnly(true);
  auto record = MakeRecord("more");
  EXPECT_TRUE(absl::IsUnavailable(store_->Append(record).status()));
  EXPECT_EQ(Get(at), "here");
  EXPECT_TRUE(absl::IsUnavailable(store_->Sync()));
  files_.SetReadOnly(false);
  EXPECT_TRUE(store_->Sync().ok());
  EXPECT_EQ(Get(Put("more")), "more");
}

TEST_F(SegmentStoreTest, FailedWriteLeavesNothing) {
  Put("before");
  const auto usage = store_->Usage();
  files_.TearWrites(1);
  auto record = MakeRecord(RandomText(1, 5 * kPage));
  EXPECT_TRUE(absl::IsUnavailable(store_->Append(record).status()));
  EXPECT_EQ(store_->Usage().live_bytes, usage.live_bytes);
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  const auto again = store_->Append(record);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(Get(*again), RandomText(1, 5 * kPage));
}

TEST_F(SegmentStoreTest, FailedSyncIsToldAndTriedAgain) {
  Put("a");
  files_.FailSyncs(1);
  EXPECT_TRUE(absl::IsUnavailable(store_->Sync()));
  EXPECT_TRUE(store_->Sync().ok());
}

// The system drops pages whose write-back failed; a second sync would report success without them.
TEST_F(SegmentStoreTest, FailedSyncOfThePageCacheIsNotForgiven) {
  files_.SetDirect(false);
  Reopen({});
  const auto at = Put("a");
  ASSERT_TRUE(store_->Sync().ok());
  Put("b");
  files_.FailSyncs(1);
  EXPECT_TRUE(absl::IsUnavailable(store_->Sync()));
  EXPECT_TRUE(absl::IsUnavailable(store_->Sync()));
  EXPECT_EQ(Get(at), "a");
}

TEST_F(SegmentStoreTest, WorksWhereNothingCanBePunchedOrAllocated) {
  files_.SetPunchesHoles(false);
  files_.SetAllocates(false);
  std::vector<PayloadLocation> places;
  for (std::uint64_t i = 0; i < 40; ++i) places.push_back(Put(RandomText(i, 7 * kPage)));
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
  for (std::uint64_t i = 0; i < 40; ++i) EXPECT_EQ(Get(places[i]), RandomText(i, 7 * kPage));
  ASSERT_TRUE(store_->Sync().ok());
  const std::uint64_t full_bytes = store_->Usage().disk_bytes;
  store_->Free(places[0]);
  EXPECT_EQ(store_->Usage().disk_bytes, full_bytes);
  for (const auto& at : places) store_->Free(at);
  // The dead segments went; the open one keeps its space until it is sealed.
  EXPECT_LT(store_->Usage().disk_bytes, full_bytes / 3);
  EXPECT_EQ(store_->Usage().disk_bytes, files_.AllocatedBytes());
}

TEST_F(SegmentStoreTest, SyncedRecordsSurviveALossOfPower) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::vector<PayloadLocation> synced;
    for (std::uint64_t i = 0; i < 12; ++i) synced.push_back(Put(RandomText(i, 9 * kPage)));
    ASSERT_TRUE(store_->Sync().ok());
    for (std::uint64_t i = 0; i < 12; ++i) Put(RandomText(i, 9 * kPage));
    files_.LosePower(random);
    Reopen(synced);
    for (std::uint64_t i = 0; i < 12; ++i) EXPECT_EQ(Get(synced[i]), RandomText(i, 9 * kPage));
    Reopen({});
  }
}

// ---- On the machine's own file system

class SegmentStoreOnDiskTest : public ::testing::Test {
 protected:
  std::uint64_t DiskUsage() const {
    std::uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      auto file = PosixFileSystem().Open(entry.path(), FileSystem::Mode::kReadOnly, false);
      bytes += (*file)->AllocatedBytes().value();
    }
    return bytes;
  }

  ScratchFolder folder_;
};

TEST_F(SegmentStoreOnDiskTest, DiskBytesAgreesWithDuWithinOnePercent) {
  auto options = SmallSegments();
  options.segment_bytes = 1 << 20;
  auto store = OpenEmpty(PosixFileSystem(), folder_.path(), options);
  std::mt19937_64 random(1);
  std::vector<PayloadLocation> places;
  for (int i = 0; i < 600; ++i) {
    if (random() % 5 < 3 || places.empty()) {
      auto record = MakeRecord(RandomText(random(), 1 + random() % (40 * kPage)));
      const auto at = store->Append(record);
      ASSERT_TRUE(at.ok()) << at.status();
      places.push_back(*at);
    } else {
      std::swap(places[random() % places.size()], places.back());
      store->Free(places.back());
      places.pop_back();
    }
    if (i % 100 == 99) {
      ASSERT_TRUE(store->Sync().ok());
      const auto du = static_cast<double>(DiskUsage());
      EXPECT_NEAR(static_cast<double>(store->Usage().disk_bytes), du, du / 100);
    }
  }
  store.reset();
  auto reopened = OpenSegmentStore(PosixFileSystem(), folder_.path(), options);
  ASSERT_TRUE(reopened.ok());
  for (const auto& at : places) ASSERT_TRUE((*reopened)->MarkLive(at).ok());
  ASSERT_TRUE((*reopened)->FinishRecovery().ok());
  EXPECT_EQ((*reopened)->Usage().disk_bytes, DiskUsage());
  for (const auto& at : places) EXPECT_TRUE((*reopened)->Read(at).ok());
}

TEST_F(SegmentStoreOnDiskTest, MoreSegmentsThanMayBeOpen) {
  SegmentStoreOptions options;
  options.segment_bytes = 2 * kPage;
  auto store = OpenEmpty(PosixFileSystem(), folder_.path(), options);
  const auto open_descriptors = [] {
    const std::filesystem::directory_iterator descriptors("/proc/self/fd");
    return std::distance(begin(descriptors), end(descriptors));
  };
  const auto before = open_descriptors();
  std::vector<PayloadLocation> places;
  for (std::uint64_t i = 0; i < 700; ++i) {
    auto record = MakeRecord(RandomText(i, 100));
    places.push_back(store->Append(record).value());
  }
  EXPECT_LT(open_descriptors() - before, 520);
  for (std::uint64_t i = 0; i < 700; ++i) {
    ASSERT_EQ(TextOf(store->Read(places[i]).value()), RandomText(i, 100));
  }
  EXPECT_LT(open_descriptors() - before, 520);
}

}  // namespace
}  // namespace kvtrie
