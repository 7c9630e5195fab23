#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/device_coder.h"
#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "storage/codec/importance.h"
#include "tests/storage/codec/residual_fixture.h"

// Models, profiles and blocks of any shape, for the host twin to be held against ResidualCodec.
namespace kvtrie::gpu {

struct Shape {
  std::vector<LayerRun> layers;
  std::uint32_t block_tokens = 16;
  DType dtype = DType::kBfloat16;
  RopePairing pairing = RopePairing::kHalfSplit;
  std::uint32_t rotary_dims = 0;
  bool block_per_head = false;
  std::uint32_t group_count = 0;  // 0, 1, or 2: one per block of a plane
  bool importance = false;        // a model of it
  bool first_token = false;
  std::uint32_t drawn_tokens = 5;  // of the token table

  std::string Text() const {
    std::string text;
    for (const LayerRun& run : layers) {
      text += std::to_string(run.layer_count) + "x" + std::to_string(run.kv_heads) + "x(" +
              std::to_string(run.k_head_dim) + "," + std::to_string(run.v_head_dim) + ") ";
    }
    return text + "tokens " + std::to_string(block_tokens) + " dtype " +
           std::to_string(static_cast<int>(dtype)) + " pairing " +
           std::to_string(static_cast<int>(pairing)) + " dims " + std::to_string(rotary_dims) +
           " per head " + std::to_string(block_per_head) + " groups " +
           std::to_string(group_count) + " importance " + std::to_string(importance) +
           " first token " + std::to_string(first_token);
  }
};

inline ModelSpec SpecOf(const Shape& shape) {
  ModelSpec spec = SyntheticSpec(shape.layers, shape.dtype);
  spec.block_tokens = shape.block_tokens;
  spec.rope.pairing = shape.pairing;
  spec.rope.rotary_dims = shape.rotary_dims;
  return spec;
}

inline float DrawUniform(TestRandom& random, float least, float most) {
  return least + (most - least) * static_cast<float>(random.Below(1u << 16)) / 65536;
}

// A profile of random numbers that is consistent: nothing is predicted well, and everything that a
// profile may have is there.
inline ResidualProfile RandomProfile(const Shape& shape, std::uint64_t seed) {
  const ModelSpec spec = SpecOf(shape);
  TestRandom random(seed);
  ResidualProfile profile = PlainProfile(spec);
  std::uint32_t heads = profile.planes[0].heads;
  profile.group_count =
      shape.group_count > 1 ? (shape.block_per_head ? heads : 1) : shape.group_count;
  profile.levels = {
      {.quality = Quality::kHigh, .step = 0.21f, .rate_weight = 0.1f, .importance_strength = 0.4f},
      {.quality = Quality::kNearExact,
       .step = 0.0005f,
       .rate_weight = 0.05f,
       .importance_strength = 0.3f},
      {.quality = Quality::kSmall, .step = 0.9f, .rate_weight = 0.2f, .importance_strength = 0.9f}};
  constexpr std::size_t kExponentTables = 2;
  for (std::size_t table = 0; table < kExponentTables; ++table) {
    std::vector<std::uint32_t> counts(kExponentSymbols);
    for (std::uint32_t& count : counts) count = 1 + random.Below(1000);
    profile.exponent_frequencies.resize(profile.exponent_frequencies.size() + kExponentSymbols);
    NormalizeCounts(counts, std::span(profile.exponent_frequencies).last(kExponentSymbols));
  }
  for (float& offset : profile.offsets) offset = DrawUniform(random, -0.2f, 0.1f);
  for (std::uint16_t& carried : profile.carried) {
    carried = static_cast<std::uint16_t>(1 + random.Below(400));
  }
  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) {
    const PlaneShape& of = profile.planes[i];
    PlaneProfile& plane = profile.plane_profiles[i];
    const std::size_t components = of.components();
    plane.block_count = shape.block_per_head ? of.heads : 1;
    const std::size_t size = components / plane.block_count;
    plane.inputs.clear();
    for (const PredictorInput input : {PredictorInput::kSameLayerK, PredictorInput::kLayerBelow,
                                       PredictorInput::kFirstLayer, PredictorInput::kTwoBelow}) {
      if (random.Below(4) > 0) plane.inputs.push_back(input);
    }
    std::size_t in = 0;
    for (const std::uint32_t input : InputPlanes(profile.planes, i, plane.inputs)) {
      in += profile.planes[input].components() / plane.block_count;
    }
    plane.weights.resize(components * in);
    for (std::int8_t& weight : plane.weights) {
      weight = static_cast<std::int8_t>(static_cast<int>(random.Below(127)) - 63);
    }
    plane.basis.assign(components * size, 0);
    for (std::size_t c = 0; c < components; ++c) {
      plane.bias[c] = DrawUniform(random, -0.3f, 0.3f);
      plane.input_scales[c] = DrawUniform(random, 0.02f, 0.08f);
      plane.weight_scales[c] =
          DrawUniform(random, 0.2f, 1.0f) * 1e-3f / std::sqrt(static_cast<float>(in + 1));
      plane.basis_scales[c] = DrawUniform(random, 0.5f, 1.5f) / 128;
      for (std::size_t k = 0; k < size; ++k) {
        plane.basis[c * size + k] = static_cast<std::int8_t>((k == c % size ? 110 : 0) +
                                                             static_cast<int>(random.Below(9)) - 4);
      }
    }
    plane.exponent_table = random.Below(kExponentTables);
    plane.scales.clear();
    for (const ResidualLevel& level : profile.levels) {
      auto& scales = plane.scales.emplace_back(components);
      for (std::uint8_t& scale : scales) {
        const float fitting = 8 * (8 - std::log2(level.step)) + DrawUniform(random, -25, 15);
        scale = static_cast<std::uint8_t>(std::clamp(fitting, 0.0f, 159.0f));
        if (level.quality == Quality::kSmall && random.Below(5) == 0) scale = kNotCoded;
      }
    }
  }
  profile.table_tokens.clear();
  profile.table_rows.clear();
  for (std::uint32_t i = 0; i < shape.drawn_tokens; ++i) {
    profile.table_tokens.push_back(2 + 3 * i);
    for (std::size_t c = 0; c < FirstLayerComponents(profile.planes); ++c) {
      profile.table_rows.push_back(
          static_cast<std::int8_t>(static_cast<int>(random.Below(255)) - 127));
    }
  }
  profile.has_first_token = shape.first_token;
  profile.first_token = kFirstTokenOfTexts;
  if (shape.first_token) {
    for (std::size_t c = 0; c < profile.component_count(); ++c) {
      profile.first_rows.push_back(DrawUniform(random, -4, 4));
    }
  }
  if (shape.importance && profile.group_count > 0) {
    ImportanceModel& model = profile.importance;
    model.query_heads = 2 * heads;
    model.covariance_rank = 1;
    const ImportanceSizes sizes = SizesOf(profile.planes, profile.group_count, model);
    const auto draw = [&](std::vector<float>& to, std::size_t count, float most) {
      for (std::size_t i = 0; i < count; ++i) to.push_back(DrawUniform(random, -most, most));
    };
    draw(model.query_means, sizes.query_means, 0.5f);
    draw(model.query_factors, sizes.query_factors, 0.3f);
    draw(model.normalizers, sizes.normalizers, 1);
    draw(model.weights, sizes.weights, 0.05f);
  }
  const absl::Status consistent = profile.CheckConsistency();
  EXPECT_TRUE(consistent.ok()) << consistent << shape.Text();
  return profile;
}

// Blocks one behind the other, from position 0 on: each number about normal, now and then large.
struct Blocks {
  std::vector<std::vector<TokenId>> tokens;
  std::vector<std::vector<std::byte>> raw;
  std::vector<std::vector<float>> importance;
  std::vector<BlockToEncode> to_encode;
};
inline Blocks RandomBlocks(const Shape& shape, const ResidualProfile& profile, std::size_t count,
                           std::uint64_t seed) {
  const ModelSpec spec = SpecOf(shape);
  const KvGeometry geometry(spec);
  const RawKv raw_kv(geometry, spec.rope);
  TestRandom random(seed);
  const bool is_integer = shape.dtype == DType::kInt8 || shape.dtype == DType::kUint8;
  Blocks blocks;
  for (std::size_t b = 0; b < count; ++b) {
    std::vector<TokenId>& tokens = blocks.tokens.emplace_back();
    for (std::uint32_t t = 0; t < spec.block_tokens; ++t) tokens.push_back(2 + random.Below(30));
    if (b == 0) tokens[0] = kFirstTokenOfTexts;
    const auto position = static_cast<std::uint32_t>(b * spec.block_tokens);
    const RopeAngles angles = raw_kv.AnglesAt(position);
    std::vector<std::byte>& raw = blocks.raw.emplace_back(geometry.raw_block_bytes());
    std::size_t first_at = 0;
    for (const PlaneShape& plane : profile.planes) {
      std::vector<float> rows(spec.block_tokens * plane.components());
      for (float& x : rows) {
        x = DrawNormal(random) * (is_integer ? 1.5f : 1);
        if (random.Below(5000) == 0) x *= 60;
        if (random.Below(50) == 0) x = 0;
      }
      if (b == 0 && profile.has_first_token) {
        std::copy_n(profile.first_rows.begin() + static_cast<std::ptrdiff_t>(first_at),
                    plane.components(), rows.begin());
      }
      first_at += plane.components();
      raw_kv.WriteRows(rows, plane.layer, plane.kind(), angles, raw);
    }
    std::vector<float>& importance = blocks.importance.emplace_back();
    for (std::uint32_t t = 0; t < spec.block_tokens; ++t) {
      importance.push_back(std::exp2(DrawUniform(random, -6, 6)));
    }
  }
  for (std::size_t b = 0; b < count; ++b) {
    blocks.to_encode.push_back(
        {.first_position = static_cast<std::uint32_t>(b * spec.block_tokens),
         .session_tokens = static_cast<std::uint32_t>(count * spec.block_tokens),
         .tokens = blocks.tokens[b],
         .raw = blocks.raw[b]});
    if (b % 2 == 1) blocks.to_encode.back().importance = blocks.importance[b];
  }
  return blocks;
}

// What blocks decode to.
struct Decoded {
  std::vector<std::vector<std::byte>> raw;
  std::vector<BlockToDecode> blocks;

  Decoded(const Blocks& from, std::span<const EncodedBlock> encoded, Quality quality) {
    raw.reserve(encoded.size());
    for (std::size_t b = 0; b < encoded.size(); ++b) {
      if (encoded[b].body.empty()) continue;
      raw.emplace_back(from.raw[b].size(), std::byte{0xAA});
      blocks.push_back({.body = encoded[b].body,
                        .section_bytes = encoded[b].section_bytes,
                        .quality = quality,
                        .tokens = from.tokens[b],
                        .raw = raw.back()});
    }
  }
};

inline constexpr std::size_t kTwinBytes = std::size_t{1} << 30;

// A codec, and a coder of a device beside it: the host twin, unless it is told another one.
struct Twin {
  explicit Twin(const Shape& shape, const ResidualProfile& profile,
                const DeviceCoderOptions& options = {.workspaces = 2},
                std::unique_ptr<Device> device = MakeHostDevice(kTwinBytes))
      : spec(SpecOf(shape)),
        codec(MakeCodec(spec, profile)),
        backend(MakeDeviceBackend("twin", std::move(device), options)) {
    auto made = backend->CoderFor(spec, codec);
    EXPECT_TRUE(made.ok()) << made.status();
    if (made.ok()) coder = *made;
  }

  ModelSpec spec;
  std::shared_ptr<const ResidualCodec> codec;
  std::unique_ptr<const CodecBackend> backend;
  std::shared_ptr<const BlockCoder> coder;
};

// Shapes of all kinds; the n-th one.
inline Shape RandomShape(std::uint64_t n) {
  TestRandom random(1000 + n);
  Shape shape;
  const std::uint32_t heads = 1 + random.Below(4);
  constexpr std::uint32_t kDims[] = {2, 6, 8, 10, 16, 20, 32};
  const std::uint32_t dim = kDims[random.Below(std::size(kDims))];
  switch (n % 4) {
    case 0:
      shape.layers = {{3 + random.Below(4), heads, dim, dim}};
      break;
    case 1:  // one latent per token
      shape.layers = {{3 + random.Below(3), 1, 36 + 2 * random.Below(9), 0}};
      break;
    case 2:  // V of another size
      shape.layers = {{2, heads, dim, kDims[random.Below(std::size(kDims))]}};
      break;
    default:  // layers of several sizes
      shape.layers = {{2, heads, dim, dim}, {2, heads, 2 * dim, dim}, {1, heads, dim, 0}};
  }
  constexpr std::uint32_t kTokens[] = {1, 7, 16, 17, 32, 33, 48, 64};
  shape.block_tokens = kTokens[random.Below(std::size(kTokens))];
  shape.dtype = static_cast<DType>(1 + n % 7);
  shape.pairing = static_cast<RopePairing>(1 + random.Below(3));
  if (random.Below(3) == 0) shape.rotary_dims = 2 * (1 + random.Below(dim / 2));
  shape.block_per_head = random.Below(2) == 0;
  shape.group_count = random.Below(3);
  shape.importance = random.Below(2) == 0;
  shape.first_token = random.Below(2) == 0;
  return shape;
}

}  // namespace kvtrie::gpu
