#include "gpu/device_model.h"

#include <cstring>
#include <vector>

#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "storage/codec/importance.h"
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

// Exponents are the estimator's, but for a few at the border of two.
TEST(BatchPlanesTest, ChoosesTheExponentsOfTheEstimator) {
  for (const std::uint64_t seed : {41u, 42u}) {
    const Shape shape = {.layers = {{2, 4, 10, 6}, {2, 2, 8, 0}, {1, 1, 12, 12}},
                         .block_tokens = 20,
                         .dtype = DType::kFloat32,
                         .rotary_dims = 6,
                         .group_count = 1,
                         .importance = true};
    const ResidualProfile profile = RandomProfile(shape, seed);
    const ModelSpec spec = SpecOf(shape);
    const KvGeometry geometry(spec);
    const Blocks blocks = RandomBlocks(shape, profile, 3, 43);
    const auto device = MakeHostDevice(kTwinBytes);
    const DeviceModel model = {.geometry = geometry,
                               .pairing = spec.rope.pairing,
                               .codec = MakeCodec(spec, profile),
                               .profile = *DeviceProfile::Upload(*device, spec, profile),
                               .raw_kv = RawKv(geometry, spec.rope)};
    constexpr std::uint32_t kRows = 3 * 32;
    const std::size_t planes_count = profile.planes.size();
    MemoryLayout layout;
    const std::size_t positions_at = layout.Add<std::uint32_t>(3);
    const std::size_t entries_at = layout.Add<std::int32_t>(kRows);
    const std::size_t behind_at = layout.Add<std::uint32_t>(kRows);
    const std::size_t given_at = layout.Add<std::int8_t>(kRows);
    const std::size_t exponents_at = layout.Add<std::int8_t>(planes_count * kRows);
    const std::size_t features_at =
        layout.Add<float>((geometry.layer_count() + 1) * kRows * LayerFeatureCount(4));
    const std::size_t raw_at = layout.Add(3 * geometry.raw_block_bytes());
    const BatchMemory memory(model, 3, layout);
    const DeviceMemory bytes = *DeviceMemory::Of(*device, layout.bytes());
    auto* const positions = reinterpret_cast<std::uint32_t*>(bytes.data() + positions_at);
    auto* const behind = reinterpret_cast<std::uint32_t*>(bytes.data() + behind_at);
    auto* const given = reinterpret_cast<std::int8_t*>(bytes.data() + given_at);
    auto* const exponents = reinterpret_cast<std::int8_t*>(bytes.data() + exponents_at);
    std::vector<std::vector<float>> rows;
    for (const PlaneShape& plane : profile.planes) rows.emplace_back(kRows * plane.components());
    std::vector<std::uint32_t> tokens_behind(kRows, 1);
    for (std::size_t b = 0; b < 3; ++b) {
      positions[b] = blocks.to_encode[b].first_position;
      std::memcpy(bytes.data() + raw_at + b * geometry.raw_block_bytes(), blocks.raw[b].data(),
                  geometry.raw_block_bytes());
      for (std::size_t p = 0; p < planes_count; ++p) {
        const PlaneShape& plane = profile.planes[p];
        model.raw_kv.ReadRows(
            blocks.raw[b], plane.layer, plane.kind(), model.raw_kv.AnglesAt(positions[b]),
            std::span(rows[p]).subspan(b * 32 * plane.components(), 20 * plane.components()));
      }
      for (std::size_t t = 0; t < 20; ++t) {
        tokens_behind[b * 32 + t] = static_cast<std::uint32_t>(60 - 20 * b - t);
      }
    }
    std::copy(tokens_behind.begin(), tokens_behind.end(), behind);
    std::fill_n(given, kRows, kNoExponent);
    given[40] = -5;
    const auto stream = *device->NewStream();
    BatchPlanes planes(model, memory, 3, bytes.data(), positions,
                       reinterpret_cast<std::int32_t*>(bytes.data() + entries_at), *stream);
    planes.ChooseExponents(bytes.data() + raw_at, behind, given, 2.0f,
                           reinterpret_cast<float*>(bytes.data() + features_at), exponents);

    const ImportanceEstimator estimator(profile, RopePairs::OfLayers(spec));
    const auto expected = estimator.Exponents(estimator.Features(rows, tokens_behind), kRows, 2.0f);
    std::size_t others = 0, not_zero = 0;
    for (std::size_t p = 0; p < planes_count; ++p) {
      for (std::size_t row = 0; row < kRows; ++row) {
        const int chosen = exponents[p * kRows + row];
        if (row == 40) {
          EXPECT_EQ(chosen, -5);
        } else if (row % 32 < 20) {
          EXPECT_NEAR(chosen, expected[p][row], 1);
          others += chosen != expected[p][row] ? 1 : 0;
          not_zero += chosen != 0 ? 1 : 0;
        }
      }
    }
    EXPECT_LE(others, planes_count * 60 / 100);
    EXPECT_GE(not_zero, planes_count * 60 / 4);
  }
}

}  // namespace
}  // namespace kvtrie::gpu
