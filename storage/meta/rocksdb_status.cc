#include "storage/meta/rocksdb_status.h"

#include "absl/strings/str_cat.h"

namespace kvtrie {
namespace {

absl::StatusCode CodeOf(const rocksdb::Status& status) {
  // Subcodes first: they say more than the code, which is that of the layer that gave up.
  if (status.IsNoSpace() || status.subcode() == rocksdb::Status::kSpaceLimit ||
      status.IsMemoryLimit()) {
    return absl::StatusCode::kResourceExhausted;
  }
  switch (status.code()) {
    case rocksdb::Status::kOk:
      return absl::StatusCode::kOk;
    case rocksdb::Status::kCorruption:
      return absl::StatusCode::kDataLoss;
    case rocksdb::Status::kInvalidArgument:
    case rocksdb::Status::kNotSupported:
    case rocksdb::Status::kNotFound:
    case rocksdb::Status::kMergeInProgress:
    case rocksdb::Status::kColumnFamilyDropped:
      return absl::StatusCode::kInternal;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

}  // namespace

absl::Status FromRocksDb(absl::string_view what, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(CodeOf(status), absl::StrCat(what, ": ", status.ToString()));
}

}  // namespace kvtrie
