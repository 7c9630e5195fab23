#pragma once

#include <cstddef>
#include <functional>

namespace kvtrie {

// Memory for blocks and records: large, aligned, short of life, and bounded by the budgets of
// whoever asks. Where the process links jemalloc it has an arena of its own that never gives pages
// back to the system, so that a block does not pay for fresh pages (which cost more than everything
// else that is done to it); else it comes from the C library. Thread-safe.

// REQUIRES: alignment is a power of two, bytes a multiple of it. Null when memory is exhausted.
void* AllocateFrameMemory(std::size_t bytes, std::size_t alignment);
void FreeFrameMemory(void* memory);

// What an allocation really takes.
std::size_t FrameMemoryBytes(std::size_t bytes, std::size_t alignment);

// Has the system provide so many bytes now, in huge pages where it can, instead of at first use.
// Takes about half a second per GiB (five times that where a hypervisor has to provide them first).
// `go_on` is told after each piece how many bytes are there; it ends the work by returning false.
// Does nothing without jemalloc.
void PrefaultFrameMemory(std::size_t bytes, const std::function<bool(std::size_t)>& go_on);

}  // namespace kvtrie
