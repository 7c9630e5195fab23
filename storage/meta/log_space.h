#pragma once

#include "rocksdb/env.h"

namespace kvtrie {

// RocksDB's default environment, but for one thing: a log (*.log) is made only where the disk still
// has room for its beginning, which is taken at once. Otherwise making it fails with NoSpace.
//
// A log writer whose first writes fail ends the process, by an assertion that Debian's build of
// RocksDB keeps (WritableFileWriter, sync_without_flush_called_).
rocksdb::Env* EnvWithLogSpace();

}  // namespace kvtrie
