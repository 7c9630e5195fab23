// Flips bits in the files of a store and holds what is opened, and what is said about it, against
// what was written.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/rocksdb_meta_store.h"
#include "tests/storage/base/scratch_folder.h"

namespace kvtrie {
namespace {

namespace fs = std::filesystem;

std::string Key(std::size_t n) { return TenantPrefix(kBuiltInTenant) + absl::StrFormat("%08d", n); }

std::string Value(std::size_t n) {
  std::mt19937_64 random(n);
  std::string value(300 + n % 500, '\0');
  for (char& byte : value) byte = static_cast<char>(random());
  return value;
}

struct Written {
  std::size_t synced = 0;  // batches that a Sync has covered
  std::size_t total = 0;
};

// Writes batches 0 to `total`, each a row in two tables; the first `synced` are synced.
void WriteStore(const std::string& folder, const RocksDbMetaStoreOptions& options,
                const Written& written) {
  auto opened = OpenRocksDbMetaStore(folder, options);
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (std::size_t n = 0; n < written.total; ++n) {
    MetaBatch batch(kBuiltInTenant);
    batch.Put(MetaTable::kNodes, Key(n), Value(n));
    // Tables that fill up at different times keep several logs alive.
    batch.Put(MetaTable::kPins, Key(n), n % 2 == 0 ? "" : "pin");
    ASSERT_TRUE(opened->store->Write(batch).ok());
    ASSERT_TRUE(n + 1 != written.synced || opened->store->Sync().ok());
  }
}

enum class Outcome { kAllThere, kUnsyncedTailLost, kReported, kScanRefuses };

// Opens a damaged store and fails the test when something is wrong that nobody says.
Outcome CheckDamaged(const std::string& folder, const RocksDbMetaStoreOptions& options,
                     const Written& written) {
  const auto opened = OpenRocksDbMetaStore(folder, options);
  if (!opened.ok()) {
    ADD_FAILURE() << "damage must not keep the store from opening: " << opened.status();
    return Outcome::kReported;
  }
  const MetaRecoveryReport& report = opened->report;
  std::size_t nodes = 0;
  std::size_t pins = 0;
  const absl::Status scanned = opened->store->Scan(
      MetaTable::kNodes, {}, {}, [&nodes](std::string_view row_key, std::string_view row_value) {
        EXPECT_EQ(row_key, Key(nodes));
        EXPECT_EQ(row_value, Value(nodes));
        ++nodes;
        return true;
      });
  const absl::Status pins_scanned =
      opened->store->Scan(MetaTable::kPins, {}, {}, [&pins](std::string_view row_key, auto) {
        EXPECT_EQ(row_key, Key(pins));
        ++pins;
        return true;
      });
  if (!scanned.ok() || !pins_scanned.ok()) {
    EXPECT_TRUE(absl::IsDataLoss(scanned.ok() ? pins_scanned : scanned)) << scanned << pins_scanned;
    return Outcome::kScanRefuses;
  }

  EXPECT_EQ(nodes, pins) << "half of a batch";
  if (report.recreated) {
    EXPECT_EQ(nodes, 0u);
    return Outcome::kReported;
  }
  if (nodes < written.synced) {
    EXPECT_TRUE(report.log_truncated || report.lost_batches > 0)
        << nodes << " of " << written.synced << " synced batches are there, and nobody says so";
    EXPECT_LE(report.lost_batches, 2 * (written.synced - nodes));
    return Outcome::kReported;
  }
  EXPECT_EQ(report.lost_batches, 0u);
  if (nodes < written.total) {
    return report.log_truncated ? Outcome::kReported : Outcome::kUnsyncedTailLost;
  }
  return Outcome::kAllThere;
}

struct Case {
  const char* name;
  const char* files;  // part of the name
  std::size_t write_buffer_bytes;
  Written written;
  int flips;
};

void PrintTo(const Case& damage_case, std::ostream* out) { *out << damage_case.name; }

class DamageTest : public ::testing::TestWithParam<Case> {};

TEST_P(DamageTest, IsNeverSilent) {
  const Case& param = GetParam();
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);

  RocksDbMetaStoreOptions options;
  options.write_buffer_bytes = param.write_buffer_bytes;
  const ScratchFolder temp;
  const std::string intact = temp / "intact/meta";
  ASSERT_NO_FATAL_FAILURE(WriteStore(intact, options, param.written));

  std::vector<fs::path> targets;
  for (const auto& entry : fs::directory_iterator(intact)) {
    const std::string name = entry.path().filename().string();
    if (name.find(param.files) != std::string::npos && entry.file_size() > 0) {
      targets.push_back(entry.path().filename());
    }
  }
  std::sort(targets.begin(), targets.end());
  ASSERT_FALSE(targets.empty());

  int outcomes[4] = {};
  for (int i = 0; i < param.flips; ++i) {
    const std::string parent = temp / "damaged";
    fs::copy(temp / "intact", parent, fs::copy_options::recursive);
    const std::string damaged = parent + "/meta";
    const fs::path target = fs::path(damaged) / targets[random() % targets.size()];
    const auto byte = random() % fs::file_size(target);
    const auto bit = random() % 8;
    SCOPED_TRACE(absl::StrCat(target.filename().string(), " byte ", byte, " bit ", bit));
    {
      std::fstream file(target, std::ios::binary | std::ios::in | std::ios::out);
      file.seekg(static_cast<std::streamoff>(byte));
      const char flipped = static_cast<char>(file.get() ^ (1 << bit));
      file.seekp(static_cast<std::streamoff>(byte));
      file.put(flipped);
    }
    ++outcomes[static_cast<int>(CheckDamaged(damaged, options, param.written))];
    fs::remove_all(parent);
    if (HasFailure()) break;
  }
  std::printf(
      "%zu files, %d flips: %d all there, %d lost an unsynced tail, %d reported, %d found by "
      "Scan\n",
      targets.size(), param.flips, outcomes[0], outcomes[1], outcomes[2], outcomes[3]);
  // A harness that damages nothing proves nothing.
  EXPECT_LT(outcomes[0], param.flips);
}

INSTANTIATE_TEST_SUITE_P(
    RocksDb, DamageTest,
    ::testing::Values(
        // One log, all of it synced; one with a tail that was not; several logs.
        Case{"SyncedLog", ".log", std::size_t{32} << 20, {400, 400}, 200},
        Case{"LogWithUnsyncedTail", ".log", std::size_t{32} << 20, {200, 400}, 200},
        Case{"SeveralLogs", ".log", std::size_t{256} << 10, {1500, 1500}, 200},
        Case{"Manifest", "MANIFEST", std::size_t{256} << 10, {1500, 1500}, 60},
        Case{"Current", "CURRENT", std::size_t{256} << 10, {1500, 1500}, 40},
        Case{"Sst", ".sst", std::size_t{256} << 10, {1500, 1500}, 100}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

}  // namespace
}  // namespace kvtrie
