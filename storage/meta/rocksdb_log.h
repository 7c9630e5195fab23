#pragma once

#include <memory>
#include <string>

#include "rocksdb/env.h"

namespace kvtrie {

// RocksDB's own log: warnings and errors, in `folder`/LOG and one older file, 1 MiB each. Lines
// that cannot be written are dropped. RocksDB's writer would end the process with an assertion
// (which Debian's build keeps) at the first line after the disk was full.
std::shared_ptr<rocksdb::Logger> OpenRocksDbLog(const std::string& folder);

}  // namespace kvtrie
