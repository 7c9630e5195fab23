#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/meta/meta_store.h"

namespace kvtrie {

struct RocksDbMetaStoreOptions {
  std::size_t block_cache_bytes = std::size_t{64} << 20;
  std::size_t write_buffer_bytes = std::size_t{32} << 20;
};

// What opening found out about the last run.
struct MetaRecoveryReport {
  // Batches that a Sync had made durable and that are gone (the log was damaged or cut).
  std::uint64_t lost_batches = 0;
  // The log was damaged in the middle; what follows the damage was dropped.
  bool log_truncated = false;
  // The store could not be read at all; it was moved aside and a new one made.
  bool recreated = false;
  std::vector<std::string> notes;
};

struct OpenedMetaStore {
  std::unique_ptr<MetaStore> store;
  MetaRecoveryReport report;
};

// MetaStore on RocksDB in `folder`. RocksDB replays a damaged log without a word, so it is opened in the mode
// that refuses, and only then, counted and reported, in the one that drops what follows the damage. The number
// of the last synced batch is kept in a file of its own beside it, so that a lost tail is noticed too.
// A store that does not open even so is renamed to `folder`.damaged-N, and an empty one takes its place: the
// caller rebuilds it from the payload.
//
// Errors: Unavailable when the folder cannot be used (permissions, another process holds it, disk).
absl::StatusOr<OpenedMetaStore> OpenRocksDbMetaStore(const std::string& folder,
                                                     const RocksDbMetaStoreOptions& options);

}  // namespace kvtrie
