#include "gpu/scalar_math.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "storage/codec/codec_kernels.h"
#include "storage/kv/model_spec.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie::gpu {
namespace {

constexpr int kTypes[] = {1, 2, 3, 4, 5, 6, 7};

std::vector<float> Numbers() {
  std::vector<float> numbers = {0.0f,
                                -0.0f,
                                1e-45f,
                                -1e-45f,
                                65504,
                                65520,
                                448,
                                464,
                                57344,
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::max(),
                                -127.5f,
                                254.5f,
                                255.5f};
  TestRandom random(1);
  for (int i = 0; i < 200'000; ++i) {
    // Any bits; and numbers about the ranges of the small types, ties among them.
    numbers.push_back(FloatOf(random.Below(1u << 31) ^ random.Below(2) << 31));
    const float tie = static_cast<float>(random.Below(1 << 12)) / 2;
    numbers.push_back(std::ldexp(tie, static_cast<int>(random.Below(40)) - 30));
  }
  return numbers;
}

TEST(ScalarMathTest, StoresAsTheProcessorsKernelsDo) {
  const std::vector<float> numbers = Numbers();
  for (const int type : kTypes) {
    std::vector<std::uint8_t> expected(4 * numbers.size()), stored(4 * numbers.size());
    Kernels().store_floats[type](numbers.data(), numbers.size(), expected.data());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      StoreNumber(static_cast<NumberType>(type), numbers[i], stored.data(), i);
    }
    EXPECT_TRUE(stored == expected) << type;
  }
}

TEST(ScalarMathTest, LoadsAsTheProcessorsKernelsDo) {
  for (const int type : kTypes) {
    const std::size_t bytes = DTypeBytes(static_cast<DType>(type));
    const std::size_t count = bytes == 1 ? 256 : 65536;
    std::vector<std::uint8_t> raw(count * bytes);
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t code = bytes == 4 ? i * 65537 : i;
      std::memcpy(raw.data() + i * bytes, &code, bytes);
    }
    std::vector<float> expected(count);
    Kernels().load_floats[type](raw.data(), count, expected.data());
    for (std::size_t i = 0; i < count; ++i) {
      const float loaded = LoadNumber(static_cast<NumberType>(type), raw.data(), i);
      ASSERT_EQ(BitsOf(loaded), BitsOf(expected[i])) << type << " " << i;
    }
  }
}

TEST(ScalarMathTest, CodesOfRowsAreThoseOfTheProcessor) {
  const std::vector<float> numbers = Numbers();
  const float bias[] = {0.0f, 0.375f, -4.0f};
  const float inverse[] = {1.0f, 16.5f, 0.01f};
  for (int i = 0; i < 3; ++i) {
    for (const float x : numbers) {
      std::uint8_t expected = 0;
      Kernels().residual_codes_of_rows(&x, 1, 1, &bias[i], &inverse[i], &expected);
      ASSERT_EQ(CodeOfRow(x, bias[i], inverse[i]), static_cast<int>(expected) - 128) << x;
    }
  }
}

TEST(ScalarMathTest, RowsOfProductsAreThoseOfTheProcessor) {
  TestRandom random(2);
  for (int i = 0; i < 10'000; ++i) {
    // The product of codes, and what it is of codes less 128.
    const auto product = static_cast<std::int32_t>(random.Below(1u << 31)) - (1 << 30);
    const auto sum = static_cast<std::int32_t>(random.Below(1u << 30)) - (1 << 29);
    const float offset = FloatOf(0x3F000000 + random.Below(1 << 24));
    const float scale = FloatOf(0x38000000 + random.Below(1 << 24));
    float expected = 0;
    Kernels().residual_rows_of_products(&product, 1, 1, &offset, &scale, &expected, 1);
    ASSERT_EQ(BitsOf(RowOfProduct(product - sum, sum, offset, scale)), BitsOf(expected));
  }
}

TEST(ScalarMathTest, TurnsPairsAsTheProcessorDoes) {
  constexpr std::uint32_t kDim = 22, kPairs = 9;
  TestRandom random(3);
  const auto draw = [&] { return static_cast<float>(random.Below(1 << 20)) / 4096 - 128; };
  for (const float direction : {1.0f, -1.0f}) {
    for (const bool interleaved : {false, true}) {
      std::vector<float> row(kDim), cosines(kPairs), sines(kPairs), table;
      for (float& x : row) x = draw();
      for (std::uint32_t i = 0; i < kPairs; ++i) {
        const double angle = draw();
        cosines[i] = static_cast<float>(std::cos(angle));
        sines[i] = static_cast<float>(std::sin(angle));
      }
      const std::uint32_t stride = interleaved ? 2 : 1;
      table.resize(2 * kPairs * stride);
      for (std::uint32_t i = 0; i < kPairs; ++i) {
        for (std::uint32_t j = 0; j < stride; ++j) {
          table[i * stride + j] = cosines[i];
          table[(kPairs + i) * stride + j] = j == 0 ? sines[i] : -sines[i];
        }
      }
      std::vector<float> expected = row;
      const auto rotate = interleaved ? Kernels().rotate_interleaved : Kernels().rotate_half_split;
      rotate(expected.data(), 1, 1, kDim, kPairs, table.data(), direction);
      for (std::uint32_t dim = 0; dim < 2 * kPairs; ++dim) {
        const PairOfDimension of = PairOf(dim, kPairs, interleaved);
        const float turned = TurnedComponent(row[dim], row[of.partner], of.is_first,
                                             cosines[of.pair], sines[of.pair], direction);
        EXPECT_EQ(BitsOf(turned), BitsOf(expected[dim])) << dim << interleaved << direction;
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie::gpu
