#include "storage/base/frame_memory.h"

#include <sys/resource.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"

extern "C" {
int mallctl(const char* name, void* old_value, std::size_t* old_bytes, void* new_value,
            std::size_t new_bytes) __attribute__((weak));
// As the server sets it.
extern const char* const malloc_conf;
const char* const malloc_conf = "lg_extent_max_active_fit:40";
}

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

std::int64_t PageFaults() {
  rusage usage{};
  EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  return usage.ru_minflt;
}

TEST(FrameMemoryTest, PrefaultedMemoryIsHandedOutAfterwards) {
  if (mallctl == nullptr) GTEST_SKIP() << "jemalloc is not linked";
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  constexpr std::size_t kBlockBytes = std::size_t{260} << 10;
  constexpr std::size_t kPageBytes = 4096;
  std::size_t told = 0;
  PrefaultFrameMemory(kBytes, [&told](std::size_t bytes) {
    told = bytes;
    return true;
  });
  EXPECT_EQ(told, kBytes);
  const std::int64_t faults_before = PageFaults();
  std::vector<void*> blocks;
  for (std::size_t done = 0; done < kBytes / 2; done += kBlockBytes) {
    blocks.push_back(AllocateFrameMemory(kBlockBytes, kPageBytes));
    ASSERT_NE(blocks.back(), nullptr);
    std::memset(blocks.back(), 1, kBlockBytes);
  }
  EXPECT_LT(PageFaults() - faults_before, static_cast<std::int64_t>(kBytes / 2 / kPageBytes / 10));
  for (void* block : blocks) FreeFrameMemory(block);
}

}  // namespace
}  // namespace kvtrie
