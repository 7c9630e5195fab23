#include "storage/codec/rotated.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/raw_kv.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/codec/body_checks.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/kv_codes.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

// As rotated_codes of tests/golden/make_codec.py.
Bytes GoldenRaw() {
  const KvGeometry geometry = RotatedGoldenGeometry();
  Bytes raw = KvBlock(kBfloat16Case, geometry, /*noise_layer=*/2);
  for (std::size_t at = 0; at < raw.size(); at += 2) {
    std::uint16_t code;
    std::memcpy(&code, &raw[at], 2);
    if ((code >> 7 & 255) >= 32) code = static_cast<std::uint16_t>(code - (32 << 7));
    std::memcpy(&raw[at], &code, 2);
  }
  const auto set = [&](std::size_t token, std::size_t component, std::uint16_t code) {
    std::memcpy(&raw[geometry.kind_begin(0, KvKind::kV) + 2 * (24 * token + component)], &code, 2);
  };
  for (std::size_t i = 0; i < 12; ++i) set(1, 12 + i, 0);
  set(2, 12, 0x7FC1);
  for (std::size_t i = 0; i < 12; ++i) set(3, 12 + i, 1);
  return raw;
}

Bytes Decoded(const KvGeometry& geometry, std::span<const std::byte> body) {
  Bytes raw(geometry.raw_block_bytes(), std::byte{0x5A});
  const absl::Status status = DecodeRotated(geometry, body, raw);
  EXPECT_TRUE(status.ok()) << status;
  return raw;
}

TEST(RotatedTest, BytesAreTheGoldenOnesOfEveryKernelSet) {
  const KvGeometry geometry = RotatedGoldenGeometry();
  const Bytes raw = GoldenRaw();
  for (const auto& [k_bits, v_bits] : {std::pair{2u, 3u}, {4u, 5u}}) {
    const std::string name = "v1/rotated_" + std::to_string(k_bits) + std::to_string(v_bits);
    const std::string golden = ReadGolden(name + ".bin");
    const std::string decoded = ReadGolden(name + "_decoded.bin");
    WithEachKernelSet([&, k_bits = k_bits, v_bits = v_bits] {
      const auto block =
          EncodeRotated(geometry, raw, {0, 0xE3069283, {}}, {.k_bits = k_bits, .v_bits = v_bits});
      ASSERT_TRUE(block.ok()) << block.status();
      EXPECT_TRUE(AsText(block->body.bytes) == golden);
      EXPECT_EQ(block->exact_vectors, 2u);
      // Computed in double there: a rounding to bfloat16 may fall on the other side, and what
      // cancels leaves the float32 errors of components up to 100.
      const Bytes ours = Decoded(geometry, AsBytes(golden));
      ASSERT_EQ(ours.size(), decoded.size());
      for (std::size_t at = 0; at < ours.size(); at += 2) {
        const auto code = LoadLittle<std::uint16_t>(&ours[at]);
        const auto expected_code = LoadLittle<std::uint16_t>(&decoded[at]);
        const auto value = std::bit_cast<float>(std::uint32_t{code} << 16);
        const auto expected = std::bit_cast<float>(std::uint32_t{expected_code} << 16);
        if (std::isfinite(expected)) {
          EXPECT_NEAR(value, expected, std::abs(expected) / 128 + 1e-4) << at;
        } else {
          EXPECT_EQ(code, expected_code) << at;
        }
      }
    });
  }
}

// Holds all that is promised of any block; returns what it decodes to.
Bytes CheckRoundTrip(const KvGeometry& geometry, const Bytes& raw, const RotatedOptions& options,
                     std::uint64_t* exact_vectors = nullptr) {
  const auto encode = [&] {
    const auto block = EncodeRotated(geometry, raw, {}, options);
    EXPECT_TRUE(block.ok()) << block.status();
    if (!block.ok()) return CodedBody{};
    if (exact_vectors != nullptr) *exact_vectors = block->exact_vectors;
    return block->body;
  };
  const RoundTrip trip = RoundTripOfEachKernelSet(geometry, encode, DecodeRotated);
  EXPECT_LE(trip.body.size(), raw.size() + 28 + 12 * geometry.layer_count());
  return trip.decoded;
}

// Vectors of one layer that has K only, as float32.
struct Vectors {
  Vectors(std::uint32_t head_dim, std::uint32_t tokens)
      : geometry(Geometry(DType::kFloat32, {{1, 1, head_dim, 0}}, tokens)),
        values(std::size_t{head_dim} * tokens) {}

  Bytes raw() const {
    Bytes bytes(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  std::vector<float> RoundTrip(std::uint32_t bits, std::uint64_t* exact_vectors = nullptr) const {
    const Bytes decoded =
        CheckRoundTrip(geometry, raw(), {.k_bits = bits, .exact_session_tokens = 0}, exact_vectors);
    std::vector<float> result(values.size());
    std::memcpy(result.data(), decoded.data(), decoded.size());
    return result;
  }
  // Mean over vectors, relative to their squares.
  double Error(std::uint32_t bits) const {
    const std::vector<float> decoded = RoundTrip(bits);
    const std::size_t dim = geometry.head_dim(0, KvKind::kK);
    double sum = 0;
    for (std::size_t begin = 0; begin < values.size(); begin += dim) {
      double error = 0;
      double square = 0;
      for (std::size_t i = begin; i < begin + dim; ++i) {
        error += std::pow(static_cast<double>(values[i]) - decoded[i], 2);
        square += std::pow(static_cast<double>(values[i]), 2);
      }
      sum += error / square;
    }
    return sum / geometry.block_tokens();
  }

  KvGeometry geometry;
  std::vector<float> values;
};

// Of a normal component (Max 1960, table 1); a unit vector's has shorter tails.
double ErrorMax(std::uint32_t bits) {
  return std::vector<double>{0, 0, 0.1175, 0.03454, 0.009497, 0.002499}[bits];
}

TEST(RotatedTest, ErrorIsThatOfTheCodebookForEveryHeadSize) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const std::uint32_t dim :
       {2u, 3u, 5u, 8u, 12u, 31u, 64u, 80u, 96u, 112u, 127u, 128u, 192u, 256u, 575u, 576u}) {
    Vectors vectors(dim, 200);
    for (float& value : vectors.values) value = normal(random);
    for (const std::uint32_t bits : {2u, 3u, 4u, 5u}) {
      // 200 vectors: what is left of chance.
      EXPECT_LT(vectors.Error(bits), 1.06 * ErrorMax(bits)) << dim << " " << bits;
    }
  }
}

TEST(RotatedTest, ErrorDoesNotDependOnWhichChannelsAreLarge) {
  TestRandom random(1);
  for (const std::uint32_t dim : {64u, 80u, 127u, 128u, 576u}) {
    Vectors one_large(dim, 128);
    Vectors constant(dim, 128);
    for (std::size_t i = 0; i < one_large.values.size(); ++i) {
      one_large.values[i] = static_cast<float>(random.Below(2001)) / 1000 - 1;
      if (i % dim == i / dim % dim) one_large.values[i] = 500;
      constant.values[i] = 3;
    }
    for (const std::uint32_t bits : {2u, 4u}) {
      EXPECT_LT(one_large.Error(bits), 3 * ErrorMax(bits)) << dim;
      EXPECT_LT(constant.Error(bits), 2 * ErrorMax(bits)) << dim;
    }
  }
}

TEST(RotatedTest, OneDimensionIsAScale) {
  Vectors vectors(1, 64);
  for (std::size_t i = 0; i < 64; ++i) {
    vectors.values[i] = (i % 2 == 0 ? 1.5f : -0.375f) * static_cast<float>(i);
  }
  const std::vector<float> decoded = vectors.RoundTrip(2);
  EXPECT_EQ(decoded, vectors.values);  // float16 has these numbers
}

TEST(RotatedTest, ZerosStayZeros) {
  Vectors vectors(80, 40);
  for (std::size_t i = 0; i < vectors.values.size(); ++i) {
    const std::size_t token = i / 80;
    if (token % 3 == 0) vectors.values[i] = static_cast<float>(i % 7) - 3;
    if (token % 3 == 1) vectors.values[i] = -0.0f;
  }
  std::uint64_t exact_vectors = 1;
  const std::vector<float> decoded = vectors.RoundTrip(3, &exact_vectors);
  EXPECT_EQ(exact_vectors, 0u);
  for (std::size_t i = 0; i < decoded.size(); ++i) {
    if (i / 80 % 3 == 0) continue;
    EXPECT_EQ(decoded[i], 0.0f);
    EXPECT_FALSE(std::signbit(decoded[i]));
  }
}

TEST(RotatedTest, WhatCannotBeQuantizedIsKeptBitForBitAndCounted) {
  constexpr std::uint32_t kDim = 64;
  Vectors vectors(kDim, 100);
  for (std::size_t i = 0; i < vectors.values.size(); ++i) {
    vectors.values[i] = static_cast<float>(i % 11) - 5;
  }
  float* const values = vectors.values.data();
  const auto fill = [&](std::size_t token, float value) {
    std::fill_n(values + token * kDim, kDim, value);
  };
  values[3 * kDim + 63] = std::numeric_limits<float>::quiet_NaN();
  values[17 * kDim] = std::numeric_limits<float>::infinity();
  values[18 * kDim + 5] = -std::numeric_limits<float>::infinity();
  values[31 * kDim + 5] = 3e38f;
  fill(32, 1e5f);
  fill(33, 1e-6f);
  fill(34, 1e-44f);
  fill(99, std::numeric_limits<float>::signaling_NaN());
  const std::vector<std::size_t> kept = {3, 17, 18, 31, 32, 33, 34, 99};
  std::uint64_t exact_vectors = 0;
  const std::vector<float> decoded = vectors.RoundTrip(4, &exact_vectors);
  EXPECT_EQ(exact_vectors, kept.size());
  for (std::size_t token = 0; token < 100; ++token) {
    const bool same =
        std::memcmp(&decoded[token * kDim], values + token * kDim, kDim * sizeof(float)) == 0;
    const bool is_kept = std::find(kept.begin(), kept.end(), token) != kept.end();
    EXPECT_EQ(same, is_kept) << token;
    for (std::size_t i = 0; i < kDim && !is_kept; ++i) {
      EXPECT_TRUE(std::isfinite(decoded[token * kDim + i])) << token;
    }
  }
}

TEST(RotatedTest, FiniteStaysFiniteInEveryDType) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    const KvGeometry geometry = Geometry(dtype.dtype, {{2, 3, 40, 24}, {1, 1, 1, 1}}, 33);
    Bytes raw = Noise(geometry.raw_block_bytes(), 1);
    const RawKv raw_kv(geometry, {});
    const RopeAngles angles = raw_kv.AnglesAt(0);
    const Bytes decoded = CheckRoundTrip(geometry, raw, {});
    for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
      for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
        std::vector<float> before(std::size_t{33} * geometry.row_components(layer, kind));
        std::vector<float> after(before.size());
        raw_kv.ReadRows(raw, layer, kind, angles, before);
        raw_kv.ReadRows(decoded, layer, kind, angles, after);
        for (std::size_t i = 0; i < before.size(); ++i) {
          EXPECT_EQ(std::isfinite(before[i]), std::isfinite(after[i])) << i;
        }
      }
    }
  }
}

TEST(RotatedTest, EveryShapeEncodes) {
  for (const DTypeCase& dtype : kDTypes) {
    SCOPED_TRACE(dtype.name);
    for (const KvGeometry& geometry : VariedGeometries(dtype.dtype)) {
      CheckRoundTrip(geometry, KvBlock(dtype, geometry, geometry.layer_count()), {});
    }
  }
}

TEST(RotatedTest, TheSessionsFirstTokensAreExact) {
  const KvGeometry geometry = Geometry(DType::kFloat32, {{2, 3, 64, 32}}, 16);
  Bytes raw(geometry.raw_block_bytes());
  TestRandom random(2);
  for (std::size_t at = 0; at < raw.size(); at += 4) {
    const float value = static_cast<float>(random.Below(2001)) / 1000 - 1;
    std::memcpy(&raw[at], &value, 4);
  }
  // How many leading tokens of K of the last layer came back bit for bit.
  const auto exact_tokens = [&](std::uint32_t first_position, std::uint32_t wanted) {
    const auto block =
        EncodeRotated(geometry, raw, {first_position, 0, {}}, {.exact_session_tokens = wanted});
    EXPECT_EQ(block->exact_vectors, 0u);
    const Bytes decoded = Decoded(geometry, block->body.bytes);
    const std::size_t begin = geometry.kind_begin(1, KvKind::kK);
    std::size_t token = 0;
    while (token < 16 && std::memcmp(&decoded[begin + token * 3 * 64 * 4],
                                     &raw[begin + token * 3 * 64 * 4], 3 * 64 * 4) == 0) {
      ++token;
    }
    return token;
  };
  EXPECT_EQ(exact_tokens(0, 0), 0u);
  EXPECT_EQ(exact_tokens(0, 1), 1u);
  EXPECT_EQ(exact_tokens(16, 1), 0u);
  EXPECT_EQ(exact_tokens(16, 20), 4u);
  EXPECT_EQ(exact_tokens(0, 20), 16u);
  EXPECT_EQ(exact_tokens(0xFFFFFFFF, 0xFFFFFFFF), 0u);
}

TEST(RotatedTest, ARateThatCannotBeIsRefused) {
  const KvGeometry geometry = RotatedGoldenGeometry();
  const Bytes raw = GoldenRaw();
  for (const std::uint32_t bits : {0u, 1u, 6u, 0xFFFFFFFFu}) {
    const absl::Status k = EncodeRotated(geometry, raw, {}, {.k_bits = bits}).status();
    const absl::Status v = EncodeRotated(geometry, raw, {}, {.v_bits = bits}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(k));
    EXPECT_NE(k.message().find("k_bits"), absl::string_view::npos) << k;
    EXPECT_NE(v.message().find("v_bits"), absl::string_view::npos) << v;
  }
}

TEST(RotatedReaderTest, NeedsTheHeadAndALayersOwnBytes) {
  const KvGeometry geometry = RotatedGoldenGeometry();
  const Bytes body = EncodeRotated(geometry, GoldenRaw(), {}, {})->body.bytes;
  ExpectLayersDecodeAlone<RotatedReader>(geometry, body, RotatedHeadBytesMax(geometry),
                                         Decoded(geometry, body));
}

TEST(RotatedReaderTest, DamageOfTheStructureIsRefused) {
  const KvGeometry geometry = RotatedGoldenGeometry();
  const Bytes body = EncodeRotated(geometry, GoldenRaw(), {}, {})->body.bytes;
  const DamagedBody damaged_body(geometry, body, DecodeRotated);
  damaged_body.ExpectOtherLengthsAreRefused(/*stride=*/1);
  const std::size_t layer = RotatedHeadBytesMax(geometry);
  const std::size_t exact = layer + 8 + 2 * 48 + 3 * 2 * 4 * 16;  // scales and 3 groups of codes
  EXPECT_TRUE(damaged_body.Refuses(24, 0, 4));
  EXPECT_TRUE(damaged_body.Refuses(24, 2, 4));
  EXPECT_TRUE(damaged_body.Refuses(28, 0, 4));
  EXPECT_TRUE(damaged_body.Refuses(28, 0xFFFFFFFF, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer, 0, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer, 1, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer, 6, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer + 4, 0, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer + 4, 49, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer + 4, 0xFFFFFFFF, 4));
  EXPECT_TRUE(damaged_body.Refuses(layer + 8, 0x7C00, 2));
  EXPECT_TRUE(damaged_body.Refuses(layer + 8, 0x8001, 2));
  EXPECT_TRUE(damaged_body.Refuses(exact, 1, 4));
  EXPECT_TRUE(damaged_body.Refuses(exact, 48, 4));
  EXPECT_TRUE(damaged_body.Refuses(exact + 4, 48, 4));
  EXPECT_TRUE(damaged_body.Refuses(exact + 4, 0, 4));
}

}  // namespace
}  // namespace kvtrie
