#include "gpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/device_profile.h"
#include "gtest/gtest.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/residual_level.h"
#include "tests/gpu/gpu_fixture.h"

namespace kvtrie::gpu {
namespace {

TEST(SymbolMathTest, BitsGoThereAndBack) {
  TestRandom random(4);
  for (int i = 0; i < 100'000; ++i) {
    const std::uint32_t count = random.Below(13);
    const std::uint32_t bits = random.Below(1u << count);
    const RansSlots slots = SlotsOfBits(bits, count);
    std::uint32_t state = kRansStateMin + random.Below(0x7FFF0000) * 2;
    if (IsFull(state, slots)) state >>= 16;
    const RansStep step = DecodeBits(count, EncodeState(state, slots));
    ASSERT_EQ(step.symbol, bits);
    ASSERT_EQ(step.state, state);
  }
}

TEST(SymbolMathTest, PackedValuesComeBack) {
  for (const std::int32_t value : {0, 1, -1, 63, -64, kValueMax, -kValueMax}) {
    for (std::int32_t half = 0; half <= kScaleIndexMax / 2; ++half) {
      EXPECT_EQ(PackedValue(PackValue(value, half)), value);
      EXPECT_EQ(PackedHalf(PackValue(value, half)), half);
    }
  }
}

TEST(SymbolMathTest, QuarterOctavesAreRootsOfTwo) {
  for (std::int32_t e = -kExponentMax; e <= kExponentMax; ++e) {
    EXPECT_NEAR(QuarterOctaves(e) / std::exp2(e / 4.0), 1, 1e-6) << e;
    if (e % 4 == 0) {
      EXPECT_EQ(QuarterOctaves(e), std::exp2(static_cast<float>(e / 4)));
    }
  }
}

// Values, contexts and their tables are what the processor's encoder makes of the same targets.
TEST(KernelsTest, QuantizesAsTheProcessorsKernelDoes) {
  constexpr std::size_t kCount = 300;
  const Shape shape = {.layers = {{1, 1, 2, 2}}, .group_count = 1};
  const ResidualProfile profile = RandomProfile(shape, 1);
  const SymbolTables symbols = SymbolTables::Of(profile).value();
  const std::vector<float> thresholds = RateThresholds(profile, 0.2f);
  const ResidualTables tables = symbols.Tables(thresholds.data());
  TestRandom random(5);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint8_t> scales(kCount), groups(kCount);
    std::vector<float> targets(kCount * kLanes), expected(kCount * kLanes);
    std::vector<std::int32_t> exponents(kLanes);
    std::vector<std::int8_t> small_exponents(kLanes), shifts(kLanes);
    for (std::int32_t& e : exponents) e = static_cast<std::int32_t>(random.Below(17)) - 8;
    std::copy(exponents.begin(), exponents.end(), small_exponents.begin());
    for (std::size_t v = 0; v < kCount; ++v) {
      scales[v] = static_cast<std::uint8_t>(random.Below(160));
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const float size = std::exp2(static_cast<float>(scales[v]) / 8 - 8);
        targets[v * kLanes + lane] =
            size * DrawNormal(random) * (random.Below(30) == 0 ? 50.0f : 1.0f);
      }
    }
    ResidualCarry carry;
    ResidualPlane plane = {.scales = scales.data(),
                           .groups = groups.data(),
                           .coded_count = kCount,
                           .group_count = 1,
                           .exponent_table = kScaleClasses};
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      carry.shift[lane] = shifts[lane] =
          static_cast<std::int8_t>(static_cast<int>(random.Below(49)) - 24);
    }
    std::vector<std::uint32_t> records((1 + kCount * kResidualStepsMax) * kLanes);
    Kernels().residual_encode(tables, plane, kAllLanes, exponents.data(), targets.data(), &carry,
                              expected.data(), records.data());

    std::vector<float> values(kLanes * kCount);
    for (std::size_t v = 0; v < kCount; ++v) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        values[v * kLanes + lane] = targets[v * kLanes + lane];
      }
    }
    const std::vector<std::uint8_t> active(kLanes, 1);
    std::vector<std::uint32_t> packed(kCount * kLanes);
    std::vector<std::uint16_t> out_of_range(kLanes, kInRange);
    QuantizePlaneArgs args;
    args.symbols.expected = profile.expected.data();
    args.symbols.carried = profile.carried.data();
    args.symbols.offsets = profile.offsets.data();
    args.symbols.thresholds = thresholds.data();
    args.symbols.scales = scales.data();
    args.symbols.components = kCount;
    args.symbols.block_components = kCount;
    args.symbols.exponent_groups = 1;
    args.symbols.prior = profile.prior;
    args.symbols.step = 1;
    args.active = active.data();
    args.exponents = small_exponents.data();
    args.shifts = shifts.data();
    args.values = values.data();
    args.packed = packed.data();
    args.out_of_range = out_of_range.data();
    args.inverse_step = 1;
    args.row_count = kLanes;
    for (std::uint32_t row = 0; row < kLanes; ++row) QuantizePlaneStep(args, row);
    for (std::size_t v = 0; v < kCount; ++v) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        ASSERT_EQ(BitsOf(values[v * kLanes + lane]), BitsOf(expected[v * kLanes + lane]))
            << v << " " << lane;
      }
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      EXPECT_EQ(shifts[lane], carry.shift[lane]);
      EXPECT_EQ(out_of_range[lane], kInRange);
    }
  }
}

TEST(KernelsTest, ValuesOutOfRangeAreMarkedOnce) {
  const Shape shape = {.layers = {{1, 1, 2, 2}}};
  const ResidualProfile profile = RandomProfile(shape, 1);
  const std::vector<float> thresholds = RateThresholds(profile, 0.2f);
  const std::uint8_t scales[2] = {80, kNotCoded};
  const float values[][2] = {{4e6f, 15.9f}, {-4.3e6f, 0}, {0, 16.5f},
                             {0, -16.5f},   {0, NAN},     {NAN, 0}};
  for (std::uint16_t i = 0; i < std::size(values); ++i) {
    float of_row[2] = {values[i][0], values[i][1]};
    const std::uint8_t active = 1;
    std::int8_t shift = 0;
    std::uint32_t packed[2 * kLanes];
    std::uint16_t out_of_range = kInRange;
    QuantizePlaneArgs args;
    args.symbols.expected = profile.expected.data();
    args.symbols.carried = profile.carried.data();
    args.symbols.offsets = profile.offsets.data();
    args.symbols.thresholds = thresholds.data();
    args.symbols.scales = scales;
    args.symbols.components = args.symbols.block_components = 2;
    args.symbols.step = 1;
    args.active = &active;
    args.exponents = nullptr;
    args.shifts = &shift;
    args.values = of_row;
    args.packed = packed;
    args.out_of_range = &out_of_range;
    args.plane = i;
    args.inverse_step = 1;
    args.row_count = 1;
    QuantizePlaneStep(args, 0);
    EXPECT_EQ(out_of_range, i == 0 ? kInRange : i);
    EXPECT_EQ(of_row[1], 0);
    const std::uint16_t before = out_of_range;
    args.plane = 99;
    of_row[0] = 1e20f;
    QuantizePlaneStep(args, 0);
    EXPECT_EQ(out_of_range, before == kInRange ? 99 : before);
  }
}

TEST(KernelsTest, GatheredCodesEndInZeros) {
  const std::int8_t first[] = {1, 2, 3, 4, 5, 6};                 // 1 row, 2 blocks of 3
  const std::int8_t second[] = {11, 12, 13, 14, 15, 16, 17, 18};  // 2 blocks of 4
  std::int8_t gathered[2 * 16];
  GatherArgs args;
  args.codes[0] = first;
  args.codes[1] = second;
  args.widths[0] = 3;
  args.widths[1] = 4;
  args.input_count = 2;
  args.in_stride = 16;
  args.plane_blocks = 2;
  args.row_count = 1;
  args.gathered = gathered;
  for (std::uint32_t block = 0; block < 2; ++block) {
    for (std::uint32_t quad = 0; quad < 4; ++quad) GatherStep(args, block, 0, quad);
  }
  const std::vector<std::int8_t> expected = {1, 2, 3, 11, 12, 13, 14, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                             4, 5, 6, 15, 16, 17, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), gathered));
}

TEST(KernelsTest, AddingNothingLeavesTheSignOfZero) {
  const float offset = -0.0f, scale = 1;
  alignas(16) const float value[kTileRows] = {};
  const std::uint8_t coded = 80;
  const std::int8_t basis = 127;
  float rows[kTileRows];
  std::int8_t codes[kTileRows];
  RestoreRowsArgs args;
  args.prediction.offset = &offset;
  args.prediction.components = args.prediction.block_components = 1;
  args.prediction.row_count = kTileRows;
  args.values = value;
  args.scales = &coded;
  args.basis = &basis;
  args.basis_scales = args.inverse_scales = &scale;
  args.bias = value;
  args.rows = rows;
  args.codes = codes;
  RestoreRowsStep(args, 0, 0);
  EXPECT_EQ(BitsOf(rows[0]), BitsOf(-0.0f));
}

}  // namespace
}  // namespace kvtrie::gpu
