#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "rocksdb/status.h"

namespace kvtrie {

// The only place where a RocksDB error becomes one of ours. `what` says what we were doing.
// DataLoss: stored bytes are damaged. ResourceExhausted: disk (or a memory bound) is full.
// Unavailable: the system refused; a retry may help. Internal: RocksDB was called wrongly.
absl::Status FromRocksDb(absl::string_view what, const rocksdb::Status& status);

}  // namespace kvtrie
