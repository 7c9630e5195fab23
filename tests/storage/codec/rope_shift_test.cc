#include "storage/codec/rope_shift.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/storage/codec/kernel_sets.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint32_t kBlockTokens = 8;

ModelSpec Spec(RopePairing pairing, DType dtype = DType::kFloat32, std::uint32_t rotary_dims = 0) {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "x";
  spec.dtype = dtype;
  // Two shapes, one with a tail that fills no vector register.
  spec.kv_groups = {{.layer_runs = {{2, 3, 64, 32}, {1, 2, 36, 36}}, .window_tokens = 0}};
  spec.rope = {.pairing = pairing, .theta = 10'000, .rotary_dims = rotary_dims, .scaling = {}};
  spec.block_tokens = kBlockTokens;
  EXPECT_TRUE(spec.Validate().ok()) << spec.Validate();
  return spec;
}

// A block of numbers that K and V may have, as raw bytes.
std::vector<std::byte> RandomBlock(const ModelSpec& spec, std::uint64_t seed) {
  const KvGeometry geometry(spec);
  const RawKv raw_kv(geometry, {});  // un-rotates nothing
  const RopeAngles none = raw_kv.AnglesAt(0);
  std::vector<std::byte> raw(geometry.raw_block_bytes());
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 3);
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      std::vector<float> rows(std::size_t{kBlockTokens} * geometry.row_components(layer, kind));
      for (float& value : rows) value = normal(random);
      raw_kv.WriteRows(rows, layer, kind, none, raw);
    }
  }
  return raw;
}

std::vector<float> RowsOf(const ModelSpec& spec, std::span<const std::byte> raw,
                          std::uint32_t layer, KvKind kind) {
  const KvGeometry geometry(spec);
  const RawKv raw_kv(geometry, {});
  std::vector<float> rows(std::size_t{kBlockTokens} * geometry.row_components(layer, kind));
  raw_kv.ReadRows(raw, layer, kind, raw_kv.AnglesAt(0), rows);
  return rows;
}

// RoPE by its definition, in double: what a row of one head is `positions` further on.
std::vector<double> Turned(std::span<const float> head, const RopeSpec& rope, double positions) {
  std::vector<double> turned(head.begin(), head.end());
  const std::size_t dims = rope.rotary_dims == 0 ? head.size() : rope.rotary_dims;
  for (std::size_t pair = 0; pair < dims / 2; ++pair) {
    const bool is_half = rope.pairing == RopePairing::kHalfSplit;
    const std::size_t a = is_half ? pair : 2 * pair;
    const std::size_t b = is_half ? pair + dims / 2 : 2 * pair + 1;
    const double angle = positions * std::pow(rope.theta, -2.0 * static_cast<double>(pair) /
                                                              static_cast<double>(dims));
    turned[a] = head[a] * std::cos(angle) - head[b] * std::sin(angle);
    turned[b] = head[b] * std::cos(angle) + head[a] * std::sin(angle);
  }
  return turned;
}

double RoundingOf(DType dtype, double value) {
  const int digits = dtype == DType::kFloat32    ? 24
                     : dtype == DType::kFloat16  ? 11
                     : dtype == DType::kBfloat16 ? 8
                                                 : 4;
  const double least = dtype == DType::kFloat8E4m3 ? 0x1p-10 : 0x1p-25;  // below: subnormal steps
  return std::max(std::ldexp(std::abs(value), -digits), least);
}

TEST(RopeShiftTest, KIsThatOfTheNewPositionAndVStaysAsItIs) {
  for (const RopePairing pairing : {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat8E4m3}) {
      for (const std::int64_t positions : {1, -1, 37, -500, 100'000, -100'000}) {
        SCOPED_TRACE(
            absl::StrCat(static_cast<int>(pairing), " ", static_cast<int>(dtype), " ", positions));
        const ModelSpec spec = Spec(pairing, dtype, positions == 37 ? 20 : 0);
        ASSERT_TRUE(RopeShift::Check(spec).ok());
        const std::vector<std::byte> from = RandomBlock(spec, 1);
        const std::vector<std::byte> before = RandomBlock(spec, 2);
        std::vector<std::byte> to = before;
        EXPECT_THAT(RopeShift(spec, positions).Copy(from, 1, to, 3, 4), IsEmpty());
        const KvGeometry geometry(spec);
        for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
          for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
            const std::size_t width = geometry.row_components(layer, kind);
            const std::size_t head_dim = geometry.head_dim(layer, kind);
            const auto source = RowsOf(spec, from, layer, kind);
            const auto target = RowsOf(spec, to, layer, kind);
            const auto old = RowsOf(spec, before, layer, kind);
            for (std::size_t token = 0; token < kBlockTokens; ++token) {
              for (std::size_t at = 0; at < width; at += head_dim) {
                const std::size_t own = token * width + at;
                if (token < 3 || token >= 7) {
                  for (std::size_t i = 0; i < head_dim; ++i)
                    EXPECT_EQ(target[own + i], old[own + i]);
                  continue;
                }
                const auto head = std::span(source).subspan((token - 2) * width + at, head_dim);
                const auto wanted = kind == KvKind::kV
                                        ? std::vector<double>(head.begin(), head.end())
                                        : Turned(head, spec.rope, static_cast<double>(positions));
                for (std::size_t i = 0; i < head_dim; ++i) {
                  const double error = std::abs(target[own + i] - wanted[i]);
                  ASSERT_LE(error, kind == KvKind::kV
                                       ? 0
                                       : RoundingOf(dtype, wanted[i]) + std::ldexp(20, -22))
                      << "layer " << layer << " token " << token << " component " << at + i;
                }
              }
            }
          }
        }
      }
    }
  }
}

// There and back is what was, within two roundings: the codec's un-rotation agrees.
TEST(RopeShiftTest, AgreesWithTheCodecsRotation) {
  const ModelSpec spec = Spec(RopePairing::kHalfSplit);
  const std::vector<std::byte> from = RandomBlock(spec, 3);
  std::vector<std::byte> to(from.size());
  RopeShift(spec, 1000 - 96).Copy(from, 0, to, 0, kBlockTokens);
  const RawKv raw_kv(KvGeometry(spec), spec.rope);
  std::vector<float> old_rows(kBlockTokens * 3 * 64);
  std::vector<float> new_rows(old_rows.size());
  raw_kv.ReadRows(from, 0, KvKind::kK, raw_kv.AnglesAt(96), old_rows);
  raw_kv.ReadRows(to, 0, KvKind::kK, raw_kv.AnglesAt(1000), new_rows);
  for (std::size_t i = 0; i < old_rows.size(); ++i) {
    EXPECT_NEAR(old_rows[i], new_rows[i], 20 * 0x1p-20) << i;
  }
}

TEST(RopeShiftTest, EveryKernelSetGivesTheSameBytes) {
  const ModelSpec spec = Spec(RopePairing::kInterleaved, DType::kBfloat16);
  const std::vector<std::byte> from = RandomBlock(spec, 4);
  std::vector<std::byte> first;
  WithEachKernelSet([&] {
    std::vector<std::byte> to(from.size());
    RopeShift(spec, -77).Copy(from, 0, to, 0, kBlockTokens);
    if (first.empty()) first = to;
    EXPECT_EQ(to, first);
  });
  EXPECT_FALSE(first.empty());
}

TEST(RopeShiftTest, AShiftOfZeroAndAModelWithoutRopeCopyBitForBit) {
  for (const bool has_rope : {true, false}) {
    const ModelSpec spec = Spec(has_rope ? RopePairing::kHalfSplit : RopePairing::kNone);
    ASSERT_TRUE(RopeShift::Check(spec).ok());
    std::vector<std::byte> from = RandomBlock(spec, 5);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(from.data(), &nan, sizeof(nan));
    std::vector<std::byte> to(from.size());
    EXPECT_THAT(RopeShift(spec, has_rope ? 0 : 9).Copy(from, 0, to, 0, kBlockTokens), IsEmpty());
    EXPECT_EQ(to, from);
  }
}

TEST(RopeShiftTest, TokensThatCannotBeTurnedAreNamed) {
  const ModelSpec spec = Spec(RopePairing::kHalfSplit);
  const KvGeometry geometry(spec);
  std::vector<std::byte> from = RandomBlock(spec, 6);
  const float bad[] = {std::numeric_limits<float>::infinity(), kComponentLimit};
  // K of layer 1 of token 2, K of layer 2 of token 5.
  std::memcpy(from.data() + geometry.kind_begin(1, KvKind::kK) + 2 * 3 * 64 * 4 + 40, &bad[0], 4);
  std::memcpy(from.data() + geometry.kind_begin(2, KvKind::kK) + 5 * 2 * 36 * 4 + 8, &bad[1], 4);
  std::vector<std::byte> to(from.size());
  EXPECT_THAT(RopeShift(spec, 10).Copy(from, 1, to, 0, 6), ElementsAre(1, 4));
}

TEST(RopeShiftTest, WhatCannotBeMovedIsRefusedWithItsField) {
  const auto refusal = [](const auto& change) {
    ModelSpec spec = Spec(RopePairing::kHalfSplit, DType::kBfloat16);
    change(spec);
    const absl::Status status = RopeShift::Check(spec);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](ModelSpec& s) { s.layout_tag = "own"; }), HasSubstr("layout_tag"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.rope.scaling = "yarn"; }), HasSubstr("rope.scaling"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.rope.theta = 0; }), HasSubstr("rope.theta"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.dtype = DType::kInt8; }), HasSubstr("dtype"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.rope.rotary_dims = 48; }),
              HasSubstr("rope.rotary_dims: they do not pair up within K of layer 2"));
}

}  // namespace
}  // namespace kvtrie
