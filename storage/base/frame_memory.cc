#include "storage/base/frame_memory.h"

#include <sys/mman.h>
#include <sys/types.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

// jemalloc's own interface (jemalloc(3)); null where another allocator is linked.
extern "C" {
void* mallocx(std::size_t bytes, int flags) __attribute__((weak));
std::size_t nallocx(std::size_t bytes, int flags) __attribute__((weak));
void dallocx(void* memory, int flags) __attribute__((weak));
int mallctl(const char* name, void* old_value, std::size_t* old_bytes, void* new_value,
            std::size_t new_bytes) __attribute__((weak));
}

namespace kvtrie {
namespace {

// jemalloc's flag bits: alignment as its logarithm, arena + 1 from bit 20 on, cache + 2 from bit 8
// on.
constexpr int kNoThreadCache = 1 << 8;
int AlignmentFlag(std::size_t alignment) { return std::countr_zero(alignment); }
int ArenaFlag(unsigned arena) { return static_cast<int>((arena + 1) << 20); }

// The arena's flag, or 0 when there is none.
int FrameArenaFlag() {
  static const int flag = [] {
    if (mallctl == nullptr || mallocx == nullptr || dallocx == nullptr) return 0;
    unsigned arena = 0;
    std::size_t arena_bytes = sizeof arena;
    if (mallctl("arenas.create", &arena, &arena_bytes, nullptr, 0) != 0) return 0;
    ssize_t never = -1;
    const std::string prefix = "arena." + std::to_string(arena) + ".";
    mallctl((prefix + "dirty_decay_ms").c_str(), nullptr, nullptr, &never, sizeof never);
    mallctl((prefix + "muzzy_decay_ms").c_str(), nullptr, nullptr, &never, sizeof never);
    return ArenaFlag(arena);
  }();
  return flag;
}

}  // namespace

void* AllocateFrameMemory(std::size_t bytes, std::size_t alignment) {
  if (bytes == 0) return nullptr;
  const int arena = FrameArenaFlag();
  if (arena == 0) return std::aligned_alloc(alignment, bytes);
  return mallocx(bytes, arena | AlignmentFlag(alignment) | kNoThreadCache);
}

void FreeFrameMemory(void* memory) {
  if (memory == nullptr) return;
  if (FrameArenaFlag() == 0) {
    std::free(memory);
  } else {
    dallocx(memory, kNoThreadCache);
  }
}

std::size_t FrameMemoryBytes(std::size_t bytes, std::size_t alignment) {
  if (bytes == 0) return 0;
  const int arena = FrameArenaFlag();
  return arena == 0 ? bytes : nallocx(bytes, arena | AlignmentFlag(alignment) | kNoThreadCache);
}

void PrefaultFrameMemory(std::size_t bytes, const std::function<bool(std::size_t)>& go_on) {
  constexpr std::size_t kPieceBytes = std::size_t{32} << 20;
  constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
  if (FrameArenaFlag() == 0) return;
  std::vector<void*> pieces;
  for (std::size_t done = 0; done < bytes; done += kPieceBytes) {
    void* piece = AllocateFrameMemory(kPieceBytes, kHugePageBytes);
    if (piece == nullptr) break;
    // Both are hints: a system that knows neither faults pages in one by one, later.
    madvise(piece, kPieceBytes, MADV_HUGEPAGE);
    madvise(piece, kPieceBytes, MADV_POPULATE_WRITE);
    pieces.push_back(piece);
    if (!go_on(std::min(bytes, done + kPieceBytes))) break;
  }
  for (void* piece : pieces) FreeFrameMemory(piece);
}

}  // namespace kvtrie
