#include "storage/base/shared_bytes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

namespace kvtrie {
namespace {

TEST(AlignedBufferTest, IsAlignedAndRoundedUp) {
  for (const std::size_t bytes : {1u, 4095u, 4096u, 4097u, 1'000'000u}) {
    AlignedBuffer buffer(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % AlignedBuffer::kAlignment, 0u);
    EXPECT_GE(buffer.size(), bytes);
    EXPECT_LT(buffer.size(), bytes + AlignedBuffer::kAlignment);
    EXPECT_EQ(buffer.size() % AlignedBuffer::kAlignment, 0u);
    buffer.data()[bytes - 1] = std::byte{1};
  }
}

TEST(AlignedBufferTest, EmptyHoldsNothing) {
  EXPECT_EQ(AlignedBuffer().size(), 0u);
  EXPECT_EQ(AlignedBuffer(0).size(), 0u);
}

TEST(AlignedBufferTest, MovingKeepsTheMemory) {
  AlignedBuffer first(10);
  first.data()[0] = std::byte{42};
  const std::byte* const memory = first.data();
  const AlignedBuffer second = std::move(first);
  EXPECT_EQ(second.data(), memory);
  EXPECT_EQ(second.data()[0], std::byte{42});
}

TEST(SharedBytesTest, LivesAsLongAsAnyView) {
  SharedBytes view;
  EXPECT_FALSE(view);
  {
    auto buffer = std::make_shared<AlignedBuffer>(4096);
    buffer->data()[9] = std::byte{7};
    const SharedBytes whole{buffer, {buffer->data(), 10}};
    view = whole;
    view.view = view.view.subspan(9);
  }
  ASSERT_TRUE(view);
  EXPECT_EQ(view.owner.use_count(), 1);
  EXPECT_EQ(view.view.front(), std::byte{7});
}

}  // namespace
}  // namespace kvtrie
