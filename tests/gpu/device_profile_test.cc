#include "gpu/device_profile.h"

#include <vector>

#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "storage/codec/rans.h"
#include "storage/codec/residual_level.h"
#include "tests/gpu/gpu_fixture.h"

namespace kvtrie::gpu {
namespace {

TEST(SymbolTableTest, HoldsTheSlotsOfTheProcessorsTables) {
  TestRandom random(6);
  for (int round = 0; round < 50; ++round) {
    const std::uint32_t symbols = 1 + random.Below(kTableSymbols);
    std::vector<std::uint32_t> counts(symbols);
    for (std::uint32_t& count : counts) {
      count = random.Below(3) == 0 ? 0 : 1 + random.Below(1u << random.Below(20));
    }
    counts[random.Below(symbols)] = 7;
    std::vector<std::uint16_t> frequencies(symbols);
    NormalizeCounts(counts, frequencies);
    const SymbolTable table = MakeSymbolTable(frequencies);
    RansTables expected(1);
    ASSERT_TRUE(expected.Set(0, frequencies).ok());
    for (std::uint32_t slot = 0; slot < kRansFrequencySum; ++slot) {
      const std::uint32_t entry = expected.decode()[slot];
      const std::uint32_t symbol = SymbolAt(table, slot);
      ASSERT_EQ(symbol, entry & 0xFF);
      const RansSlots slots = SlotsOfSymbol(table, symbol);
      EXPECT_EQ(slots.frequency, (entry >> 20) + 1);
      EXPECT_EQ(slot - slots.begin, entry >> 8 & 0xFFF);
      const std::uint32_t state = (1 + random.Below(0xFFFFF)) << 12 | slot;
      const RansStep step = DecodeSymbol(table, state);
      if (!IsFull(step.state, slots)) {
        EXPECT_EQ(EncodeState(step.state, slots), state);
      }
    }
    for (std::uint32_t symbol = 0; symbol < symbols; ++symbol) {
      EXPECT_EQ(SlotsOfSymbol(table, symbol).frequency, frequencies[symbol]);
    }
  }
}

TEST(DeviceProfileTest, HasWhatTheProfileHas) {
  const Shape shape = {.layers = {{3, 2, 10, 6}}, .block_per_head = true, .first_token = true};
  const ResidualProfile profile = RandomProfile(shape, 2);
  const auto device = MakeHostDevice(kTwinBytes);
  const auto made = DeviceProfile::Upload(*device, SpecOf(shape), profile);
  ASSERT_TRUE(made.ok()) << made.status();
  const DeviceProfile& on_device = **made;
  EXPECT_EQ(on_device.LevelOf(Quality::kHigh), 0);
  EXPECT_EQ(on_device.LevelOf(Quality::kSmall), 2);
  EXPECT_EQ(on_device.LevelOf(Quality::kExact), -1);
  EXPECT_EQ(on_device.step(2), profile.levels[2].step);
  EXPECT_EQ(on_device.components_max(), 20u);
  EXPECT_EQ(on_device.component_count(), profile.component_count());
  EXPECT_EQ(on_device.table_width(), 32u);
  ASSERT_EQ(on_device.rotations().size(), 1u);
  EXPECT_EQ(on_device.rotations()[0].pairs, 5u);
  EXPECT_EQ(on_device.RotationOf(1), 0);
  const DevicePlane& v = on_device.planes()[1];
  EXPECT_EQ(v.table_first, 20u);
  EXPECT_EQ(v.block_components, 6u);
  EXPECT_EQ(v.out, 16u);
  const DevicePlane& k = on_device.planes()[4];
  ASSERT_FALSE(k.inputs.empty());
  std::size_t in = 0;
  for (const std::uint32_t input : k.inputs) in += profile.planes[input].components() / 2;
  EXPECT_EQ(k.in, (in + 15) / 16 * 16);
  // Component 3 of the second head.
  const std::size_t at = (std::size_t{k.out} + 3) * k.in;
  std::int32_t sum = 0;
  for (std::size_t i = 0; i < k.in; ++i) {
    const int expected = i < in ? profile.plane_profiles[4].weights[13 * in + i] : 0;
    EXPECT_EQ(k.weights[at + i], expected);
    sum += expected;
  }
  EXPECT_EQ(k.sums[13], 128 * sum);

  const std::vector<std::uint32_t> limits = SymbolLimits(profile);
  const PlaneSymbols symbols = on_device.SymbolsOf(4, 1);
  for (std::size_t c = 0; c < limits.size(); ++c) EXPECT_EQ(symbols.tables[c].limit, limits[c]);
  EXPECT_EQ(symbols.step, profile.levels[1].step);
  EXPECT_EQ(symbols.scales[7], profile.plane_profiles[4].scales[1][7]);
}

TEST(DeviceProfileTest, ModelsThatDoNotRotateHaveNoRotation) {
  const Shape shape = {.layers = {{2, 1, 4, 4}}, .pairing = RopePairing::kNone};
  const auto device = MakeHostDevice(kTwinBytes);
  const auto made = DeviceProfile::Upload(*device, SpecOf(shape), RandomProfile(shape, 2));
  ASSERT_TRUE(made.ok());
  EXPECT_TRUE((*made)->rotations().empty());
  EXPECT_EQ((*made)->RotationOf(0), -1);
}

TEST(DeviceProfileTest, NoRoomIsUnavailable) {
  const Shape shape = {.layers = {{2, 2, 16, 16}}};
  const ResidualProfile profile = RandomProfile(shape, 2);
  for (const std::size_t bytes : {0, 20'000, 40'000}) {
    const auto device = MakeHostDevice(bytes);
    EXPECT_TRUE(
        absl::IsUnavailable(DeviceProfile::Upload(*device, SpecOf(shape), profile).status()));
  }
}

TEST(DeviceProfileTest, TooManyInputsAreNotForDevices) {
  const Shape shape = {.layers = {{3, 1, 2, 2}}};
  ResidualProfile profile = RandomProfile(shape, 2);
  PlaneProfile& last = profile.plane_profiles.back();
  last.inputs.assign(9, PredictorInput::kLayerBelow);
  last.weights.assign(2 * 36, 1);
  ASSERT_TRUE(profile.CheckConsistency().ok());
  const auto device = MakeHostDevice(kTwinBytes);
  EXPECT_TRUE(absl::IsUnavailable(DeviceProfile::Upload(*device, SpecOf(shape), profile).status()));
}

}  // namespace
}  // namespace kvtrie::gpu
