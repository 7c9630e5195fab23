#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "storage/base/byte_reader.h"
#include "storage/payload/payload_store.h"
#include "tests/storage/payload/payload_test_support.h"

namespace kvtrie {
namespace {

TEST(PayloadRecordTest, HoldsDescriptorAndPayload) {
  PayloadRecord record = MakeRecord("payload", "descriptor");
  EXPECT_EQ(AsText(record.descriptor()), "descriptor");
  EXPECT_EQ(AsText(record.payload()), "payload");
  EXPECT_EQ(record.record_bytes(), record.payload_offset() + 7);
}

TEST(PayloadRecordTest, PayloadIsAlignedForEveryDescriptor) {
  for (std::size_t bytes = 0; bytes <= 200; ++bytes) {
    PayloadRecord record(std::string(bytes, 'd'), 1);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(record.payload().data()) % 64, 0u);
    EXPECT_GE(record.payload_offset(), PayloadRecord::kHeaderBytes + bytes);
    EXPECT_LT(record.payload_offset(), PayloadRecord::kHeaderBytes + bytes + 64);
  }
}

TEST(PayloadRecordTest, LargestDescriptorFits) {
  const std::string descriptor(PayloadRecord::kDescriptorBytesMax, 'd');
  PayloadRecord record(descriptor, 5);
  EXPECT_EQ(AsText(record.descriptor()), descriptor);
}

TEST(PayloadRecordTest, EverythingButThePayloadIsZeroed) {
  PayloadRecord record = MakeRecord(std::string(5000, 'p'), "descriptor");
  const auto memory = record.memory();
  EXPECT_EQ(memory.size() % PayloadLocation::kPageBytes, 0u);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const bool descriptor = i >= 64 && i < 64 + 10;
    const bool payload = i >= record.payload_offset() && i < record.record_bytes();
    if (descriptor || payload) continue;
    ASSERT_EQ(memory[i], std::byte{}) << i;
  }
}

TEST(PayloadRecordTest, PayloadOutlivesTheRecord) {
  SharedBytes bytes;
  {
    PayloadRecord record = MakeRecord("payload");
    const void* const memory = record.payload().data();
    bytes = std::move(record).TakePayload();
    EXPECT_EQ(bytes.view.data(), memory);
  }
  EXPECT_EQ(TextOf(bytes), "payload");
}

TEST(PayloadRecordTest, GroupTakesUnitsAndTheRestOfAPage) {
  PayloadRecord small("", 400);    // 464 bytes, 1 unit
  PayloadRecord medium("", 500);   // 564 bytes, 2 units
  PayloadRecord large("", 8'128);  // 8192 bytes, 16 units
  EXPECT_EQ(GroupDiskBytes(std::vector{&small}), 4096u);
  EXPECT_EQ(GroupDiskBytes(std::vector{&small, &medium}), 4096u);
  EXPECT_EQ(GroupDiskBytes(std::vector{&large}), 8192u);
  EXPECT_EQ(GroupDiskBytes(std::vector{&large, &small}), 12'288u);
  EXPECT_EQ(GroupDiskBytes(std::vector{&medium, &medium, &medium, &medium}), 4096u);
}

TEST(PayloadLocationTest, DiskBytesAreWholeUnits) {
  PayloadLocation at{1, 8, 1};
  EXPECT_EQ(at.disk_bytes(), 512u);
  at.record_bytes = 512;
  EXPECT_EQ(at.disk_bytes(), 512u);
  at.record_bytes = 513;
  EXPECT_EQ(at.disk_bytes(), 1024u);
  at.record_bytes = 0xffffffff;
  EXPECT_EQ(at.disk_bytes(), std::uint64_t{1} << 32);
  EXPECT_FALSE(PayloadLocation{});
  EXPECT_TRUE(at);
}

TEST(PayloadRecordTest, AnotherDescriptorOfTheSameSizeTakesItsPlace) {
  PayloadRecord record("first", 100);
  std::fill(record.payload().begin(), record.payload().end(), std::byte{7});
  record.ReplaceDescriptor("other");
  EXPECT_EQ(std::memcmp(record.descriptor().data(), "other", 5), 0);
  EXPECT_EQ(record.descriptor().size(), 5u);
  EXPECT_TRUE(std::all_of(record.payload().begin(), record.payload().end(),
                          [](std::byte byte) { return byte == std::byte{7}; }));
  EXPECT_DEATH(record.ReplaceDescriptor("longer"), "descriptor_bytes_");
}

}  // namespace
}  // namespace kvtrie
