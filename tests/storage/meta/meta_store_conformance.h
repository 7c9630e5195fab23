#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/meta_store.h"

namespace kvtrie {

// What every MetaStore promises, written against the interface. A form of the store runs it by
//   INSTANTIATE_TEST_SUITE_P(RocksDb, MetaStoreConformanceTest,
//   ::testing::Values(&MakeRocksDbBackend));

// Where the rows are kept while no store is open on them.
class MetaStoreBackend {
 public:
  virtual ~MetaStoreBackend() = default;
  // REQUIRES: the store of the call before is destroyed.
  virtual std::unique_ptr<MetaStore> Open() = 0;
};
using MetaStoreBackendFactory = std::unique_ptr<MetaStoreBackend> (*)();

using MetaRow = std::pair<std::string, std::string>;

inline std::vector<MetaRow> ScanAll(const MetaStore& store, MetaTable table,
                                    std::string_view prefix = {}, std::string_view from = {}) {
  std::vector<MetaRow> rows;
  const absl::Status status =
      store.Scan(table, prefix, from, [&rows](std::string_view row_key, std::string_view value) {
        rows.emplace_back(row_key, value);
        return true;
      });
  EXPECT_TRUE(status.ok()) << status;
  return rows;
}

class MetaStoreConformanceTest : public ::testing::TestWithParam<MetaStoreBackendFactory> {
 protected:
  static constexpr TenantId kTenant{1};
  static constexpr TenantId kOtherTenant{2};

  static std::string Key(std::string_view name, TenantId tenant = kTenant) {
    return TenantPrefix(tenant).append(name);
  }

  void SetUp() override {
    backend_ = GetParam()();
    store_ = backend_->Open();
    ASSERT_NE(store_, nullptr);
  }

  void Reopen() {
    store_.reset();
    store_ = backend_->Open();
    ASSERT_NE(store_, nullptr);
  }

  void Put(MetaTable table, const std::string& row_key, const std::string& row_value,
           TenantId tenant = kTenant) {
    MetaBatch batch(tenant);
    batch.Put(table, row_key, row_value);
    const absl::Status status = store_->Write(batch);
    ASSERT_TRUE(status.ok()) << status;
  }

  std::optional<std::string> Get(MetaTable table, const std::string& row_key) {
    auto row_value = store_->Get(table, row_key);
    EXPECT_TRUE(row_value.ok()) << row_value.status();
    return row_value.ok() ? *row_value : std::nullopt;
  }

  std::unique_ptr<MetaStoreBackend> backend_;
  std::unique_ptr<MetaStore> store_;
};

TEST_P(MetaStoreConformanceTest, MissIsOkWithNothing) {
  EXPECT_EQ(Get(MetaTable::kNodes, Key("a")), std::nullopt);
  EXPECT_TRUE(ScanAll(*store_, MetaTable::kNodes).empty());
}

TEST_P(MetaStoreConformanceTest, PutReplacesAndDeleteRemoves) {
  Put(MetaTable::kNodes, Key("a"), "1");
  Put(MetaTable::kNodes, Key("a"), "2");
  EXPECT_EQ(Get(MetaTable::kNodes, Key("a")), "2");
  MetaBatch batch(kTenant);
  batch.Delete(MetaTable::kNodes, Key("a"));
  batch.Delete(MetaTable::kNodes, Key("never there"));
  ASSERT_TRUE(store_->Write(batch).ok());
  EXPECT_EQ(Get(MetaTable::kNodes, Key("a")), std::nullopt);
}

TEST_P(MetaStoreConformanceTest, LaterChangesOfABatchWin) {
  MetaBatch batch(kTenant);
  batch.Put(MetaTable::kNodes, Key("a"), "1");
  batch.Delete(MetaTable::kNodes, Key("a"));
  batch.Delete(MetaTable::kNodes, Key("b"));
  batch.Put(MetaTable::kNodes, Key("b"), "2");
  ASSERT_TRUE(store_->Write(batch).ok());
  EXPECT_EQ(Get(MetaTable::kNodes, Key("a")), std::nullopt);
  EXPECT_EQ(Get(MetaTable::kNodes, Key("b")), "2");
}

TEST_P(MetaStoreConformanceTest, EmptyBatchIsOk) {
  EXPECT_TRUE(store_->Write(MetaBatch(kTenant)).ok());
}

TEST_P(MetaStoreConformanceTest, EmptyValueIsNotAMiss) {
  Put(MetaTable::kSessions, Key("a"), "");
  EXPECT_EQ(Get(MetaTable::kSessions, Key("a")), "");
}

TEST_P(MetaStoreConformanceTest, TablesAreApart) {
  for (std::size_t i = 0; i < kMetaTableCount; ++i) {
    Put(MetaTable{static_cast<std::uint8_t>(i)}, Key("a"), std::to_string(i));
  }
  for (std::size_t i = 0; i < kMetaTableCount; ++i) {
    const MetaTable table{static_cast<std::uint8_t>(i)};
    EXPECT_EQ(ScanAll(*store_, table), (std::vector<MetaRow>{{Key("a"), std::to_string(i)}}));
  }
}

TEST_P(MetaStoreConformanceTest, KeysAndValuesAreAnyBytes) {
  const std::string bytes("\x00\xff\x00\n", 4);
  Put(MetaTable::kNodes, Key(bytes), bytes);
  const std::string long_value(100'000, '\xff');
  Put(MetaTable::kNodes, Key(std::string(256, '\xff')), long_value);
  EXPECT_EQ(Get(MetaTable::kNodes, Key(bytes)), bytes);
  EXPECT_EQ(Get(MetaTable::kNodes, Key(std::string(256, '\xff'))), long_value);
}

TEST_P(MetaStoreConformanceTest, ScanIsInOrderOfBytes) {
  for (const char* name : {"b", "\xff", "a", "", "ab"}) Put(MetaTable::kNodes, Key(name), name);
  std::vector<MetaRow> expected;
  for (const char* name : {"", "a", "ab", "b", "\xff"}) expected.emplace_back(Key(name), name);
  EXPECT_EQ(ScanAll(*store_, MetaTable::kNodes), expected);
}

TEST_P(MetaStoreConformanceTest, ScanStaysInItsPrefix) {
  const TenantId last_tenant{0xFFFFFFFF};
  for (const TenantId tenant : {kTenant, kOtherTenant, last_tenant}) {
    Put(MetaTable::kNodes, Key("a", tenant), "a", tenant);
    Put(MetaTable::kNodes, Key("\xff", tenant), "b", tenant);
  }
  for (const TenantId tenant : {kTenant, kOtherTenant, last_tenant}) {
    EXPECT_EQ(ScanAll(*store_, MetaTable::kNodes, TenantPrefix(tenant)),
              (std::vector<MetaRow>{{Key("a", tenant), "a"}, {Key("\xff", tenant), "b"}}));
  }
  EXPECT_TRUE(ScanAll(*store_, MetaTable::kNodes, TenantPrefix(TenantId{3})).empty());
}

TEST_P(MetaStoreConformanceTest, ScanStartsAtTheFirstKeyNotBelowFrom) {
  for (const char* name : {"a", "c", "e"}) Put(MetaTable::kNodes, Key(name), name);
  const std::string prefix = TenantPrefix(kTenant);
  const auto count_from = [&](const std::string& from) {
    return ScanAll(*store_, MetaTable::kNodes, prefix, from).size();
  };
  EXPECT_EQ(count_from(""), 3u);
  EXPECT_EQ(count_from(Key("a")), 3u);
  EXPECT_EQ(count_from(Key("b")), 2u);
  EXPECT_EQ(count_from(Key("c")), 2u);
  EXPECT_EQ(count_from(Key("f")), 0u);
  EXPECT_EQ(count_from(Key("a", TenantId{0})), 3u);
  EXPECT_EQ(count_from(Key("a", kOtherTenant)), 0u);
}

TEST_P(MetaStoreConformanceTest, VisitorStopsTheScan) {
  for (const char* name : {"a", "b", "c"}) Put(MetaTable::kNodes, Key(name), name);
  std::size_t seen = 0;
  const absl::Status status =
      store_->Scan(MetaTable::kNodes, {}, {}, [&seen](std::string_view, std::string_view) {
        ++seen;
        return seen < 2;
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(seen, 2u);
}

TEST_P(MetaStoreConformanceTest, RowsSurviveReopeningWithAndWithoutSync) {
  Put(MetaTable::kNodes, Key("synced"), "1");
  ASSERT_TRUE(store_->Sync().ok());
  Put(MetaTable::kPins, Key("not synced"), "2");
  Reopen();
  EXPECT_EQ(Get(MetaTable::kNodes, Key("synced")), "1");
  EXPECT_EQ(Get(MetaTable::kPins, Key("not synced")), "2");
}

TEST_P(MetaStoreConformanceTest, SyncOfNothingIsOk) {
  EXPECT_TRUE(store_->Sync().ok());
  EXPECT_TRUE(store_->Sync().ok());
}

TEST_P(MetaStoreConformanceTest, DiskBytesGrowWithTheRows) {
  const std::uint64_t before = store_->DiskBytes();
  std::mt19937_64 random(1);
  std::string noise(1 << 20, '\0');
  for (char& byte : noise) byte = static_cast<char>(random());
  Put(MetaTable::kNodes, Key("a"), noise);
  ASSERT_TRUE(store_->Sync().ok());
  // Less than all of it: a store may have taken some space ahead.
  EXPECT_GE(store_->DiskBytes(), before + noise.size() / 2);
}

TEST_P(MetaStoreConformanceTest, BatchesOfManyThreadsAreWholeAndInOrder) {
  constexpr int kThreads = 4;
  constexpr int kBatches = 200;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] {
      const TenantId tenant{static_cast<std::uint32_t>(thread + 1)};
      for (int i = 0; i < kBatches; ++i) {
        MetaBatch batch(tenant);
        batch.Put(MetaTable::kNodes, Key("counter", tenant), std::to_string(i));
        batch.Put(MetaTable::kNodes, Key("twin", tenant), std::to_string(i));
        EXPECT_TRUE(store_->Write(batch).ok());
        EXPECT_TRUE(i % 50 != 0 || store_->Sync().ok());
        // A scan sees one state of the store.
        const auto rows = ScanAll(*store_, MetaTable::kNodes, TenantPrefix(tenant));
        ASSERT_EQ(rows.size(), 2u);
        EXPECT_EQ(rows[0].second, std::to_string(i));
        EXPECT_EQ(rows[1].second, std::to_string(i));
        EXPECT_GT(store_->DiskBytes(), 0u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ScanAll(*store_, MetaTable::kNodes).size(), std::size_t{2 * kThreads});
}

TEST_P(MetaStoreConformanceTest, RandomOperationsMatchAMap) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint64_t bound) { return random() % bound; };
  const auto random_table = [&] { return MetaTable{static_cast<std::uint8_t>(below(5))}; };
  const auto random_key = [&](TenantId tenant) { return Key(std::to_string(below(200)), tenant); };

  std::map<std::pair<MetaTable, std::string>, std::string> model;
  for (int step = 0; step < 3000; ++step) {
    const TenantId tenant{static_cast<std::uint32_t>(1 + below(3))};
    const std::uint64_t dice = below(1000);
    if (dice < 600) {
      MetaBatch batch(tenant);
      for (std::uint64_t i = below(8); i > 0; --i) {
        const MetaTable table = random_table();
        const std::string row_key = random_key(tenant);
        if (below(3) == 0) {
          batch.Delete(table, row_key);
          model.erase({table, row_key});
        } else {
          const std::string row_value(below(600), static_cast<char>(below(256)));
          batch.Put(table, row_key, row_value);
          model[{table, row_key}] = row_value;
        }
      }
      ASSERT_TRUE(store_->Write(batch).ok());
    } else if (dice < 900) {
      const MetaTable table = random_table();
      const std::string row_key = random_key(tenant);
      const auto expected = model.find({table, row_key});
      ASSERT_EQ(Get(table, row_key), expected == model.end()
                                         ? std::nullopt
                                         : std::optional<std::string>(expected->second));
    } else if (dice < 980) {
      const MetaTable table = random_table();
      const std::string prefix = TenantPrefix(tenant);
      const std::string from = below(2) == 0 ? "" : random_key(tenant);
      std::vector<MetaRow> expected;
      for (const auto& [key, row_value] : model) {
        if (key.first == table && key.second.starts_with(prefix) && key.second >= from) {
          expected.emplace_back(key.second, row_value);
        }
      }
      ASSERT_EQ(ScanAll(*store_, table, prefix, from), expected);
    } else if (dice < 995) {
      ASSERT_TRUE(store_->Sync().ok());
    } else {
      Reopen();
    }
  }
}

}  // namespace kvtrie
