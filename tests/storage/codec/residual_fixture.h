#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/check.h"
#include "storage/codec/fit_material.h"
#include "storage/codec/plane_transform.h"
#include "storage/codec/rans.h"
#include "storage/codec/raw_kv.h"
#include "storage/codec/residual_codec.h"
#include "storage/codec/residual_fit.h"
#include "storage/codec/residual_profile.h"
#include "storage/kv/model_spec.h"
#include "tests/storage/codec/test_random.h"

// A model without a network: K and V of layer 0 follow from the token, those of each later layer
// from the layer below, and all have some noise. So a profile has something to find.
namespace kvtrie {

// What texts begin with; its KV is the same in all of them.
inline constexpr TokenId kFirstTokenOfTexts = 1;
inline constexpr TokenId kVocabulary = 40;

inline ModelSpec SyntheticSpec(std::vector<LayerRun> layer_runs = {{4, 2, 8, 8}},
                               DType dtype = DType::kFloat32) {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "synthetic";
  spec.dtype = dtype;
  spec.kv_groups = {{.layer_runs = std::move(layer_runs), .window_tokens = 0}};
  spec.rope = {.pairing = RopePairing::kHalfSplit, .theta = 10000, .rotary_dims = 0, .scaling = {}};
  spec.block_tokens = 16;
  return spec;
}

inline ModelSpec WithBlocks(ModelSpec spec, std::uint32_t block_tokens) {
  spec.block_tokens = block_tokens;
  return spec;
}

struct SyntheticText {
  std::vector<TokenId> tokens;
  std::vector<std::byte> raw;     // all of it as one block, from position 0 on
  std::vector<float> importance;  // [plane][KV head][token]

  KvSample Sample() const { return {.tokens = tokens, .raw = raw, .importance = importance}; }
};

// About normal, with variance 1.
inline float DrawNormal(TestRandom& random) {
  std::int32_t sum = 0;
  for (int i = 0; i < 12; ++i) sum += static_cast<std::int32_t>(random.Below(1u << 16));
  return static_cast<float>(sum - 12 * (1 << 15)) * 0x1p-16f;
}

// `amplitude`: about how large values are; integer dtypes need some.
inline SyntheticText MakeText(const ModelSpec& spec, std::uint32_t token_count, std::uint64_t seed,
                              float amplitude = 1) {
  SyntheticText text;
  TestRandom random(seed);
  text.tokens.push_back(kFirstTokenOfTexts);
  for (std::uint32_t t = 1; t < token_count; ++t) {
    text.tokens.push_back(2 + random.Below(kVocabulary - 2));
  }
  const KvGeometry geometry(WithBlocks(spec, token_count));
  const RawKv raw_kv(geometry, spec.rope);
  const RopeAngles angles = raw_kv.AnglesAt(0);
  text.raw.resize(geometry.raw_block_bytes());
  std::vector<float> below;
  std::size_t below_components = 0;
  const std::vector<PlaneShape> planes = PlanesOf(spec);
  for (const PlaneShape& plane : planes) {
    const std::size_t components = plane.components();
    std::vector<float> rows(token_count * components);
    for (std::uint32_t t = 0; t < token_count; ++t) {
      // The first token's own draws, and the token's in layer 0: the same in all texts.
      TestRandom of_token(1000 * text.tokens[t] + (plane.is_v ? 1 : 0) + 2 * plane.layer);
      for (std::size_t c = 0; c < components; ++c) {
        float& x = rows[t * components + c];
        const float own = DrawNormal(of_token);
        const float noise = DrawNormal(random);
        if (t == 0) {
          x = 3 * own;
        } else if (below.empty()) {
          x = own + 0.2f * noise;
        } else {
          const float* const from = below.data() + t * below_components;
          x = 0.8f * from[(c + 3) % below_components] - 0.5f * from[(c + 6) % below_components] +
              0.1f * own + 0.2f * noise;
        }
      }
    }
    // Importance: the token's energy in K, which features show.
    for (std::uint32_t head = 0; head < plane.heads; ++head) {
      for (std::uint32_t t = 0; t < token_count; ++t) {
        float energy = 1e-3f;
        for (std::size_t c = 0; c < plane.head_dim; ++c) {
          const float x = rows[t * components + head * plane.head_dim + c];
          energy += x * x;
        }
        text.importance.push_back(energy);
      }
    }
    below = rows;
    below_components = components;
    for (float& x : rows) x *= amplitude;
    raw_kv.WriteRows(rows, plane.layer, plane.kind(), angles, text.raw);
  }
  return text;
}

// The raw KV of block_tokens tokens of a text.
inline std::vector<std::byte> CutBlock(const ModelSpec& spec, const SyntheticText& text,
                                       std::uint32_t first) {
  const KvGeometry of_text(WithBlocks(spec, static_cast<std::uint32_t>(text.tokens.size())));
  const KvGeometry of_block(spec);
  std::vector<std::byte> raw(of_block.raw_block_bytes());
  for (std::uint32_t layer = 0; layer < of_block.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t bytes = of_block.kind_bytes(layer, kind);
      const std::size_t row_bytes = bytes / spec.block_tokens;
      std::copy_n(
          text.raw.begin() +
              static_cast<std::ptrdiff_t>(of_text.kind_begin(layer, kind) + first * row_bytes),
          bytes, raw.begin() + static_cast<std::ptrdiff_t>(of_block.kind_begin(layer, kind)));
    }
  }
  return raw;
}

// Bytes of one token of a block, layer by layer, K then V.
inline std::vector<std::byte> BytesOfToken(const ModelSpec& spec, std::span<const std::byte> raw,
                                           std::size_t token) {
  const KvGeometry geometry(spec);
  std::vector<std::byte> bytes;
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      const std::size_t row_bytes = geometry.kind_bytes(layer, kind) / spec.block_tokens;
      const auto row = raw.subspan(geometry.kind_begin(layer, kind) + token * row_bytes, row_bytes);
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
  }
  return bytes;
}

inline std::vector<SyntheticText> FitTexts(const ModelSpec& spec, float amplitude = 1) {
  std::vector<SyntheticText> texts;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    texts.push_back(MakeText(spec, 100, seed, amplitude));
  }
  return texts;
}

inline std::vector<KvSample> SamplesOf(std::span<const SyntheticText> texts) {
  std::vector<KvSample> samples;
  for (const SyntheticText& text : texts) samples.push_back(text.Sample());
  return samples;
}

// Steps in deviations of what predictions leave.
inline ResidualFitOptions SmallFitOptions() {
  ResidualFitOptions options;
  options.levels = {{.quality = Quality::kHigh, .step = 0.25f, .rate_weight = 0.1f},
                    {.quality = Quality::kNearExact, .step = 0.02f, .rate_weight = 0.1f},
                    {.quality = Quality::kSmall, .step = 0.8f, .rate_weight = 0.1f}};
  options.rounds = 1;
  options.table_tokens_max = 30;  // less than the vocabulary: some tokens are not in it
  return options;
}

// Queries that look at the first dimensions of K.
struct SyntheticQueries {
  std::vector<float> means;
  std::vector<float> covariances;
  std::uint32_t query_heads = 0;

  QueryStatistics Statistics() const {
    return {.query_heads = query_heads, .means = means, .covariances = covariances};
  }
};
inline SyntheticQueries MakeQueries(const ModelSpec& spec, std::uint32_t query_heads) {
  SyntheticQueries queries;
  queries.query_heads = query_heads;
  TestRandom random(77);
  for (const PlaneShape& plane : PlanesOf(spec)) {
    if (plane.is_v) continue;
    const std::size_t dim = plane.head_dim;
    for (std::uint32_t q = 0; q < query_heads; ++q) {
      std::vector<float> factor(dim);
      for (std::size_t i = 0; i < dim; ++i) {
        queries.means.push_back(DrawNormal(random));
        factor[i] = 0.5f * DrawNormal(random);
      }
      for (std::size_t i = 0; i < dim; ++i) {
        for (std::size_t j = 0; j < dim; ++j) {
          queries.covariances.push_back(factor[i] * factor[j] + (i == j ? 0.1f : 0));
        }
      }
    }
  }
  return queries;
}

// Material with importance; one exponent group, or one per KV head.
inline FitMaterial MakeMaterial(const ModelSpec& spec, std::span<const SyntheticText> texts,
                                bool group_per_head) {
  FitMaterial material;
  const SyntheticQueries queries = MakeQueries(spec, 4);
  absl::StatusOr<ImportanceModel> importance =
      FitImportance(spec, SamplesOf(texts), queries.Statistics(),
                    {.group_per_head = group_per_head, .covariance_rank = 2});
  KV_CHECK(importance.ok());
  material.importance = *std::move(importance);
  material.group_count = group_per_head ? PlanesOf(spec)[0].heads : 1;
  return material;
}

inline ResidualProfile FitSynthetic(const ModelSpec& spec,
                                    const ResidualFitOptions& options = SmallFitOptions(),
                                    const FitMaterial& material = {}, float amplitude = 1) {
  const std::vector<SyntheticText> texts = FitTexts(spec, amplitude);
  absl::StatusOr<ResidualProfile> profile =
      FitResidualProfile(spec, SamplesOf(texts), material, options);
  EXPECT_TRUE(profile.ok()) << profile.status();
  return profile.ok() ? *std::move(profile) : ResidualProfile{};
}

// A profile that nothing was fitted to: predictions read one component of the layer below, a value
// stands for one component and a little of the next, tables are broad.
inline ResidualProfile PlainProfile(const ModelSpec& spec) {
  ResidualProfile profile;
  profile.codec_key = spec.CodecKey();
  profile.planes = PlanesOf(spec);
  profile.levels = {{.quality = Quality::kHigh, .step = 0.25f, .rate_weight = 0.1f},
                    {.quality = Quality::kSmall, .step = 1, .rate_weight = 0.1f}};
  std::size_t first_layer = 0;
  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) {
    const PlaneShape& shape = profile.planes[i];
    const std::size_t components = shape.components();
    if (shape.layer == 0) first_layer += components;
    PlaneProfile& plane = profile.plane_profiles.emplace_back();
    if (shape.layer > 0) plane.inputs = {PredictorInput::kLayerBelow};
    std::size_t in = 0;
    for (const std::uint32_t input : InputPlanes(profile.planes, i, plane.inputs)) {
      in += profile.planes[input].components();
    }
    plane.bias.assign(components, 0.125f);
    plane.input_scales.assign(components, 0.0625f);
    plane.weights.assign(components * in, 0);
    plane.weight_scales.assign(components, 0.0625f / 64);
    plane.basis.assign(components * components, 0);
    plane.basis_scales.assign(components, 1.0f / 128);
    plane.cell_exponents.assign(components, -4);
    plane.cell_scales.assign(components, 80);
    for (std::size_t c = 0; c < components; ++c) {
      if (in > 0) plane.weights[c * in + (c + 3) % in] = 51;
      plane.basis[c * components + c] = 127;
      if (c + 1 < components) plane.basis[c * components + c + 1] = -31;
    }
    for (const ResidualLevel& level : profile.levels) {
      plane.scales.emplace_back(components,
                                static_cast<std::uint8_t>(8 * (8 - std::log2(level.step))));
    }
  }

  profile.class_frequencies.resize(std::size_t{kScaleClasses} * kResidualSymbols);
  std::vector<std::uint32_t> counts(kResidualSymbols);
  for (std::uint32_t c = 0; c < kScaleClasses; ++c) {
    for (std::int32_t value = -kSymbolMax; value <= kSymbolMax; ++value) {
      const auto square = static_cast<std::uint64_t>(value * value);
      counts[static_cast<std::size_t>(value + kSymbolMax)] =
          1 + static_cast<std::uint32_t>((1u << 24) / (1 + (square << 16 >> c / 2)));
    }
    counts[kEscape] = 1;
    NormalizeCounts(
        counts,
        std::span(profile.class_frequencies).subspan(c * kResidualSymbols, kResidualSymbols));
  }
  profile.expected.resize(kScaleIndexMax + 1);
  for (std::uint32_t i = 0; i <= kScaleIndexMax; ++i) {
    profile.expected[i] = static_cast<std::uint16_t>(std::min(16u * 255, (12u << i / 8) >> 8));
  }
  profile.offsets.assign(std::size_t{kScaleClasses} * kRestoredOffsets, -0.0625f);
  profile.carried.assign(2 * std::size_t{kScaleShiftMax} + 1, 96);
  profile.prior = 96;
  for (const TokenId token : {2u, 3u, 7u}) {
    profile.table_tokens.push_back(token);
    for (std::size_t c = 0; c < first_layer; ++c) {
      profile.table_rows.push_back(static_cast<std::int8_t>((token * 7 + c) % 21));
    }
  }
  return profile;
}

inline ProfileId SyntheticProfileId() {
  ProfileId id;
  id.bytes.fill(0x5A);
  return id;
}

inline std::unique_ptr<const ResidualCodec> MakeCodec(const ModelSpec& spec,
                                                      const ResidualProfile& profile) {
  auto codec = ResidualCodec::Create(spec, SyntheticProfileId(), profile);
  EXPECT_TRUE(codec.ok()) << codec.status();
  return codec.ok() ? *std::move(codec) : nullptr;
}

// Blocks of a text that belong to one model, encoded.
struct CodedText {
  std::vector<std::vector<std::byte>> raw;  // of each block, as it was
  std::vector<std::vector<TokenId>> tokens;
  std::vector<BlockToEncode> blocks;
  std::vector<EncodedBlock> encoded;

  BlockToDecode ToDecode(std::size_t block, Quality quality, std::span<std::byte> to) const {
    return {.body = encoded[block].body,
            .section_bytes = encoded[block].section_bytes,
            .quality = quality,
            .tokens = tokens[block],
            .raw = to};
  }
};

inline CodedText EncodeText(const ResidualCodec& codec, const ModelSpec& spec,
                            const SyntheticText& text, Quality quality) {
  CodedText coded;
  for (std::uint32_t first = 0; first + spec.block_tokens <= text.tokens.size();
       first += spec.block_tokens) {
    coded.raw.push_back(CutBlock(spec, text, first));
    const auto from = text.tokens.begin() + static_cast<std::ptrdiff_t>(first);
    coded.tokens.emplace_back(from, from + static_cast<std::ptrdiff_t>(spec.block_tokens));
  }
  for (std::size_t b = 0; b < coded.raw.size(); ++b) {
    coded.blocks.push_back({.first_position = static_cast<std::uint32_t>(b) * spec.block_tokens,
                            .session_tokens = static_cast<std::uint32_t>(text.tokens.size()),
                            .tokens = coded.tokens[b],
                            .raw = coded.raw[b]});
  }
  auto encoded = codec.Encode(coded.blocks, quality);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  if (encoded.ok()) coded.encoded = *std::move(encoded);
  return coded;
}

inline std::vector<std::byte> DecodeOne(const ResidualCodec& codec, const CodedText& coded,
                                        std::size_t block, Quality quality) {
  std::vector<std::byte> raw(coded.raw[block].size(), std::byte{0xAA});
  const BlockToDecode to_decode = coded.ToDecode(block, quality, raw);
  const absl::Status status = codec.Decode({&to_decode, 1});
  EXPECT_TRUE(status.ok()) << status;
  return raw;
}

// By how much a restored row may be off: [component] of one plane, K before RoPE. A value is the
// integer below its target or the one above, moved by a restored offset, in steps of 2^(-e/4) of
// the base step; e is -kExponentMax at least. 1/1000 of a step is for the rounding of float32.
inline double ValueBound(const ResidualProfile& profile, std::size_t level) {
  float offset = 0;
  for (const float o : profile.offsets) offset = std::max(offset, std::abs(o));
  const double coarsest = profile.group_count == 0 ? 1 : std::exp2(kExponentMax / 4.0);
  return (1.001 + offset) * profile.levels[level].step * coarsest;
}
inline std::vector<double> RowBound(const ResidualProfile& profile, std::uint32_t plane,
                                    std::size_t level) {
  const PlaneProfile& of = profile.plane_profiles[plane];
  const std::size_t components = profile.planes[plane].components();
  const std::size_t size = components / of.block_count;
  std::vector<double> bound(components);
  for (std::size_t v = 0; v < components; ++v) {
    EXPECT_NE(of.scales[level][v], kNotCoded) << "the bound holds where all values are coded";
    for (std::size_t c = 0; c < size; ++c) {
      bound[v / size * size + c] += std::abs(double{of.basis_scales[v]} * of.basis[v * size + c]) *
                                    ValueBound(profile, level);
    }
  }
  return bound;
}

// Half the distance between two values of the dtype, relative and at least.
inline double RoundingOf(DType dtype, double x) {
  switch (dtype) {
    case DType::kFloat32:
      return std::abs(x) * 0x1p-24;
    case DType::kFloat16:
      return std::abs(x) * 0x1p-11 + 0x1p-25;
    case DType::kBfloat16:
      return std::abs(x) * 0x1p-8;
    case DType::kFloat8E4m3:
      return std::abs(x) * 0x1p-4 + 0x1p-10;
    case DType::kFloat8E5m2:
      return std::abs(x) * 0x1p-3 + 0x1p-17;
    default:
      return 0.5;
  }
}

// Values of one block, K after RoPE: [plane][token][component].
inline std::vector<std::vector<float>> ValuesOf(const ModelSpec& spec,
                                                std::span<const std::byte> raw) {
  // A model that does not rotate reads K as it is.
  const RawKv raw_kv(KvGeometry(spec), RopeSpec{});
  const RopeAngles angles = raw_kv.AnglesAt(0);
  std::vector<std::vector<float>> values;
  for (const PlaneShape& plane : PlanesOf(spec)) {
    std::vector<float>& rows = values.emplace_back(spec.block_tokens * plane.components());
    raw_kv.ReadRows(raw, plane.layer, plane.kind(), angles, rows);
  }
  return values;
}

// Expects each value of the decoded block to be as near to the original as the bound says; but
// tokens of `skip`.
inline void ExpectWithinBound(const ModelSpec& spec, const ResidualProfile& profile,
                              std::size_t level, std::span<const std::byte> original,
                              std::span<const std::byte> decoded,
                              std::span<const std::size_t> skip = {}) {
  const auto from = ValuesOf(spec, original);
  const auto to = ValuesOf(spec, decoded);
  const RawKv raw_kv(KvGeometry(spec), spec.rope);
  for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
    const PlaneShape& shape = profile.planes[p];
    const std::vector<double> bound = RowBound(profile, p, level);
    const double largest = *std::max_element(bound.begin(), bound.end());
    const bool rotated = !shape.is_v && raw_kv.unrotates_k(shape.layer);
    for (std::size_t t = 0; t < spec.block_tokens; ++t) {
      if (std::find(skip.begin(), skip.end(), t) != skip.end()) continue;
      for (std::size_t c = 0; c < shape.components(); ++c) {
        const std::size_t at = t * shape.components() + c;
        // A rotated component is made of two, each within the largest bound.
        const double of_codec = rotated ? largest * std::sqrt(2.0) : bound[c];
        const double difference = std::abs(double{from[p][at]} - to[p][at]);
        ASSERT_LE(difference, of_codec + RoundingOf(spec.dtype, std::abs(from[p][at]) + of_codec) +
                                  std::abs(from[p][at]) * 0x1p-20)
            << "plane " << p << " token " << t << " component " << c;
      }
    }
  }
}

}  // namespace kvtrie
