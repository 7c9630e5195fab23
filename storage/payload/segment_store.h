#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "storage/payload/payload_store.h"

namespace kvtrie {

class FileSystem;

struct SegmentStoreOptions {
  // A segment is a file of at most so many bytes; 64 to 256 MiB. A record is never split.
  std::size_t segment_bytes = std::size_t{64} << 20;
  // How far ahead of the last record the open segment is allocated; counts as disk usage. Smaller
  // steps waste less of a small disk, but cut a segment into pieces, which costs ext4 a tenth of
  // the speed.
  std::size_t allocate_ahead_bytes = std::size_t{64} << 20;
};

// PayloadStore over append-only segment files in `folder`, written and read with O_DIRECT where the
// file system can (else through the page cache). Layout: SEGMENTS.md beside this file.
//
// Space: freeing a record punches a hole into its segment, so that `du` falls at once and no live
// record is ever moved; a page that records share is given back with the last of them, and a
// segment without live records is unlinked. Memory: a bit for each unit of the segments, 16 KiB for
// 64 MiB.
//
// `file_system` outlives the store. Errors: FailedPrecondition when the folder holds segments of a
// newer version or of another store, DataLoss when neither STORE nor any segment header tells whose
// it is, Unavailable when it cannot be read or written. One process opens a folder at a time; the
// caller sees to that.
absl::StatusOr<std::unique_ptr<PayloadStore>> OpenSegmentStore(FileSystem& file_system,
                                                               const std::string& folder,
                                                               const SegmentStoreOptions& options);

}  // namespace kvtrie
