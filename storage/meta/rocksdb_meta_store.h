#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/meta/meta_store.h"

namespace kvtrie {

struct RocksDbMetaStoreOptions {
  // Memory for SST blocks, their indexes and filters. Larger makes reads of rows rarer that go to
  // the disk.
  std::size_t block_cache_bytes = std::size_t{64} << 20;
  // Memory for changes that are in the log only. Larger makes fewer and larger SSTs; half of it
  // again is used while one is written.
  std::size_t write_buffer_bytes = std::size_t{32} << 20;
};

// What opening found out about the last run.
struct MetaRecoveryReport {
  // At least so many changes that a Sync had made durable are gone (the log was damaged or cut). A
  // change is one Put or Delete of a batch. Not counted when the store was recreated.
  std::uint64_t lost_batches = 0;
  // The log was damaged where no Sync had covered it yet; what follows the damage was dropped.
  bool log_truncated = false;
  // The store could not be read at all; it was moved aside and a new one made.
  bool recreated = false;
  std::vector<std::string> notes;  // for the log: what was found, in the order of finding
};

struct OpenedMetaStore {
  std::unique_ptr<MetaStore> store;
  MetaRecoveryReport report;
};

// MetaStore on RocksDB in `folder`, one column family per table.
//
// What is opened is a prefix of what was written, and the report says whether anything is missing
// that a Sync had made durable. RocksDB alone cannot say: it replays a damaged log without a word.
// So each Sync notes in a file beside the folder (`folder`.synced) how far it came and what the log
// files looked like, and opening compares. Until the next Sync, opening again reports the same
// loss.
//
// A store that is damaged where a Sync had covered it is renamed to `folder`.damaged-N, and an
// empty one takes its place: the caller rebuilds it from the payload. Opening reads every SST once
// for that. Damage that comes later gives DataLoss when it is read; destroy the store, call
// MoveAsideRocksDbMetaStore and open again. What was moved aside counts in DiskBytes until somebody
// deletes it.
//
// Errors: Unavailable when the folder cannot be used (permissions, another process holds it, disk);
// ResourceExhausted when the disk is full; FailedPrecondition when a newer release has made the
// store.
absl::StatusOr<OpenedMetaStore> OpenRocksDbMetaStore(const std::string& folder,
                                                     const RocksDbMetaStoreOptions& options);

// Renames the store to `folder`.damaged-N. REQUIRES: it is not open. OK when there is none.
absl::Status MoveAsideRocksDbMetaStore(const std::string& folder);

}  // namespace kvtrie
