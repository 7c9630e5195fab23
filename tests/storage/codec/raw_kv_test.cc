#include "storage/codec/raw_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

ModelSpec Spec(DType dtype, std::vector<LayerRun> layer_runs, std::uint32_t block_tokens,
               RopeSpec rope = {}) {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "x";
  spec.dtype = dtype;
  spec.kv_groups = {{.layer_runs = std::move(layer_runs), .window_tokens = 0}};
  spec.rope = std::move(rope);
  spec.block_tokens = block_tokens;
  EXPECT_TRUE(spec.Validate().ok()) << spec.Validate();
  return spec;
}

// One layer of V alone matters: rows of `count` components that are converted and nothing else.
class Conversion {
 public:
  Conversion(DType dtype, std::size_t count)
      : raw_kv_(KvGeometry(Spec(dtype, {{1, 1, 1, static_cast<std::uint32_t>(count)}}, 1)), {}),
        raw_(raw_kv_.geometry().raw_block_bytes()),
        angles_(raw_kv_.AnglesAt(0)),
        component_bytes_(DTypeBytes(dtype)) {}

  std::vector<float> Decode(const std::vector<std::uint32_t>& codes) {
    for (std::size_t i = 0; i < codes.size(); ++i) {
      std::memcpy(raw_.data() + (1 + i) * component_bytes_, &codes[i], component_bytes_);
    }
    std::vector<float> rows(codes.size());
    raw_kv_.ReadRows(raw_, 0, KvKind::kV, angles_, rows);
    return rows;
  }
  std::vector<std::uint32_t> Encode(std::vector<float> values) {
    raw_kv_.WriteRows(values, 0, KvKind::kV, angles_, raw_);
    std::vector<std::uint32_t> codes(values.size());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      std::memcpy(&codes[i], raw_.data() + (1 + i) * component_bytes_, component_bytes_);
    }
    return codes;
  }

 private:
  RawKv raw_kv_;
  std::vector<std::byte> raw_;
  RopeAngles angles_;
  std::size_t component_bytes_;
};

// What a code of one or two bytes means, by the definition of its dtype.
double Meaning(DType dtype, std::uint32_t code) {
  const auto small = [](std::uint32_t value, int sign_bit, int mantissa_bits, int bias) {
    const int exponent =
        static_cast<int>(value >> mantissa_bits & ((1u << (sign_bit - mantissa_bits)) - 1));
    const double mantissa = value & ((1u << mantissa_bits) - 1);
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                           : std::ldexp(mantissa + (1 << mantissa_bits),
                                                        exponent - bias - mantissa_bits);
    return (value >> sign_bit & 1) != 0 ? -magnitude : magnitude;
  };
  const auto special = [](bool infinite, bool negative) {
    const double infinity = negative ? -kInfinity : kInfinity;
    return infinite ? infinity : static_cast<double>(kNan);
  };
  switch (dtype) {
    case DType::kFloat16:
      if ((code & 0x7C00) == 0x7C00) return special((code & 0x3FF) == 0, code >> 15 != 0);
      return small(code, 15, 10, 15);
    case DType::kBfloat16:
      if ((code & 0x7F80) == 0x7F80) return special((code & 0x7F) == 0, code >> 15 != 0);
      return small(code, 15, 7, 127);
    case DType::kFloat8E4m3:
      if ((code & 0x7F) == 0x7F) return kNan;
      return small(code, 7, 3, 7);
    case DType::kFloat8E5m2:
      if ((code & 0x7C) == 0x7C) return special((code & 3) == 0, code >> 7 != 0);
      return small(code, 7, 2, 15);
    case DType::kInt8:
      return static_cast<std::int8_t>(code);
    default:
      return code;
  }
}

constexpr DType kSmallDTypes[] = {DType::kFloat16,    DType::kBfloat16, DType::kFloat8E4m3,
                                  DType::kFloat8E5m2, DType::kInt8,     DType::kUint8};

std::uint32_t CodeCount(DType dtype) { return DTypeBytes(dtype) == 1 ? 256 : 65536; }

// All codes of a dtype, 4096 at a time.
void ForCodes(DType dtype,
              const std::function<void(Conversion&, const std::vector<std::uint32_t>&)>& body) {
  const std::uint32_t piece = std::min(CodeCount(dtype), 4096u);
  Conversion conversion(dtype, piece);
  for (std::uint32_t first = 0; first < CodeCount(dtype); first += piece) {
    std::vector<std::uint32_t> codes(piece);
    for (std::uint32_t i = 0; i < piece; ++i) codes[i] = first + i;
    body(conversion, codes);
  }
}

TEST(RawKvTest, EveryCodeMeansWhatItsDTypeSaysAndComesBack) {
  WithEachKernelSet([] {
    for (const DType dtype : kSmallDTypes) {
      ForCodes(dtype, [dtype](Conversion& conversion, const std::vector<std::uint32_t>& codes) {
        const std::vector<float> values = conversion.Decode(codes);
        const std::vector<std::uint32_t> again = conversion.Encode(values);
        for (std::size_t i = 0; i < codes.size(); ++i) {
          const double meaning = Meaning(dtype, codes[i]);
          if (std::isnan(meaning)) {
            EXPECT_TRUE(std::isnan(values[i])) << codes[i];
            EXPECT_TRUE(std::isnan(Meaning(dtype, again[i]))) << codes[i];
          } else {
            EXPECT_EQ(values[i], meaning) << codes[i];
            EXPECT_EQ(again[i], codes[i]) << static_cast<int>(dtype);
          }
        }
      });
    }
  });
}

// Values between and around all codes: midpoints, their neighbours, quarters, and far outside.
std::vector<float> ValuesAround(DType dtype) {
  std::vector<double> meanings;
  for (std::uint32_t code = 0; code < CodeCount(dtype); ++code) {
    const double meaning = Meaning(dtype, code);
    if (std::isfinite(meaning)) meanings.push_back(meaning);
  }
  std::sort(meanings.begin(), meanings.end());
  std::vector<float> values = {0.0f, -0.0f, 3e38f, -3e38f, 1e-45f, -1e-45f, 1e-38f, 1e30f, 1e10f};
  for (std::size_t i = 0; i + 1 < meanings.size(); ++i) {
    const auto middle = static_cast<float>(meanings[i] / 2 + meanings[i + 1] / 2);
    values.push_back(middle);
    values.push_back(std::nextafter(middle, kInfinity));
    values.push_back(std::nextafter(middle, -kInfinity));
    values.push_back(static_cast<float>(meanings[i] * 0.75 + meanings[i + 1] * 0.25));
  }
  const double last = meanings.back();
  const double step = last - meanings[meanings.size() - 2];
  for (const double beyond : {0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 16.0}) {
    values.push_back(static_cast<float>(last + beyond * step));
    values.push_back(static_cast<float>(meanings.front() - beyond * step));
  }
  std::erase_if(values, [](float value) { return !std::isfinite(value); });
  return values;
}

TEST(RawKvTest, RoundsToTheNearestAndEvenCodeAndStaysFinite) {
  for (const DType dtype : kSmallDTypes) {
    SCOPED_TRACE(static_cast<int>(dtype));
    const std::vector<float> values = ValuesAround(dtype);
    std::vector<std::pair<double, std::uint32_t>> codes;
    for (std::uint32_t code = 0; code < CodeCount(dtype); ++code) {
      const double meaning = Meaning(dtype, code);
      if (std::isfinite(meaning)) codes.emplace_back(meaning, code);
    }
    std::sort(codes.begin(), codes.end());
    WithEachKernelSet([&] {
      for (std::size_t at = 0; at < values.size(); at += 4000) {
        const std::vector<float> piece(
            values.begin() + static_cast<std::ptrdiff_t>(at),
            values.begin() + static_cast<std::ptrdiff_t>(std::min(at + 4000, values.size())));
        const std::vector<std::uint32_t> encoded = Conversion(dtype, piece.size()).Encode(piece);
        for (std::size_t i = 0; i < piece.size(); ++i) {
          const double value = piece[i];
          const double got = Meaning(dtype, encoded[i]);
          ASSERT_TRUE(std::isfinite(got)) << value;
          const auto above = std::lower_bound(codes.begin(), codes.end(), std::pair{value, 0u});
          const double high = above == codes.end() ? codes.back().first : above->first;
          const double low = above == codes.begin() ? high : std::prev(above)->first;
          const double best = std::min(std::abs(value - high), std::abs(value - low));
          EXPECT_EQ(std::abs(value - got), best) << value << " became " << got;
          const bool tie = high != low && std::abs(value - high) == std::abs(value - low);
          EXPECT_TRUE(!tie || encoded[i] % 2 == 0) << value << " became " << got;
        }
      }
    });
  }
}

TEST(RawKvTest, InfinityAndNanAreKeptWhereTheDTypeHasThem) {
  const auto encode = [](DType dtype, float value) {
    return Conversion(dtype, 1).Encode({value})[0];
  };
  WithEachKernelSet([&] {
    EXPECT_EQ(encode(DType::kFloat16, kInfinity), 0x7C00u);
    EXPECT_EQ(encode(DType::kFloat16, -kInfinity), 0xFC00u);
    EXPECT_EQ(encode(DType::kBfloat16, kInfinity), 0x7F80u);
    EXPECT_EQ(encode(DType::kBfloat16, -kInfinity), 0xFF80u);
    EXPECT_EQ(encode(DType::kFloat8E5m2, kInfinity), 0x7Cu);
    EXPECT_EQ(encode(DType::kFloat8E4m3, kInfinity), 0x7Eu);
    EXPECT_EQ(encode(DType::kFloat8E4m3, -kInfinity), 0xFEu);
    EXPECT_EQ(encode(DType::kInt8, kInfinity), 127u);
    EXPECT_EQ(encode(DType::kInt8, -kInfinity), 0x80u);
    EXPECT_EQ(encode(DType::kUint8, -kInfinity), 0u);
    EXPECT_EQ(encode(DType::kInt8, kNan), 0u);
    for (const DType dtype :
         {DType::kFloat16, DType::kBfloat16, DType::kFloat8E4m3, DType::kFloat8E5m2}) {
      EXPECT_TRUE(std::isnan(Meaning(dtype, encode(dtype, kNan))));
      EXPECT_TRUE(std::isnan(Meaning(dtype, encode(dtype, -kNan))));
    }
    // Cutting the payload's only bit must not make infinity of it.
    float low_payload;
    const std::uint32_t bits = 0x7F800001;
    std::memcpy(&low_payload, &bits, sizeof bits);
    EXPECT_TRUE(std::isnan(Meaning(DType::kBfloat16, encode(DType::kBfloat16, low_payload))));
  });
}

// Layers of several shapes: odd sizes, a latent without V, one dimension.
const std::vector<LayerRun> kShapes = {
    {2, 3, 20, 7}, {1, 1, 576, 0}, {1, 2, 64, 64}, {1, 5, 1, 33}};

TEST(RawKvTest, WithoutRopeEveryLayerComesBackBitForBit) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kInt8}) {
    const KvGeometry geometry(Spec(dtype, kShapes, 5));
    const RawKv raw_kv(geometry, {});
    TestRandom random(1);
    std::vector<std::byte> raw(geometry.raw_block_bytes());
    for (std::size_t i = 0; i < raw.size(); ++i) {
      // No exponent of all ones.
      raw[i] = static_cast<std::byte>(random.Below(256) & 0b1011'1011);
    }
    WithEachKernelSet([&] {
      std::vector<std::byte> written(raw.size());
      const RopeAngles angles = raw_kv.AnglesAt(3);
      for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
        EXPECT_FALSE(raw_kv.unrotates_k(layer));
        for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
          std::vector<float> rows(std::size_t{5} * geometry.row_components(layer, kind));
          raw_kv.ReadRows(raw, layer, kind, angles, rows);
          raw_kv.WriteRows(rows, layer, kind, angles, written);
        }
      }
      EXPECT_EQ(written, raw);
    });
  }
}

RopeSpec Rope(RopePairing pairing, std::uint32_t rotary_dims = 0) {
  return {.pairing = pairing, .theta = 10000, .rotary_dims = rotary_dims, .scaling = ""};
}

// K that an engine would have: `before` turned by the angles of its positions, in long double.
std::vector<float> Rotated(const KvGeometry& geometry, std::uint32_t layer, const RopeSpec& rope,
                           std::uint32_t first_position, const std::vector<float>& before) {
  const std::size_t head_dim = geometry.head_dim(layer, KvKind::kK);
  const std::size_t dims = rope.rotary_dims == 0 ? head_dim : rope.rotary_dims;
  std::vector<float> after = before;
  for (std::size_t row = 0; row < before.size() / head_dim; ++row) {
    const std::size_t token = row / geometry.kv_heads(layer);
    for (std::size_t pair = 0; pair < dims / 2; ++pair) {
      const bool half_split = rope.pairing == RopePairing::kHalfSplit;
      const std::size_t a = row * head_dim + (half_split ? pair : 2 * pair);
      const std::size_t b = half_split ? a + dims / 2 : a + 1;
      const long double angle =
          static_cast<long double>(first_position + token) *
          std::pow(static_cast<long double>(rope.theta),
                   -2.0L * static_cast<long double>(pair) / static_cast<long double>(dims));
      const long double cosine = std::cos(angle);
      const long double sine = std::sin(angle);
      after[a] = static_cast<float>(before[a] * cosine - before[b] * sine);
      after[b] = static_cast<float>(before[b] * cosine + before[a] * sine);
    }
  }
  return after;
}

TEST(RawKvTest, KIsUnrotatedByItsPositionsAndRotatedAgain) {
  for (const RopeSpec& rope :
       {Rope(RopePairing::kHalfSplit), Rope(RopePairing::kInterleaved),
        Rope(RopePairing::kHalfSplit, 16), Rope(RopePairing::kInterleaved, 10),
        Rope(RopePairing::kHalfSplit, 20), Rope(RopePairing::kInterleaved, 20)}) {
    const KvGeometry geometry(Spec(DType::kFloat32, {{2, 3, 20, 7}, {1, 2, 64, 64}}, 5, rope));
    const RawKv raw_kv(geometry, rope);
    for (const std::uint32_t position : {0u, 17u, 1'000'000u}) {
      std::vector<std::byte> first_written;
      WithEachKernelSet([&] {
        TestRandom random(2);
        std::vector<std::byte> raw(geometry.raw_block_bytes());
        std::vector<std::byte> written(raw.size());
        const RopeAngles angles = raw_kv.AnglesAt(position);
        for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
          ASSERT_TRUE(raw_kv.unrotates_k(layer));
          std::vector<float> before(geometry.kind_bytes(layer, KvKind::kK) / 4);
          for (float& value : before) value = static_cast<float>(random.Below(2001)) / 1000 - 1;
          const std::vector<float> after = Rotated(geometry, layer, rope, position, before);
          std::memcpy(raw.data() + geometry.kind_begin(layer, KvKind::kK), after.data(),
                      geometry.kind_bytes(layer, KvKind::kK));
          std::vector<float> rows(before.size());
          raw_kv.ReadRows(raw, layer, KvKind::kK, angles, rows);
          // Angles of a million rounded to double: 1e-10. The rest is float32.
          for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_NEAR(rows[i], before[i], 5e-7) << i;
          raw_kv.WriteRows(rows, layer, KvKind::kK, angles, written);
          for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_NEAR(rows[i], after[i], 1e-6) << i;
        }
        if (first_written.empty()) first_written = written;
        EXPECT_EQ(written, first_written);
      });
    }
  }
}

TEST(RawKvTest, VIsNeverRotated) {
  const RopeSpec rope = Rope(RopePairing::kHalfSplit);
  const KvGeometry geometry(Spec(DType::kFloat32, {{1, 1, 4, 4}}, 1, rope));
  const RawKv raw_kv(geometry, rope);
  const std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> rows(4);
  const auto raw = std::as_bytes(std::span(values));
  raw_kv.ReadRows(raw, 0, KvKind::kV, raw_kv.AnglesAt(9), rows);
  EXPECT_EQ(rows, (std::vector<float>{5, 6, 7, 8}));
}

TEST(RawKvTest, AnUnknownRotationIsLeftAlone) {
  RopeSpec scaled = Rope(RopePairing::kHalfSplit);
  scaled.scaling = "yarn:factor=4";
  RopeSpec no_theta = Rope(RopePairing::kHalfSplit);
  no_theta.theta = 0;
  for (const RopeSpec& rope :
       {scaled, no_theta, Rope(RopePairing::kHalfSplit, 3), Rope(RopePairing::kInterleaved, 6)}) {
    const KvGeometry geometry(Spec(DType::kFloat32, {{1, 1, 4, 4}}, 1, rope));
    const RawKv raw_kv(geometry, rope);
    EXPECT_FALSE(raw_kv.unrotates_k(0));
    const std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<float> rows(4);
    raw_kv.ReadRows(std::as_bytes(std::span(values)), 0, KvKind::kK, raw_kv.AnglesAt(9), rows);
    EXPECT_EQ(rows, (std::vector<float>{1, 2, 3, 4}));
  }
}

TEST(RawKvTest, ExtremeTokensAreThoseWithAComponentThatIsNoOrdinaryNumber) {
  constexpr std::uint32_t kTokens = 12;
  const KvGeometry geometry(Spec(DType::kFloat32, {{1, 7, 211, 20}}, kTokens));
  const RawKv raw_kv(geometry, {});
  std::vector<float> values(geometry.raw_block_bytes() / 4, 1.5f);
  const std::size_t row = 7 * 211;
  values[0 * row] = kNan;
  values[2 * row + 1476] = kInfinity;
  values[3 * row + 100] = -kInfinity;
  values[5 * row + 1023] = kComponentLimit;
  values[6 * row + 1024] = -kComponentLimit;
  values[7 * row] = std::nextafter(kComponentLimit, 0.0f);
  values[8 * row] = 1e-45f;
  values[11 * row + 1476] = -kNan;
  WithEachKernelSet([&] {
    const auto raw = std::as_bytes(std::span(values));
    EXPECT_EQ(raw_kv.ExtremeTokens(raw, 0, KvKind::kK),
              (std::vector<std::uint32_t>{0, 2, 3, 5, 6, 11}));
    EXPECT_TRUE(raw_kv.ExtremeTokens(raw, 0, KvKind::kV).empty());
  });
}

}  // namespace
}  // namespace kvtrie
