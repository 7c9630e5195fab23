#pragma once

#include <cstdint>
#include <cstring>
#include <random>

namespace kvtrie {

// An id that nobody can guess, from the operating system's randomness. Never empty.
template <typename Id>
Id RandomId() {
  std::random_device device;
  Id id;
  do {
    for (std::size_t at = 0; at < Id::kBytes; at += sizeof(std::uint32_t)) {
      const std::uint32_t word = device();
      std::memcpy(id.bytes.data() + at, &word, sizeof word);
    }
  } while (id.empty());
  return id;
}

}  // namespace kvtrie
