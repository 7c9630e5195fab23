#include "gpu/host_device.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "storage/codec/matrix_product.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie::gpu {
namespace {

TEST(HostDeviceTest, MemoryIsBoundedAndAligned) {
  const auto device = MakeHostDevice(10'000);
  EXPECT_EQ(device->memory_bytes(), 10'000u);
  auto first = DeviceMemory::Of(*device, 6000);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first->data()) % 256, 0u);
  EXPECT_TRUE(absl::IsUnavailable(PinnedMemory::Of(*device, 6000).status()));
  *first = DeviceMemory();
  EXPECT_TRUE(PinnedMemory::Of(*device, 6000).ok());
}

TEST(HostDeviceTest, IntegerProductsAreThoseOfTheProcessor) {
  constexpr std::uint32_t kBatches = 2, kRows = 32, kIn = 48, kOut = 16;
  TestRandom random(7);
  std::vector<std::int8_t> rows(kBatches * kRows * kIn), matrix(kBatches * kOut * kIn);
  for (std::int8_t& x : rows) x = static_cast<std::int8_t>(random.Below(255));
  for (std::int8_t& w : matrix) {
    w = static_cast<std::int8_t>(static_cast<int>(random.Below(127)) - 63);
  }
  std::vector<std::int32_t> products(kBatches * kRows * kOut);
  const auto stream = *MakeHostDevice(1)->NewStream();
  IntegerProductArgs args;
  args.rows = rows.data();
  args.matrix = matrix.data();
  args.products = products.data();
  args.batch_count = kBatches;
  args.row_count = kRows;
  args.in = kIn;
  args.out = kOut;
  stream->Multiply(args);
  for (std::uint32_t b = 0; b < kBatches; ++b) {
    const std::span<const std::int8_t> of_batch =
        std::span<const std::int8_t>(matrix).subspan(b * kOut * kIn, kOut * kIn);
    const IntegerProduct product(kIn, kOut, of_batch);
    std::vector<std::uint8_t> codes;
    for (std::size_t i = 0; i < kRows * kIn; ++i) {
      codes.push_back(static_cast<std::uint8_t>(rows[b * kRows * kIn + i] + 128));
    }
    std::vector<std::int32_t> expected(kRows * kOut);
    product.Run(codes, expected);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      std::int32_t sum = 0;
      for (std::size_t k = 0; k < kIn; ++k) sum += of_batch[i % kOut * kIn + k];
      EXPECT_EQ(products[b * kRows * kOut + i] + 128 * sum, expected[i]);
    }
  }
}

TEST(HostDeviceTest, FloatProductsAreSums) {
  constexpr std::uint32_t kBatches = 3, kRows = 4, kSize = 5;
  std::vector<float> rows, matrix, products(kRows * kBatches * kSize);
  for (std::uint32_t i = 0; i < kRows * kBatches * kSize; ++i) {
    rows.push_back(static_cast<float>(i % 7) - 3);
  }
  for (std::uint32_t i = 0; i < kBatches * kSize * kSize; ++i) {
    matrix.push_back(static_cast<float>(i % 11) - 5);
  }
  const auto stream = *MakeHostDevice(1)->NewStream();
  FloatProductArgs args;
  args.rows = rows.data();
  args.matrix = matrix.data();
  args.products = products.data();
  args.batch_count = kBatches;
  args.row_count = kRows;
  args.size = kSize;
  stream->Multiply(args);
  for (std::uint32_t row = 0; row < kRows; ++row) {
    for (std::uint32_t b = 0; b < kBatches; ++b) {
      for (std::uint32_t i = 0; i < kSize; ++i) {
        float sum = 0;
        for (std::uint32_t j = 0; j < kSize; ++j) {
          sum += rows[(row * kBatches + b) * kSize + j] * matrix[(b * kSize + j) * kSize + i];
        }
        EXPECT_EQ(products[(b * kSize + i) * kRows + row], sum);
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie::gpu
