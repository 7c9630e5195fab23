#pragma once

#include <cstdint>
#include <string>

namespace kvtrie {

// Bytes that may still be written to the disk of `path`; the largest number where the system does
// not say, since writing will tell.
std::uint64_t FreeDiskBytes(const std::string& path);

}  // namespace kvtrie
