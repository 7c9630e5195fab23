#include "storage/base/frame_memory.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

TEST(FrameMemoryTest, IsAlignedAndWritableInFull) {
  std::vector<void*> blocks;
  for (const std::size_t bytes : {4096u, 8192u, 266240u, 1052672u, 4194304u}) {
    void* block = AllocateFrameMemory(bytes, 4096);
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 4096, 0u);
    EXPECT_GE(FrameMemoryBytes(bytes, 4096), bytes);
    std::memset(block, 0x5a, bytes);
    blocks.push_back(block);
  }
  for (void* block : blocks) FreeFrameMemory(block);
}

TEST(FrameMemoryTest, NothingIsAskedForAndGivenBackAsNull) {
  EXPECT_EQ(AllocateFrameMemory(0, 4096), nullptr);
  EXPECT_EQ(FrameMemoryBytes(0, 4096), 0u);
  FreeFrameMemory(nullptr);
}

TEST(FrameMemoryTest, PrefaultedMemoryIsHandedOutAfterwards) {
  PrefaultFrameMemory(std::size_t{64} << 20);
  void* block = AllocateFrameMemory(std::size_t{1} << 20, 4096);
  ASSERT_NE(block, nullptr);
  std::memset(block, 1, std::size_t{1} << 20);
  FreeFrameMemory(block);
}

}  // namespace
}  // namespace kvtrie
