#include "storage/codec/matrix_product.h"

#include <cmath>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

constexpr std::size_t kRowCounts[] = {16, 32, 48, 64, 112, 240, 256, 272, 528};
// [in, out]: single ones, odd ones, and those of models.
constexpr std::pair<std::size_t, std::size_t> kSizes[] = {{1, 1},   {3, 5},    {16, 16},
                                                          {17, 33}, {64, 192}, {1153, 7}};

TEST(IntegerProductTest, EqualsASlowLoopForEveryBatch) {
  TestRandom random(1);
  for (const auto& [in, out] : kSizes) {
    std::vector<std::int8_t> matrix(in * out);
    for (auto& w : matrix) w = static_cast<std::int8_t>(static_cast<int>(random.Below(127)) - 63);
    const IntegerProduct product(in, out, matrix);
    for (const std::size_t row_count : kRowCounts) {
      std::vector<std::uint8_t> rows(row_count * in);
      for (auto& x : rows) x = static_cast<std::uint8_t>(random.Below(256));
      std::vector<std::int32_t> products(row_count * out, -1);
      product.Run(rows, products);
      for (std::size_t row = 0; row < row_count; ++row) {
        for (std::size_t o = 0; o < out; ++o) {
          std::int64_t expected = 0;
          for (std::size_t i = 0; i < in; ++i) expected += matrix[o * in + i] * rows[row * in + i];
          ASSERT_EQ(products[row * out + o], expected) << in << " " << out << " " << row_count;
        }
      }
    }
  }
}

// Where sums of two products in 16 bits would saturate, were weights one larger.
TEST(IntegerProductTest, ExtremesOfRowsAndWeightsAreExact) {
  for (const std::size_t in : {std::size_t{2}, std::size_t{1000}, IntegerProduct::kInputsMax}) {
    for (const int weight : {-IntegerProduct::kWeightMax, IntegerProduct::kWeightMax}) {
      const std::vector<std::int8_t> matrix(in, static_cast<std::int8_t>(weight));
      const IntegerProduct product(in, 1, matrix);
      const std::vector<std::uint8_t> rows(16 * in, 255);
      std::vector<std::int32_t> products(16);
      product.Run(rows, products);
      for (const std::int32_t p : products) {
        ASSERT_EQ(p, static_cast<std::int64_t>(in) * 255 * weight) << in;
      }
    }
  }
}

// Sums in any order are within n * 2^-24 of the sum of magnitudes (Higham, Accuracy and Stability,
// 4.2), to first order; fused or not.
TEST(FloatProductTest, IsWithinTheRoundingOfItsSums) {
  TestRandom random(2);
  const auto draw = [&random] {
    return (static_cast<float>(random.Below(1u << 20)) - 0x1p19f) *
           std::exp2(static_cast<float>(random.Below(24)) - 36);
  };
  for (const auto& [in, out] : kSizes) {
    std::vector<float> matrix(in * out);
    for (float& w : matrix) w = draw();
    const FloatProduct product(in, out, matrix);
    for (const std::size_t row_count : kRowCounts) {
      std::vector<float> rows(row_count * in);
      for (float& x : rows) x = draw();
      std::vector<float> products(row_count * out, -1);
      product.Run(rows, products);
      for (std::size_t row = 0; row < row_count; ++row) {
        for (std::size_t o = 0; o < out; ++o) {
          double expected = 0, magnitudes = 0;
          for (std::size_t i = 0; i < in; ++i) {
            const double p = double{rows[row * in + i]} * matrix[i * out + o];
            expected += p;
            magnitudes += std::abs(p);
          }
          const double rounding = 0x1p-24 * static_cast<double>(in + 1) * magnitudes;
          ASSERT_NEAR(products[row * out + o], expected, rounding) << in << " " << out;
        }
      }
    }
  }
}

// What a row gives does not depend on the rows beside it: blocks code alike alone and together.
TEST(FloatProductTest, ARowGivesTheSameBitsInEveryBatch) {
  TestRandom random(3);
  for (const auto& [in, out] : kSizes) {
    std::vector<float> matrix(in * out), rows(528 * in);
    for (float& w : matrix) w = static_cast<float>(random.Below(1000)) - 500.3f;
    for (float& x : rows) x = static_cast<float>(random.Below(1000)) - 499.7f;
    const FloatProduct product(in, out, matrix);
    std::vector<float> together(528 * out), alone(16 * out);
    product.Run(rows, together);
    for (std::size_t at = 0; at < 528; at += 16) {
      product.Run(std::span(rows).subspan(at * in, 16 * in), alone);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                             together.begin() + static_cast<std::ptrdiff_t>(at * out)))
          << in << " " << out << " at " << at;
    }
  }
}

TEST(FloatProductTest, CallersOnSeveralThreadsDoNotDisturbEachOther) {
  constexpr std::size_t kIn = 40, kOut = 24, kRows = 272;
  TestRandom random(4);
  std::vector<float> matrix(kIn * kOut), rows(kRows * kIn);
  for (float& w : matrix) w = static_cast<float>(random.Below(100));
  for (float& x : rows) x = static_cast<float>(random.Below(100));
  const FloatProduct product(kIn, kOut, matrix);
  std::vector<float> expected(kRows * kOut);
  product.Run(rows, expected);
  std::vector<std::vector<float>> found(4, std::vector<float>(kRows * kOut));
  std::vector<std::thread> threads;
  for (auto& to : found) {
    threads.emplace_back([&product, &rows, &to] {
      for (int i = 0; i < 50; ++i) product.Run(rows, to);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_thread : found) EXPECT_EQ(of_thread, expected);
}

TEST(TransposedProductTest, IsWithinTheRoundingOfItsSums) {
  TestRandom random(5);
  for (const std::size_t row_count : {1u, 17u, 300u}) {
    constexpr std::size_t kA = 5, kB = 9;
    std::vector<float> a(row_count * kA), b(row_count * kB), product(kA * kB, -1);
    for (float& x : a) x = static_cast<float>(random.Below(2000)) - 1000;
    for (float& x : b) x = static_cast<float>(random.Below(2000)) - 1000;
    TransposedProduct(a, kA, b, kB, product);
    for (std::size_t i = 0; i < kA; ++i) {
      for (std::size_t j = 0; j < kB; ++j) {
        double expected = 0, magnitudes = 0;
        for (std::size_t row = 0; row < row_count; ++row) {
          const double p = double{a[row * kA + i]} * b[row * kB + j];
          expected += p;
          magnitudes += std::abs(p);
        }
        EXPECT_NEAR(product[i * kB + j], expected,
                    0x1p-24 * static_cast<double>(row_count + 1) * magnitudes);
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie
