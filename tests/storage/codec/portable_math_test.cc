#include "storage/codec/portable_math.h"

#include <bit>
#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

TEST(PortableMathTest, SineAndCosineAreThoseOfTheCLibrary) {
  for (int i = 0; i < 200'000; ++i) {
    const double angle = i < 100'000 ? i * 0.37 : i * 17.0 + 1.0 / i;
    const SineAndCosine of = PortableSineAndCosine(angle);
    const double bound = 4e-16 + angle * 0x1p-53;
    ASSERT_NEAR(of.sine, std::sin(angle), bound) << angle;
    ASSERT_NEAR(of.cosine, std::cos(angle), bound) << angle;
  }
}

TEST(PortableMathTest, PowersAreThoseOfTheCLibrary) {
  for (const double base : {1e4, 5e5, 1e6, 1e-3, 1.0, 2.0, 0.7, 1e9, 1e-9}) {
    for (int i = 0; i <= 256; ++i) {
      const double expected = std::pow(base, -i / 256.0);
      ASSERT_NEAR(PortableInversePower(base, i / 256.0), expected, 4e-15 * expected)
          << base << " " << i;
    }
  }
}

// Frames that are stored depend on them.
TEST(PortableMathTest, TheBitsStayWhatTheyAre) {
  std::uint64_t sum = 0;
  for (int i = 0; i < 1000; ++i) {
    const SineAndCosine of = PortableSineAndCosine(i * i * 0.11);
    for (const double value : {of.sine, of.cosine, PortableInversePower(1e5, i / 1000.0)}) {
      sum = sum * 0x9E3779B97F4A7C15u + std::bit_cast<std::uint64_t>(value);
    }
  }
  EXPECT_EQ(sum, 14140436722068404625u);
}

}  // namespace
}  // namespace kvtrie
