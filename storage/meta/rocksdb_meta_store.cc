#include "storage/meta/rocksdb_meta_store.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "rocksdb/cache.h"
#include "rocksdb/db.h"
#include "rocksdb/filter_policy.h"
#include "rocksdb/listener.h"
#include "rocksdb/options.h"
#include "rocksdb/sst_file_reader.h"
#include "rocksdb/table.h"
#include "rocksdb/write_batch.h"
#include "storage/base/check.h"
#include "storage/base/file_system.h"
#include "storage/base/free_space.h"
#include "storage/base/status_macros.h"
#include "storage/meta/log_space.h"
#include "storage/meta/meta_keys.h"
#include "storage/meta/rocksdb_log.h"
#include "storage/meta/rocksdb_status.h"
#include "storage/meta/sync_record.h"

namespace kvtrie {
namespace {

// Column families, by MetaTable. The first is the one that RocksDB always has.
constexpr std::array<std::string_view, kMetaTableCount> kTableNames = {"default", "models", "nodes",
                                                                       "sessions", "pins"};

constexpr std::uint64_t kLogBytesMax = std::uint64_t{64} << 20;
constexpr std::size_t kManifestBytesMax = std::size_t{1} << 20;
constexpr double kBloomBitsPerKey = 10;
// The only size other than 0 that RocksDB knows.
constexpr std::size_t kProtectionBytesPerKey = 8;
// Below so much free space beside the write buffers, trying to leave the disk-full state only
// costs.
constexpr std::uint64_t kResumeBytes = std::uint64_t{1} << 20;
// What a write leaves free, for what RocksDB writes beside it.
constexpr std::uint64_t kSpareBytes = std::uint64_t{256} << 10;

std::size_t IndexOf(MetaTable table) {
  const auto index = static_cast<std::size_t>(table);
  KV_CHECK(index < kMetaTableCount);
  return index;
}

rocksdb::Slice ToSlice(std::string_view text) { return {text.data(), text.size()}; }
std::string_view ToView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

// RocksDB's own recovery from a full disk looks for space every five seconds, and refuses Resume
// meanwhile. Where no write is accepted, the next write resumes instead.
//
// Also tells when a new log was begun. A log writer that was never synced ends the process, by an
// assertion that Debian's build keeps, when it is used or closed after a failed write; one that was
// synced once does not. So each new log is synced once after its first good write.
class ResumeByWriting final : public rocksdb::EventListener {
 public:
  void OnMemTableSealed(const rocksdb::MemTableInfo& /*sealed*/) override { log_is_new_ = true; }
  // True once for each new log.
  bool TakeNewLog() { return log_is_new_.exchange(false); }

  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason /*reason*/, rocksdb::Status error,
                            bool* auto_recovery) override {
    if (error.severity() >= rocksdb::Status::kHardError) *auto_recovery = false;
  }

 private:
  std::atomic<bool> log_is_new_{true};
};

rocksdb::DBOptions DbOptions(const std::string& folder, const RocksDbMetaStoreOptions& options) {
  rocksdb::DBOptions db;
  db.env = EnvWithLogSpace();
  db.create_if_missing = true;
  db.create_missing_column_families = true;
  // SyncWAL with this on makes 7.8 miss logs that are there (fixed in 7.10).
  db.track_and_verify_wals_in_manifest = false;
  // With it, recovery can pass over a hole in the log.
  db.wal_bytes_per_sync = 0;
  db.recycle_log_file_num = 0;
  db.bytes_per_sync = std::size_t{1} << 20;
  db.db_write_buffer_size = options.write_buffer_bytes;
  db.max_total_wal_size = kLogBytesMax;
  db.max_manifest_file_size = kManifestBytesMax;
  db.max_background_jobs = 2;
  // Space that is allocated ahead counts as used.
  db.allow_fallocate = false;
  db.listeners.push_back(std::make_shared<ResumeByWriting>());
  db.info_log = OpenRocksDbLog(folder);
  db.stats_dump_period_sec = 0;
  db.stats_persist_period_sec = 0;
  return db;
}

std::vector<rocksdb::ColumnFamilyDescriptor> TableDescriptors(
    const RocksDbMetaStoreOptions& options) {
  const auto cache = rocksdb::NewLRUCache(options.block_cache_bytes);
  std::vector<rocksdb::ColumnFamilyDescriptor> tables;
  for (std::size_t i = 0; i < kMetaTableCount; ++i) {
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = cache;
    table.cache_index_and_filter_blocks = true;
    table.pin_l0_filter_and_index_blocks_in_cache = true;
    const MetaTable kind{static_cast<std::uint8_t>(i)};
    // Most nodes and sessions that are asked for are new.
    if (kind == MetaTable::kNodes || kind == MetaTable::kSessions) {
      table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(kBloomBitsPerKey));
    }
    rocksdb::ColumnFamilyOptions family;
    family.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    family.compression = rocksdb::kLZ4Compression;
    family.level_compaction_dynamic_level_bytes = true;
    // The bound for all tables together, db_write_buffer_size, is the one that holds.
    family.write_buffer_size = options.write_buffer_bytes;
    family.target_file_size_base = std::uint64_t{16} << 20;
    family.max_bytes_for_level_base = std::uint64_t{64} << 20;
    tables.emplace_back(std::string(kTableNames[i]), family);
  }
  return tables;
}

// The files that RocksDB appends to: what was synced of them does not change any more.
bool IsLogOrManifest(std::string_view name) {
  return name.ends_with(".log") || name.starts_with("MANIFEST-");
}

std::string WithoutTrailingSlash(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

std::string SyncRecordPath(const std::string& folder) { return absl::StrCat(folder, ".synced"); }
std::string DamagedPrefix(const std::string& folder) { return absl::StrCat(folder, ".damaged-"); }

std::string ParentOf(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::uint64_t AllocatedBytes(const std::filesystem::path& path) {
  constexpr std::uint64_t kStatUnitBytes = 512;
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return 0;
  return static_cast<std::uint64_t>(status.st_blocks) * kStatUnitBytes;
}

std::uint64_t AllocatedBytesOfFolder(const std::filesystem::path& folder) {
  std::uint64_t bytes = AllocatedBytes(folder);
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    bytes += AllocatedBytes(entry->path());
  }
  return bytes;
}

class RocksDbMetaStore final : public MetaStore {
 public:
  RocksDbMetaStore(std::string folder, std::unique_ptr<rocksdb::DB> db,
                   std::vector<rocksdb::ColumnFamilyHandle*> tables, FileSystem& file_system,
                   std::uint64_t sync_count)
      : folder_(std::move(folder)),
        db_(std::move(db)),
        log_watch_(
            std::static_pointer_cast<ResumeByWriting>(db_->GetDBOptions().listeners.front())),
        tables_(std::move(tables)),
        file_system_(file_system),
        growing_files_(file_system, folder_, IsLogOrManifest) {
    last_synced_.sync_count = sync_count;
  }

  ~RocksDbMetaStore() override {
    for (rocksdb::ColumnFamilyHandle* table : tables_) {
      // Fails for handles of another database only.
      KV_CHECK(db_->DestroyColumnFamilyHandle(table).ok());
    }
    const std::uint64_t sequence = db_->GetLatestSequenceNumber();
    // What fails here fails again, and is reported, when the store is opened.
    db_->Close().PermitUncheckedError();
    // What RocksDB has noted since the last Sync.
    const absl::MutexLock lock(&sync_mutex_);
    if (record_written_) SyncUpTo(sequence).IgnoreError();
  }

  absl::StatusOr<std::optional<std::string>> Get(MetaTable table,
                                                 std::string_view row_key) const override {
    std::string row_value;
    const rocksdb::Status status =
        db_->Get(rocksdb::ReadOptions(), Handle(table), ToSlice(row_key), &row_value);
    if (status.IsNotFound()) return std::nullopt;
    KV_RETURN_IF_ERROR(FromRocksDb("get a row", status));
    return row_value;
  }

  absl::Status Scan(MetaTable table, std::string_view prefix, std::string_view from,
                    const RowVisitor& visit) const override {
    rocksdb::ReadOptions options;
    // A scan reads each block once; the cache is for what is read again.
    options.fill_cache = false;
    const std::unique_ptr<rocksdb::Iterator> row(db_->NewIterator(options, Handle(table)));
    for (row->Seek(ToSlice(std::max(prefix, from))); row->Valid(); row->Next()) {
      const std::string_view row_key = ToView(row->key());
      if (!row_key.starts_with(prefix)) break;
      if (!visit(row_key, ToView(row->value()))) break;
    }
    return FromRocksDb("scan a table", row->status());
  }

  absl::Status Write(const MetaBatch& batch) override {
    const std::string tenant_prefix = TenantPrefix(batch.tenant());
    rocksdb::WriteBatch changes(/*reserved_bytes=*/0, /*max_bytes=*/0, kProtectionBytesPerKey,
                                /*default_cf_ts_sz=*/0);
    for (const MetaBatch::Change& change : batch.changes()) {
      KV_CHECK(change.row_key.starts_with(tenant_prefix));
      const rocksdb::Status status =
          change.row_value ? changes.Put(Handle(change.table), change.row_key, *change.row_value)
                           : changes.Delete(Handle(change.table), change.row_key);
      KV_RETURN_IF_ERROR(FromRocksDb("build a batch", status));
    }
    if (batch.empty()) return absl::OkStatus();
    // RocksDB takes a log that met a full disk badly (see ResumeByWriting), so none is to meet it.
    if (FreeDiskBytes(folder_) < changes.GetDataSize() + kSpareBytes) {
      return absl::ResourceExhaustedError("write a batch: the disk is full");
    }

    rocksdb::WriteOptions options;
    options.sync = false;
    options.protection_bytes_per_key = kProtectionBytesPerKey;
    rocksdb::Status status = db_->Write(options, &changes);
    if (!status.ok() && LeaveErrorState()) status = db_->Write(options, &changes);
    log_is_torn_ = !status.ok();
    if (status.ok() && log_watch_->TakeNewLog()) db_->SyncWAL().PermitUncheckedError();
    return FromRocksDb("write a batch", status);
  }

  absl::Status Sync() override {
    const absl::MutexLock lock(&sync_mutex_);
    // Taken before the sync, so that the record claims nothing that came while it ran.
    return SyncUpTo(db_->GetLatestSequenceNumber());
  }

  std::uint64_t DiskBytes() const override {
    std::uint64_t bytes = AllocatedBytesOfFolder(folder_) + AllocatedBytes(SyncRecordPath(folder_));
    const std::string damaged_prefix =
        std::filesystem::path(DamagedPrefix(folder_)).filename().string();
    std::error_code error;
    for (std::filesystem::directory_iterator entry(ParentOf(folder_), error), end;
         !error && entry != end; entry.increment(error)) {
      if (entry->path().filename().string().starts_with(damaged_prefix)) {
        bytes += AllocatedBytesOfFolder(entry->path());
      }
    }
    return bytes;
  }

  std::uint64_t sequence() const { return db_->GetLatestSequenceNumber(); }

 private:
  rocksdb::ColumnFamilyHandle* Handle(MetaTable table) const { return tables_[IndexOf(table)]; }

  absl::Status SyncUpTo(std::uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sync_mutex_) {
    SyncRecord record{.sync_count = last_synced_.sync_count + 1, .sequence = sequence, .files = {}};
    // Not by SyncWAL, which aborts the process when the last write has failed (an assertion that
    // Debian's build of RocksDB keeps). What was written is with the operating system, so syncing
    // the files does the same.
    KV_ASSIGN_OR_RETURN(record.files, growing_files_.Sync());
    // What a failed write has left at the end of the log will be cut off.
    if (log_is_torn_) return absl::OkStatus();
    const bool is_news = sequence != last_synced_.sequence || record.files != last_synced_.files;
    if (record_written_ && !is_news) return absl::OkStatus();
    KV_RETURN_IF_ERROR(WriteSyncRecord(file_system_, SyncRecordPath(folder_), record));
    last_synced_ = std::move(record);
    record_written_ = true;
    return absl::OkStatus();
  }

  // After a failed write RocksDB refuses all others until Resume, which flushes the write buffers.
  // True when writes may work again.
  bool LeaveErrorState() {
    std::uint64_t buffered_bytes = 0;
    db_->GetAggregatedIntProperty(rocksdb::DB::Properties::kCurSizeAllMemTables, &buffered_bytes);
    if (FreeDiskBytes(folder_) < buffered_bytes + kResumeBytes) return false;
    const absl::MutexLock lock(&resume_mutex_);
    return db_->Resume().ok();
  }

  const std::string folder_;
  const std::unique_ptr<rocksdb::DB> db_;
  const std::shared_ptr<ResumeByWriting> log_watch_;
  const std::vector<rocksdb::ColumnFamilyHandle*> tables_;
  FileSystem& file_system_;

  std::atomic<bool> log_is_torn_{false};
  absl::Mutex resume_mutex_;  // one Resume at a time

  absl::Mutex sync_mutex_;
  GrowingFiles growing_files_ ABSL_GUARDED_BY(sync_mutex_);
  SyncRecord last_synced_ ABSL_GUARDED_BY(sync_mutex_);
  bool record_written_ ABSL_GUARDED_BY(sync_mutex_) = false;  // by this object
};

// Whether the stored bytes are to blame. A file that the store names and that is gone counts as
// damage.
bool IsDamage(const rocksdb::Status& status) {
  return status.IsCorruption() || status.IsPathNotFound() || status.IsNotFound();
}

// Opens one store; its methods are the steps of OpenRocksDbMetaStore.
class Opener {
 public:
  Opener(std::string folder, const RocksDbMetaStoreOptions& options, FileSystem& file_system)
      : folder_(std::move(folder)), options_(options), file_system_(file_system) {}

  absl::StatusOr<OpenedMetaStore> Open() {
    KV_RETURN_IF_ERROR(file_system_.CreateFolder(folder_));
    KV_RETURN_IF_ERROR(ReadRecord());
    KV_ASSIGN_OR_RETURN(const bool damaged, LooksDamaged());

    rocksdb::Status status =
        damaged ? rocksdb::Status::Corruption("not opened") : OpenDamagedOrNot();
    if (IsDamage(status)) {
      Note(absl::StrCat("the store was damaged and is moved aside: ", status.ToString()));
      KV_RETURN_IF_ERROR(MoveAsideRocksDbMetaStore(folder_));
      KV_RETURN_IF_ERROR(file_system_.CreateFolder(folder_));
      report_ = {.recreated = true, .notes = std::move(report_.notes)};
      record_.reset();
      status = OpenDb(rocksdb::WALRecoveryMode::kAbsoluteConsistency);
    }
    if (status.IsInvalidArgument()) {
      return absl::FailedPreconditionError(absl::StrCat("open ", folder_, ": ", status.ToString()));
    }
    if (status.IsIOError() && status.ToString().find("While lock file") != std::string::npos) {
      return absl::UnavailableError(
          absl::StrCat("open ", folder_, ": another process has this store open"));
    }
    KV_RETURN_IF_ERROR(FromRocksDb(absl::StrCat("open ", folder_), status));

    auto store =
        std::make_unique<RocksDbMetaStore>(folder_, std::move(db_), std::move(tables_),
                                           file_system_, record_ ? record_->sync_count : 0);
    if (!record_) {
      KV_RETURN_IF_ERROR(store->Sync());
    } else if (store->sequence() < record_->sequence) {
      report_.lost_batches = record_->sequence - store->sequence();
      Note(absl::StrCat("change ", record_->sequence, " was synced, ", store->sequence(),
                        " is the last one that is there"));
    }
    return OpenedMetaStore{std::move(store), std::move(report_)};
  }

 private:
  void Note(std::string note) { report_.notes.push_back(std::move(note)); }

  absl::Status ReadRecord() {
    auto record = ReadSyncRecord(file_system_, SyncRecordPath(folder_));
    if (absl::IsDataLoss(record.status())) {
      Note(absl::StrCat("what was synced is not known: ", record.status().message()));
      return absl::OkStatus();
    }
    if (absl::IsUnimplemented(record.status())) {
      return absl::FailedPreconditionError(record.status().message());
    }
    KV_ASSIGN_OR_RETURN(record_, std::move(record));
    return absl::OkStatus();
  }

  // True: opening would lose without a word what cannot be told afterwards.
  absl::StatusOr<bool> LooksDamaged() {
    KV_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_.List(folder_));
    const auto exists = [&names](auto matches) {
      return std::any_of(names.begin(), names.end(), matches);
    };
    if (!exists([](const std::string& name) { return name == "CURRENT"; })) {
      // RocksDB would make a new store here and delete the files of the old one.
      const bool remains = record_ || exists([](const std::string& name) {
                             return name.ends_with(".sst") || name.ends_with(".log");
                           });
      if (remains) Note("CURRENT is missing");
      return remains;
    }
    const std::vector<std::string> damaged_ssts = DamagedSsts(names);
    if (!damaged_ssts.empty() && AnyIsLive(damaged_ssts)) return true;
    if (!record_) return false;
    for (const SyncedFile& file : record_->files) {
      const absl::Status status = CheckSyncedFile(file_system_, folder_, file);
      if (status.ok() || absl::IsNotFound(status)) continue;  // replaced by SSTs, or a new MANIFEST
      if (!absl::IsDataLoss(status)) return status;
      Note(std::string(status.message()));
      // A damaged log is no prefix to be content with either: tables whose SSTs hold what comes
      // after the damage would be opened beside tables that lack it.
      return true;
    }
    return false;
  }

  // Reads all SSTs. It has to be known before the store is opened, because iterators of RocksDB 7.8
  // may end at a damaged block without an error: a scan then misses rows, and a compaction drops
  // them (fixed in 8.6).
  std::vector<std::string> DamagedSsts(const std::vector<std::string>& names) {
    std::vector<std::string> damaged;
    for (const std::string& name : names) {
      if (!name.ends_with(".sst")) continue;
      rocksdb::SstFileReader reader{rocksdb::Options()};
      rocksdb::Status status = reader.Open(absl::StrCat(folder_, "/", name));
      if (status.ok()) status = reader.VerifyChecksum();
      if (!status.ok()) {
        Note(status.ToString());
        damaged.push_back(name);
      }
    }
    return damaged;
  }

  // False for what a crash has left of an SST that was being written.
  bool AnyIsLive(const std::vector<std::string>& ssts) {
    bool live = false;
    const rocksdb::Status status =
        ReadOnly(rocksdb::WALRecoveryMode::kPointInTimeRecovery, [&ssts, &live](rocksdb::DB& db) {
          std::vector<rocksdb::LiveFileMetaData> files;
          db.GetLiveFilesMetaData(&files);
          for (const rocksdb::LiveFileMetaData& file : files) {
            live |= std::find(ssts.begin(), ssts.end(), file.relative_filename) != ssts.end();
          }
        });
    return live || IsDamage(status);
  }

  // A log without a flaw is replayed in the mode that accepts none. Else in the mode that stops at
  // the flaw: the one between them would go on with the next log and leave a hole. It only tells
  // (without writing) whether the flaw is the end of what a crash has cut off, or damage.
  rocksdb::Status OpenDamagedOrNot() {
    rocksdb::Status status = OpenDb(rocksdb::WALRecoveryMode::kAbsoluteConsistency);
    if (!status.IsCorruption()) return status;
    Note(status.ToString());
    report_.log_truncated =
        !ReadOnly(rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords, [](rocksdb::DB&) {
         }).ok();
    return OpenDb(rocksdb::WALRecoveryMode::kPointInTimeRecovery);
  }

  rocksdb::Status OpenDb(rocksdb::WALRecoveryMode mode) {
    rocksdb::DBOptions db_options = DbOptions(folder_, options_);
    db_options.wal_recovery_mode = mode;
    rocksdb::Status status = OpenDb(db_options);
    if (status.IsNoSpace()) {
      // What is in the logs stays there instead of being written to SSTs.
      db_options.avoid_flush_during_recovery = true;
      status = OpenDb(db_options);
    }
    return status;
  }

  rocksdb::Status OpenDb(const rocksdb::DBOptions& db_options) {
    rocksdb::DB* db = nullptr;
    const rocksdb::Status status =
        rocksdb::DB::Open(db_options, folder_, TableDescriptors(options_), &tables_, &db);
    db_.reset(db);
    return status;
  }

  // Opens the store without changing it, and closes it after `look`.
  template <typename Look>
  rocksdb::Status ReadOnly(rocksdb::WALRecoveryMode mode, Look look) {
    rocksdb::DBOptions db_options = DbOptions(folder_, options_);
    db_options.wal_recovery_mode = mode;
    rocksdb::DB* db = nullptr;
    std::vector<rocksdb::ColumnFamilyHandle*> tables;
    const rocksdb::Status status =
        rocksdb::DB::OpenForReadOnly(db_options, folder_, TableDescriptors(options_), &tables, &db);
    if (status.ok()) look(*db);
    for (rocksdb::ColumnFamilyHandle* table : tables) {
      KV_CHECK(db->DestroyColumnFamilyHandle(table).ok());
    }
    delete db;
    return status;
  }

  const std::string folder_;
  const RocksDbMetaStoreOptions& options_;
  FileSystem& file_system_;

  std::optional<SyncRecord> record_;
  MetaRecoveryReport report_;
  std::unique_ptr<rocksdb::DB> db_;
  std::vector<rocksdb::ColumnFamilyHandle*> tables_;
};

}  // namespace

absl::StatusOr<OpenedMetaStore> OpenRocksDbMetaStore(const std::string& folder,
                                                     const RocksDbMetaStoreOptions& options) {
  return Opener(WithoutTrailingSlash(folder), options, PosixFileSystem()).Open();
}

absl::Status MoveAsideRocksDbMetaStore(const std::string& folder) {
  FileSystem& file_system = PosixFileSystem();
  const std::string path = WithoutTrailingSlash(folder);
  // The record first: a record without its store would be taken for the loss of everything.
  for (int n = 1;; ++n) {
    const std::string aside = absl::StrCat(DamagedPrefix(path), n);
    if (std::filesystem::exists(aside)) continue;
    if (absl::Status status = file_system.Rename(path, aside); !status.ok()) {
      return absl::IsNotFound(status) ? absl::OkStatus() : status;
    }
    if (absl::Status status = file_system.Remove(SyncRecordPath(path));
        !status.ok() && !absl::IsNotFound(status)) {
      return status;
    }
    return file_system.SyncFolder(ParentOf(path));
  }
}

}  // namespace kvtrie
