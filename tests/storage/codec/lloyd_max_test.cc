#include "storage/codec/lloyd_max.h"

#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

// Max 1960, table 1: codewords of a normal distribution, which a component times sqrt(dim) nears.
TEST(LloydMaxTest, ManyDimensionsAreNormal) {
  const double two_bits[] = {0.4528, 1.510};
  const double three_bits[] = {0.2451, 0.7560, 1.344, 2.152};
  const double four_bits[] = {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733};
  const auto check = [](std::uint32_t bits, std::span<const double> expected) {
    const LloydMaxCodebook book = MakeLloydMaxCodebook(4096, bits);
    ASSERT_EQ(book.codewords.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(book.codewords[i] * 64, expected[i], 2e-3 * expected[i]) << bits << " " << i;
    }
  };
  check(2, two_bits);
  check(3, three_bits);
  check(4, four_bits);
}

TEST(LloydMaxTest, ThreeDimensionsAreUniform) {
  // A component of a random direction in space is uniform (Archimedes).
  for (const std::uint32_t bits : {1u, 2u, 3u, 4u, 5u}) {
    const LloydMaxCodebook book = MakeLloydMaxCodebook(3, bits);
    const double step = 1.0 / static_cast<double>(book.codewords.size());
    for (std::size_t i = 0; i < book.codewords.size(); ++i) {
      EXPECT_NEAR(book.codewords[i], (static_cast<double>(i) + 0.5) * step, 1e-6);
    }
  }
}

TEST(LloydMaxTest, BoundsLieInTheMiddle) {
  for (const std::uint32_t dim : {2u, 3u, 5u, 16u, 80u, 128u, 576u}) {
    for (const std::uint32_t bits : {1u, 2u, 5u}) {
      const LloydMaxCodebook book = MakeLloydMaxCodebook(dim, bits);
      ASSERT_EQ(book.codewords.size(), 1u << (bits - 1));
      ASSERT_EQ(book.bounds.size() + 1, book.codewords.size());
      EXPECT_GT(book.codewords[0], 0.0f);
      EXPECT_LT(book.codewords.back(), 1.0f);
      for (std::size_t i = 0; i < book.bounds.size(); ++i) {
        EXPECT_LT(book.codewords[i], book.codewords[i + 1]);
        EXPECT_NEAR(book.bounds[i], (book.codewords[i] + book.codewords[i + 1]) / 2, 1e-7);
      }
    }
  }
}

TEST(LloydMaxTest, CodewordsAreTheMeansOfWhatTheyStandFor) {
  constexpr std::uint32_t kDim = 7;
  const LloydMaxCodebook book = MakeLloydMaxCodebook(kDim, 3);
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  std::vector<double> sums(book.codewords.size());
  std::vector<double> counts(book.codewords.size());
  for (int i = 0; i < 200000; ++i) {
    double components[kDim];
    double square = 0;
    for (double& component : components) {
      component = normal(random);
      square += component * component;
    }
    const double magnitude = std::abs(components[0]) / std::sqrt(square);
    std::size_t word = 0;
    while (word < book.bounds.size() && magnitude >= book.bounds[word]) ++word;
    sums[word] += magnitude;
    counts[word] += 1;
  }
  for (std::size_t i = 0; i < sums.size(); ++i) {
    EXPECT_NEAR(sums[i] / counts[i], book.codewords[i], 2e-3) << i;  // 5 sigma of the rarest
  }
}

TEST(LloydMaxTest, OneDimensionHasOneMagnitude) {
  const LloydMaxCodebook book = MakeLloydMaxCodebook(1, 4);
  for (const float word : book.codewords) EXPECT_EQ(word, 1.0f);
  for (const float bound : book.bounds) EXPECT_GT(bound, 1.0f);
}

}  // namespace
}  // namespace kvtrie
