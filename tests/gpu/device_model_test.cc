#include "gpu/device_model.h"

#include <cstring>
#include <vector>

#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/residual_level.h"
#include "tests/gpu/gpu_fixture.h"

namespace kvtrie::gpu {
namespace {

TEST(DeviceModelTest, TableEntriesAreThoseOfTheTokens) {
  ResidualProfile profile;
  profile.table_tokens = {2, 5, 9};
  const std::vector<TokenId> tokens = {9, 1, 5, 100, 2};
  std::vector<std::int32_t> entries(7, 99);
  FindTableEntries(profile, tokens, entries);
  EXPECT_EQ(entries, (std::vector<std::int32_t>{2, -1, 1, -1, 0, -1, -1}));
}

// Rows of random values, plane by plane, are those of the processor's transforms.
TEST(BatchPlanesTest, PredictsAndRestoresAsTheProcessorDoes) {
  for (const bool per_head : {false, true}) {
    const Shape shape = {
        .layers = {{5, 2, 12, 20}}, .block_tokens = 20, .block_per_head = per_head};
    const ResidualProfile profile = RandomProfile(shape, 11);
    const ModelSpec spec = SpecOf(shape);
    const auto device = MakeHostDevice(kTwinBytes);
    const DeviceModel model = {.geometry = KvGeometry(spec),
                               .pairing = spec.rope.pairing,
                               .codec = MakeCodec(spec, profile),
                               .profile = *DeviceProfile::Upload(*device, spec, profile),
                               .importance = nullptr,
                               .raw_kv = RawKv(KvGeometry(spec), spec.rope)};
    EXPECT_EQ(model.row_groups(), 2u);
    EXPECT_EQ(model.rows_of_block(), 32u);
    MemoryLayout layout;
    const std::size_t positions_at = layout.Add<std::uint32_t>(2);
    const std::size_t entries_at = layout.Add<std::int32_t>(64);
    const BatchMemory memory(model, 2, layout);
    const DeviceMemory bytes = *DeviceMemory::Of(*device, layout.bytes());
    auto* const positions = reinterpret_cast<std::uint32_t*>(bytes.data() + positions_at);
    auto* const entries = reinterpret_cast<std::int32_t*>(bytes.data() + entries_at);
    positions[0] = 7;
    positions[1] = 4'000'000'000;
    std::vector<TokenId> tokens;
    for (TokenId t = 0; t < 64; ++t) tokens.push_back(t % 20);
    FindTableEntries(profile, tokens, {entries, 64});

    const auto stream = *device->NewStream();
    BatchPlanes planes(model, memory, 2, bytes.data(), positions, entries, *stream);
    EXPECT_EQ(planes.row_count(), 64u);
    RestoredCodes codes(profile.planes.size(), 64);
    TestRandom random(12);
    for (std::uint32_t plane = 0; plane < profile.planes.size(); ++plane) {
      const std::size_t components = profile.planes[plane].components();
      std::vector<float> values(64 * components);
      const std::vector<std::uint8_t>& scales = profile.plane_profiles[plane].scales[2];
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (random.Below(2) == 0 || scales[i % components] == kNotCoded) continue;
        values[i] = DrawNormal(random);
      }
      const PlaneTransform transform(profile, plane);
      std::vector<float> expected(64 * components);
      transform.Predict(codes, expected);
      PredictFromTokens(profile, plane, tokens, expected);
      transform.AddResidual(values, expected);
      codes.Add(plane, profile.plane_profiles[plane], profile.planes[plane], expected);

      for (std::size_t row = 0; row < 64; ++row) {
        for (std::size_t v = 0; v < components; ++v) {
          planes.values(plane)[v * 64 + row] = values[row * components + v];
        }
      }
      planes.Restore(plane, 2, planes.Predict(plane), /*with_rows=*/true);
      ASSERT_EQ(std::memcmp(planes.rows(), expected.data(), expected.size() * sizeof(float)), 0)
          << plane;
      const RawPlane raw = planes.RawOf(plane, bytes.data(), 100);
      EXPECT_EQ(raw.components, components);
      EXPECT_EQ(raw.cosines != nullptr, !profile.planes[plane].is_v);
    }
  }
}

}  // namespace
}  // namespace kvtrie::gpu
