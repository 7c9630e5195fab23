#include "storage/base/free_space.h"

#include <sys/statvfs.h>

#include <limits>

namespace kvtrie {

std::uint64_t FreeDiskBytes(const std::string& path) {
  struct statvfs disk;
  if (::statvfs(path.c_str(), &disk) != 0) return std::numeric_limits<std::uint64_t>::max();
  return std::uint64_t{disk.f_bavail} * disk.f_frsize;
}

}  // namespace kvtrie
