#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "storage/base/byte_reader.h"
#include "storage/base/crc32c.h"
#include "storage/codec/frame.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/importance.h"
#include "storage/codec/profile_header.h"
#include "storage/kv/profile_digest.h"
#include "tests/storage/codec/kv_codes.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

// Models, profiles and blocks of tests/golden/v1/codec, one folder per model:
//
//   profile.bin                      the whole profile
//   <dtype>/spec.bin                 the model's spec
//   <dtype>/<block>_tokens.bin       token ids, u32
//   <dtype>/<block>_kv.bin           raw KV, as an engine has it
//   <dtype>/<block>_references.bin   blocks that it is coded against, if there are any: of each
//   node,
//                                    u32 first_position, token ids, raw KV
//   <dtype>/<block>_<coding>.bin     a frame
//   <dtype>/<block>_<coding>_kv.bin  the raw KV that it decodes to, if it is not <block>_kv.bin
//
// Profiles are not fitted: they have all that the format knows, and sums of integers in it.
namespace kvtrie {

// How a block becomes a frame.
struct GoldenCoding {
  const char* name;
  Quality quality;
  bool smallest = false;  // exact with the profile
};
inline constexpr GoldenCoding kGoldenRaw = {"raw", Quality::kExact};
inline constexpr GoldenCoding kGoldenLossless = {"lossless", Quality::kExact};
inline constexpr GoldenCoding kGoldenExact = {"exact", Quality::kExact, true};
inline constexpr GoldenCoding kGoldenRotated = {"rotated", Quality::kUnrated};
inline constexpr GoldenCoding kGoldenHigh = {"high", Quality::kHigh};
inline constexpr GoldenCoding kGoldenNearExact = {"near_exact", Quality::kNearExact};
inline constexpr GoldenCoding kGoldenSmall = {"small", Quality::kSmall};

struct GoldenReference {
  TrieNodeId node;
  std::uint32_t first_position = 0;
  std::vector<TokenId> tokens;
  std::vector<std::byte> raw;
};

struct GoldenBlock {
  std::string name;
  std::uint32_t first_position = 0;
  std::vector<TokenId> tokens;
  std::vector<std::byte> raw;
  std::vector<GoldenCoding> codings;
  std::vector<GoldenReference> references = {};
  std::vector<ReferenceRun> runs = {};

  std::vector<ReferenceBlock> ReferenceBlocks() const {
    std::vector<ReferenceBlock> blocks;
    for (const GoldenReference& of : references) {
      blocks.push_back({.node = of.node,
                        .first_position = of.first_position,
                        .tokens = of.tokens,
                        .raw = of.raw});
    }
    return blocks;
  }
  std::string ReferenceFile() const {
    ByteWriter writer;
    for (const GoldenReference& of : references) {
      writer.WriteText(of.node.view());
      writer.Write(of.first_position);
      for (const TokenId token : of.tokens) writer.Write(token);
      writer.WriteText(AsText(of.raw));
    }
    return writer.Take();
  }
};

struct GoldenCase {
  std::string model;  // folder
  std::string dtype;  // folder below it
  ModelSpec spec;
  ResidualProfile profile;
  std::vector<GoldenBlock> blocks;
};

// 4 layers of 2 KV heads; K is turned in 12 of 16 dimensions, in halves.
inline ModelSpec HalvesSpec(DType dtype) {
  ModelSpec spec = WithBlocks(SyntheticSpec({{4, 2, 16, 12}}, dtype), 16);
  spec.name = "halves";
  spec.rope.rotary_dims = 12;
  return spec;
}
// Layers of two shapes, one without V; neighbours are turned; two groups of tokens.
inline ModelSpec NeighboursSpec(DType dtype) {
  ModelSpec spec = WithBlocks(SyntheticSpec({{2, 1, 12, 8}, {1, 1, 24, 0}}, dtype), 20);
  spec.name = "neighbours";
  spec.rope.pairing = RopePairing::kInterleaved;
  spec.rope.theta = 500'000;
  spec.rope.rotary_dims = 8;
  return spec;
}
// K as the engine has it; blocks of less than a group; layers enough for frames of two sections.
inline ModelSpec UnturnedSpec(DType dtype) {
  ModelSpec spec = WithBlocks(SyntheticSpec({{8, 1, 16, 16}}, dtype), 12);
  spec.name = "unturned";
  spec.rope.scaling = "linear:factor=2";
  return spec;
}

// PlainProfile with three levels, and matrices that join what they can. Steps of levels: about 1/4,
// 1/64 (its values have low bits), and 1 (not all values are coded).
inline ResidualProfile GoldenProfile(const ModelSpec& spec, bool block_per_head) {
  ResidualProfile profile = PlainProfile(spec);
  TestRandom random(profile.planes.size());
  const auto draw = [&](int most) {
    return static_cast<int>(random.Below(static_cast<std::uint32_t>(2 * most + 1))) - most;
  };
  profile.levels = {{.quality = Quality::kHigh,
                     .step = 0.24f,
                     .rate_weight = 0.125f,
                     .importance_strength = 0.5f,
                     .bits_per_component = 4,
                     .mean_kl = 0x1p-7f,
                     .kl_p99 = 0x1p-4f},
                    {.quality = Quality::kNearExact,
                     .step = 0.015f,
                     .rate_weight = 0.0625f,
                     .importance_strength = 0.25f,
                     .bits_per_component = 8,
                     .mean_kl = 0x1p-10f,
                     .kl_p99 = 0x1p-7f},
                    {.quality = Quality::kSmall,
                     .step = 0.97f,
                     .rate_weight = 0.25f,
                     .importance_strength = 1,
                     .bits_per_component = 2,
                     .mean_kl = 0x1p-5f,
                     .kl_p99 = 0.5f}};
  const int kScales[] = {80, 112, 64};
  for (std::uint32_t i = 0; i < profile.planes.size(); ++i) {
    const PlaneShape& shape = profile.planes[i];
    PlaneProfile& plane = profile.plane_profiles[i];
    const std::size_t components = shape.components();
    plane.block_count = block_per_head ? shape.heads : 1;
    const std::size_t size = components / plane.block_count;
    if (shape.is_v) {
      plane.inputs = {PredictorInput::kSameLayerK, PredictorInput::kTwoBelow};
    } else {
      plane.inputs = {PredictorInput::kLayerBelow, PredictorInput::kFirstLayer};
    }
    std::size_t in = 0;
    for (const std::uint32_t input : InputPlanes(profile.planes, i, plane.inputs)) {
      in += profile.planes[input].components() / plane.block_count;
    }
    plane.weights.assign(components * in, 0);
    plane.basis.assign(components * size, 0);
    for (std::size_t c = 0; c < components; ++c) {
      plane.bias[c] = static_cast<float>(draw(16)) / 65;
      plane.input_scales[c] = static_cast<float>(24 + draw(8)) / 515;
      plane.weight_scales[c] = static_cast<float>(draw(3)) / 32771;
      plane.basis_scales[c] = static_cast<float>(64 + draw(9)) / 8191;
      plane.cell_exponents[c] = static_cast<std::int8_t>(-6 + draw(2));
      plane.cell_scales[c] = static_cast<std::uint8_t>(100 + draw(12));
      for (std::size_t j = 0; j < in; ++j) {
        plane.weights[c * in + j] = static_cast<std::int8_t>(draw(j == c % in ? 63 : 5));
      }
      for (std::size_t j = 0; j < size; ++j) {
        plane.basis[c * size + j] = static_cast<std::int8_t>(j == c % size ? 127 : draw(4));
      }
    }
    plane.scales.clear();
    for (const int scale : kScales) {
      std::vector<std::uint8_t>& scales = plane.scales.emplace_back();
      for (std::size_t v = 0; v < components; ++v) {
        const bool left_out = scale == 64 && v % 5 == 4;
        scales.push_back(left_out ? kNotCoded : static_cast<std::uint8_t>(scale + draw(12)));
      }
      // With exponents and shifts, these leave the range of indexes.
      scales[1] = scale == 112 ? kScaleIndexMax : 0;
      scales.back() = kScaleIndexMax;
    }
    // Predictions of some size have wider cells than this.
    plane.cell_exponents[0] = -18;
    plane.cell_scales[0] = 60;
  }
  // No two tables alike.
  for (std::uint32_t c = 0; c < kScaleClasses; ++c) {
    std::uint16_t* const zero = &profile.class_frequencies[c * kResidualSymbols + kSymbolMax];
    const int moved = c % 2 == 0 ? 0 : *zero / 4;
    zero[0] = static_cast<std::uint16_t>(zero[0] - moved);
    zero[1] = static_cast<std::uint16_t>(zero[1] + moved);
  }
  for (float& offset : profile.offsets) offset = static_cast<float>(draw(8)) / 65;
  for (std::uint16_t& carried : profile.carried) {
    carried = static_cast<std::uint16_t>(96 + draw(64));
  }
  return profile;
}

// Step exponents of so many groups, chosen by importance.
inline void AddExponents(ResidualProfile& profile, std::uint32_t group_count) {
  profile.group_count = group_count;
  constexpr std::uint32_t kTables = 2;
  for (std::uint32_t table = 0; table < kTables; ++table) {
    std::vector<std::uint32_t> counts(kExponentSymbols, 1);
    counts[kExponentDeltaMax] = 60;
    counts[kExponentDeltaMax + 1] = 20 + 10 * table;
    counts[kExponentDeltaMax - 1] = 25;
    const std::size_t at = profile.exponent_frequencies.size();
    profile.exponent_frequencies.resize(at + kExponentSymbols);
    NormalizeCounts(counts, std::span(profile.exponent_frequencies).subspan(at));
  }
  for (std::size_t i = 0; i < profile.plane_profiles.size(); ++i) {
    profile.plane_profiles[i].exponent_table = static_cast<std::uint32_t>(i % kTables);
  }
  ImportanceModel& model = profile.importance;
  model.query_heads = 2 * profile.planes[0].heads;
  model.covariance_rank = 2;
  const ImportanceSizes sizes = SizesOf(profile.planes, group_count, model);
  TestRandom random(5);
  for (const auto& [values, count, scale] :
       {std::tuple{&model.query_means, sizes.query_means, 0.25f},
        std::tuple{&model.query_factors, sizes.query_factors, 0.125f},
        std::tuple{&model.normalizers, sizes.normalizers, 0.25f},
        std::tuple{&model.weights, sizes.weights, 0.03125f}}) {
    for (std::size_t i = 0; i < count; ++i) values->push_back(scale * DrawNormal(random));
  }
}

// How differences are coded: nothing of it is as it is of the whole.
inline void AddDifferences(ResidualProfile& profile, const ModelSpec& spec, bool block_per_head,
                           std::uint32_t group_count) {
  ResidualProfile of = GoldenProfile(spec, block_per_head);
  if (group_count > 0) AddExponents(of, group_count);
  of.importance = {};
  of.table_tokens.clear();
  of.table_rows.clear();
  for (ResidualLevel& level : of.levels) {
    level = {.quality = level.quality,
             .step = level.step * 0.375f,
             .rate_weight = level.rate_weight,
             .importance_strength = 0.25f};
  }
  for (PlaneProfile& plane : of.plane_profiles) {
    for (float& bias : plane.bias) bias *= -0.0625f;
    for (float& scale : plane.input_scales) scale *= 0.1875f;
    for (float& scale : plane.basis_scales) scale *= 0.875f;
    for (std::int8_t& weight : plane.weights) weight = static_cast<std::int8_t>(-weight);
    for (auto& scales : plane.scales) {
      for (std::uint8_t& scale : scales) {
        if (scale != kNotCoded) scale = static_cast<std::uint8_t>(scale / 2 + 10);
      }
    }
    plane.cell_exponents.assign(plane.cell_exponents.size(), 0);
    plane.cell_scales.assign(plane.cell_scales.size(), 0);
  }
  for (std::uint32_t c = 0; c < kScaleClasses; ++c) {
    std::uint16_t* const zero = &of.class_frequencies[c * kResidualSymbols + kSymbolMax];
    const int moved = *zero / 8;
    zero[0] = static_cast<std::uint16_t>(zero[0] - moved);
    zero[2] = static_cast<std::uint16_t>(zero[2] + moved);
  }
  for (float& offset : of.offsets) offset = -offset;
  for (std::uint16_t& carried : of.carried) carried = static_cast<std::uint16_t>(carried + 11);
  for (std::uint16_t& expected : of.expected) ++expected;
  of.prior = 80;
  profile.differences = {std::move(of)};
}

// What the texts begin with, before RoPE.
inline void AddFirstToken(ResidualProfile& profile, ModelSpec spec) {
  spec.dtype = DType::kFloat32;
  profile.has_first_token = true;
  profile.first_token = kFirstTokenOfTexts;
  const SyntheticText text = MakeText(spec, spec.block_tokens, 1);
  const auto rows = ValuesOf(spec, text.raw);  // RoPE does nothing at position 0
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto components = static_cast<std::ptrdiff_t>(profile.planes[i].components());
    profile.first_rows.insert(profile.first_rows.end(), rows[i].begin(),
                              rows[i].begin() + components);
  }
}

inline std::vector<std::byte> ProfileFile(const ResidualProfile& profile) {
  const std::string body = profile.EncodeBody();
  ProfileHeader header = {.codec_key = profile.codec_key,
                          .body_bytes = body.size(),
                          .body_crc32c = Crc32c(std::as_bytes(std::span(body))),
                          .levels = {}};
  for (const ResidualLevel& level : profile.levels) {
    header.levels.push_back({.quality = level.quality,
                             .bits_per_component = level.bits_per_component,
                             .mean_kl = level.mean_kl,
                             .kl_p99 = level.kl_p99});
  }
  std::vector<std::byte> bytes(header.header_bytes());
  WriteProfileHeader(header, bytes);
  const auto body_bytes = std::as_bytes(std::span(body));
  bytes.insert(bytes.end(), body_bytes.begin(), body_bytes.end());
  return bytes;
}

inline ProfileId IdOfProfile(std::span<const std::byte> file) {
  ProfileDigest digest;
  digest.Add(file);
  return digest.Finish();
}

// Sets a component of V, which RoPE does not turn.
inline void SetV(const ModelSpec& spec, std::uint32_t layer, std::uint32_t token, std::uint32_t c,
                 std::uint32_t code, std::vector<std::byte>& raw) {
  const KvGeometry geometry(spec);
  const std::size_t size = DTypeBytes(spec.dtype);
  const std::size_t row = geometry.row_components(layer, KvKind::kV);
  std::memcpy(raw.data() + geometry.kind_begin(layer, KvKind::kV) + (token * row + c) * size, &code,
              size);
}

// A number that is not finite; integers have none.
inline std::uint32_t NotFinite(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x7FC00001;
    case DType::kFloat16:
      return 0xFC00;
    case DType::kBfloat16:
      return 0x7FC1;
    case DType::kFloat8E4m3:
      return 0xFF;
    case DType::kFloat8E5m2:
      return 0x7C;
    default:
      return 0;
  }
}
// A number of some hundreds, far from what is around it.
inline std::uint32_t Outlier(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0xC3FA1234;
    case DType::kFloat16:
      return 0xDFD1;
    case DType::kBfloat16:
      return 0xC3FA;
    case DType::kFloat8E4m3:
      return 0xFD;
    case DType::kFloat8E5m2:
      return 0xDF;
    default:
      return 0x80;
  }
}

// Blocks of a model whose raw KV is made here: `first` begins with the profile's first token,
// `middle` lies far behind it and has an outlier, numbers around 0, and a token that is kept as it
// is.
inline std::vector<GoldenBlock> MakeBlocks(const ModelSpec& spec, std::uint64_t seed) {
  const bool is_integer = spec.dtype == DType::kInt8 || spec.dtype == DType::kUint8;
  constexpr std::uint32_t kMiddle = 60;
  const SyntheticText text =
      MakeText(spec, (kMiddle + 1) * spec.block_tokens, seed, is_integer ? 20.0f : 1.0f);
  std::vector<GoldenBlock> blocks;
  for (const auto& [name, index] : {std::pair{"first", 0u}, {"middle", kMiddle}}) {
    const std::uint32_t first = index * spec.block_tokens;
    const auto token = text.tokens.begin() + first;
    blocks.push_back({.name = name,
                      .first_position = first,
                      .tokens = {token, token + spec.block_tokens},
                      .raw = CutBlock(spec, text, first),
                      .codings = {}});
  }
  std::vector<std::byte>& middle = blocks[1].raw;
  SetV(spec, 1, 2, 3, Outlier(spec.dtype), middle);
  if (!is_integer) {
    const std::uint32_t sign = 1u << (8 * DTypeBytes(spec.dtype) - 1);
    SetV(spec, 0, 5, 1, NotFinite(spec.dtype), middle);
    SetV(spec, 1, 7, 1, 0, middle);
    SetV(spec, 1, 8, 2, 1, middle);
    SetV(spec, 1, 9, 3, sign, middle);
    SetV(spec, 1, 10, 4, sign | 2, middle);
  }
  return blocks;
}

// A block of a text that holds tokens of another one, and what it can be coded against. Its own
// token 2 is kept as it is, and so is one of a run, which is cut by that.
inline GoldenBlock MakeSharedBlock(const ModelSpec& spec, std::string name, std::uint32_t index,
                                   std::uint32_t own_tokens, std::uint32_t offset,
                                   std::uint64_t seed, std::vector<GoldenCoding> codings) {
  const std::uint32_t size = spec.block_tokens;
  const SyntheticText other = MakeText(spec, 4 * size, seed);
  const SyntheticText text = ShareTokens(spec, other, offset, size, index * size + own_tokens,
                                         (index + 2) * size, seed + 1, 0.05f);
  SharedBlocks shared(spec, other, text);
  GoldenBlock block = {.name = std::move(name),
                       .first_position = index * size,
                       .tokens = shared.tokens[index],
                       .raw = shared.raw[index],
                       .codings = std::move(codings)};
  SetV(spec, 1, 2, 3, NotFinite(spec.dtype), block.raw);
  SetV(spec, 0, own_tokens + 3, 1, NotFinite(spec.dtype), block.raw);
  for (const ReferenceBlock& of : shared.of_block[index]) {
    block.references.push_back({.node = of.node,
                                .first_position = of.first_position,
                                .tokens = {of.tokens.begin(), of.tokens.end()},
                                .raw = {of.raw.begin(), of.raw.end()}});
  }
  block.runs = shared.runs[index];
  return block;
}

inline GoldenCase MakeCase(std::string model, const DTypeCase& dtype, ModelSpec spec,
                           ResidualProfile profile, std::vector<GoldenBlock> blocks) {
  return {.model = std::move(model),
          .dtype = dtype.name,
          .spec = std::move(spec),
          .profile = std::move(profile),
          .blocks = std::move(blocks)};
}

inline std::vector<GoldenCase> MakeGoldenCases() {
  std::vector<GoldenCase> cases;
  for (const DTypeCase& dtype : kDTypes) {
    const ModelSpec spec = HalvesSpec(dtype.dtype);
    ResidualProfile profile = GoldenProfile(spec, /*block_per_head=*/true);
    AddExponents(profile, 2);
    AddFirstToken(profile, spec);
    std::vector<GoldenBlock> blocks = MakeBlocks(spec, 100 + static_cast<int>(dtype.dtype));
    const bool has_exact = !IsInteger(dtype.dtype) && dtype.dtype != DType::kFloat32;
    GoldenBlock& middle = blocks[1];
    middle.codings = {kGoldenHigh, kGoldenLossless, kGoldenRotated};
    if (has_exact) middle.codings.push_back(kGoldenExact);
    if (dtype.dtype == DType::kBfloat16) {
      middle.codings.push_back(kGoldenNearExact);
      middle.codings.push_back(kGoldenSmall);
      middle.codings.push_back(kGoldenRaw);
      blocks[0].codings = {kGoldenHigh, kGoldenExact, kGoldenRotated};
    } else {
      blocks.erase(blocks.begin());
    }
    cases.push_back(MakeCase("halves", dtype, spec, std::move(profile), std::move(blocks)));
  }
  {
    const DTypeCase& dtype = kDTypes[1];  // float16
    const ModelSpec spec = NeighboursSpec(dtype.dtype);
    std::vector<GoldenBlock> blocks = MakeBlocks(spec, 200);
    blocks[0].codings = {kGoldenHigh};
    blocks[1].codings = {kGoldenHigh, kGoldenNearExact, kGoldenSmall, kGoldenExact, kGoldenRotated};
    cases.push_back(MakeCase("neighbours", dtype, spec, GoldenProfile(spec, false), blocks));
  }
  {
    const DTypeCase& dtype = kDTypes[0];  // float32
    const ModelSpec spec = UnturnedSpec(dtype.dtype);
    ResidualProfile profile = GoldenProfile(spec, false);
    AddExponents(profile, 1);
    std::vector<GoldenBlock> blocks = MakeBlocks(spec, 300);
    blocks[0].codings = {kGoldenHigh};
    blocks[1].codings = {kGoldenHigh, kGoldenNearExact};
    // Nothing can be saved.
    GoldenBlock noise = blocks[1];
    noise.name = "noise";
    noise.raw = Noise(noise.raw.size(), 7);
    noise.codings = {kGoldenLossless, kGoldenRotated};
    blocks.push_back(std::move(noise));
    cases.push_back(MakeCase("unturned", dtype, spec, std::move(profile), std::move(blocks)));
  }
  {
    const DTypeCase& dtype = kBfloat16Case;
    ModelSpec spec = HalvesSpec(dtype.dtype);
    spec.name = "shared halves";
    ResidualProfile profile = GoldenProfile(spec, /*block_per_head=*/true);
    AddExponents(profile, 2);
    AddFirstToken(profile, spec);
    AddDifferences(profile, spec, /*block_per_head=*/true, 2);
    std::vector<GoldenBlock> blocks;
    blocks.push_back(MakeSharedBlock(spec, "start", 0, 6, 19, 400, {kGoldenHigh}));
    blocks.push_back(MakeSharedBlock(spec, "again", 5, 5, 25, 410,
                                     {kGoldenHigh, kGoldenNearExact, kGoldenSmall}));
    cases.push_back(MakeCase("shared_halves", dtype, spec, std::move(profile), std::move(blocks)));
  }
  {
    const DTypeCase& dtype = kDTypes[1];  // float16
    ModelSpec spec = NeighboursSpec(dtype.dtype);
    spec.name = "shared neighbours";
    ResidualProfile profile = GoldenProfile(spec, /*block_per_head=*/false);
    AddDifferences(profile, spec, /*block_per_head=*/false, 0);
    std::vector<GoldenBlock> blocks;
    blocks.push_back(MakeSharedBlock(spec, "again", 3, 0, 27, 500, {kGoldenHigh}));
    cases.push_back(
        MakeCase("shared_neighbours", dtype, spec, std::move(profile), std::move(blocks)));
  }
  return cases;
}

// A raw frame, or what FrameCodec makes.
inline std::vector<std::byte> EncodeGolden(const GoldenCase& of, const GoldenBlock& block,
                                           const GoldenCoding& coding, const FrameCodec& with,
                                           const FrameCodec& without) {
  if (coding.name == kGoldenRaw.name) {
    std::vector<FrameSection> sections;
    std::span<const std::byte> left = block.raw;
    for (const std::uint32_t bytes : RawSectionBytes(KvGeometry(of.spec))) {
      sections.push_back({.bytes = bytes, .crc32c = Crc32c(left.first(bytes))});
      left = left.subspan(bytes);
    }
    std::vector<std::byte> frame(FrameHeaderBytes(sections.size()));
    WriteFrameHeader({.codec = CodecId::kRaw,
                      .quality = Quality::kExact,
                      .model = of.spec.Digest(),
                      .raw_bytes = block.raw.size(),
                      .sections = sections},
                     frame);
    frame.insert(frame.end(), block.raw.begin(), block.raw.end());
    return frame;
  }
  const std::vector<ReferenceBlock> references = block.ReferenceBlocks();
  const BlockToEncode to_encode = {.first_position = block.first_position,
                                   .session_tokens = block.first_position + 5000,
                                   .tokens = block.tokens,
                                   .raw = block.raw,
                                   .references = references,
                                   .runs = block.runs};
  const std::span blocks(&to_encode, 1);
  const auto frames = coding.smallest                     ? with.EncodeSmallestExact(blocks)
                      : coding.quality == Quality::kExact ? without.Encode(blocks, coding.quality)
                                                          : with.Encode(blocks, coding.quality);
  EXPECT_TRUE(frames.ok()) << frames.status();
  return frames.ok() ? frames->front().bytes : std::vector<std::byte>();
}

inline std::vector<std::byte> DecodeGolden(const GoldenCase& of, const GoldenBlock& block,
                                           std::span<const std::byte> frame,
                                           const FrameCodec& codec) {
  std::vector<std::byte> raw(block.raw.size());
  const auto view = FrameView::Parse(frame);
  EXPECT_TRUE(view.ok()) << view.status();
  if (!view.ok()) return raw;
  EXPECT_TRUE(view->VerifyBody().ok());
  EXPECT_TRUE(view->CheckGeometry(KvGeometry(of.spec)).ok());
  const std::vector<ReferenceBlock> references = block.ReferenceBlocks();
  const FrameToDecode to_decode = {
      .frame = *view, .tokens = block.tokens, .raw = raw, .references = references};
  const absl::Status decoded = codec.Decode(std::span(&to_decode, 1));
  EXPECT_TRUE(decoded.ok()) << decoded;
  return raw;
}

}  // namespace kvtrie
