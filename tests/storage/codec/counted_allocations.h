#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvtrie {

// Counts what code under test allocates on this thread. It replaces the program's operator new: for
// one file of a test only.
struct Allocations {
  std::size_t count = 0;
  std::size_t bytes = 0;
};
inline thread_local Allocations allocations;

}  // namespace kvtrie

// Not inlined: GCC would take malloc and delete for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++kvtrie::allocations.count;
  kvtrie::allocations.bytes += bytes;
  if (void* memory = std::malloc(bytes)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
