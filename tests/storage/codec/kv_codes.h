#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/kv/model_spec.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {

using Bytes = std::vector<std::byte>;

inline KvGeometry Geometry(DType dtype, std::vector<LayerRun> layer_runs,
                           std::uint32_t block_tokens) {
  ModelSpec spec;
  spec.name = spec.weights_revision = spec.tokenizer_digest = "x";
  spec.dtype = dtype;
  spec.kv_groups = {{.layer_runs = std::move(layer_runs), .window_tokens = 0}};
  spec.block_tokens = block_tokens;
  EXPECT_TRUE(spec.Validate().ok()) << spec.Validate();
  return KvGeometry(spec);
}

// Those of tests/golden/make_codec.py.
inline KvGeometry LosslessGoldenGeometry(DType dtype) {
  return Geometry(dtype, {{1, 2, 20, 7}, {1, 1, 33, 0}, {1, 1, 5, 16}}, 64);
}
inline KvGeometry RotatedGoldenGeometry() {
  return Geometry(DType::kBfloat16, {{1, 2, 16, 12}, {1, 1, 5, 0}}, 24);
}

// Small and large, even and odd, with and without V.
inline std::vector<KvGeometry> VariedGeometries(DType dtype) {
  return {Geometry(dtype, {{1, 1, 1, 0}}, 1),
          Geometry(dtype, {{1, 1, 1, 1}}, 1),
          Geometry(dtype, {{3, 1, 576, 0}}, 16),
          Geometry(dtype, {{2, 32, 8, 8}}, 7),
          Geometry(dtype, {{1, 3, 64, 64}, {1, 1, 31, 97}, {1, 5, 1, 2}}, 33),
          Geometry(dtype, {{1, 1, 16, 16}}, 1024)};
}

struct DTypeCase {
  DType dtype;
  const char* name;
  unsigned mantissa_bits;  // of floats
};
inline constexpr DTypeCase kDTypes[] = {{DType::kFloat32, "float32", 23},
                                        {DType::kFloat16, "float16", 10},
                                        {DType::kBfloat16, "bfloat16", 7},
                                        {DType::kFloat8E4m3, "float8_e4m3", 3},
                                        {DType::kFloat8E5m2, "float8_e5m2", 2},
                                        {DType::kInt8, "int8", 0},
                                        {DType::kUint8, "uint8", 0}};
inline constexpr const DTypeCase& kBfloat16Case = kDTypes[2];
inline bool IsInteger(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kUint8; }

// Codes like KV: channels of their own size and sign. As in tests/golden/make_codec.py.
class KvCodes {
 public:
  explicit KvCodes(const DTypeCase& dtype)
      : dtype_(dtype), random_(static_cast<std::uint64_t>(dtype.dtype)) {}

  std::uint32_t Noise() {
    const std::uint32_t high = random_.Below(1 << 16) << 16;
    return high | random_.Below(1 << 16);
  }
  std::uint32_t Next(std::uint32_t channel) {
    std::uint32_t sign = random_.Below(8) == 0 ? 1 : 0;
    sign ^= channel & 1;
    const bool rare = random_.Below(50) == 0;
    const std::uint32_t scale = random_.Below(256) | 256;
    const std::uint32_t noise = random_.Below(1 << 23);
    const auto lower = static_cast<std::uint32_t>(__builtin_ctz(scale));
    if (IsInteger(dtype_.dtype)) {
      const std::uint32_t bound = 1u << channel % 8;
      const std::uint32_t size = rare ? 128 : (noise % (bound + 1)) >> lower / 4;
      const std::uint32_t value = sign != 0 || rare ? 0 - size : std::min(size, 127u);
      return value + (dtype_.dtype == DType::kUint8 ? 128 : 0);
    }
    const auto bits = static_cast<unsigned>(8 * DTypeBytes(dtype_.dtype));
    const std::uint32_t middle = (1u << (bits - 1 - dtype_.mantissa_bits)) * 5 / 8;
    const std::uint32_t top = middle + channel % 5;
    const std::uint32_t exponent = rare || top < lower ? 0 : top - lower;
    std::uint32_t mantissa = noise & ((1u << dtype_.mantissa_bits) - 1);
    if (dtype_.dtype == DType::kFloat32) mantissa &= ~0xFFFFu;
    return sign << (bits - 1) | exponent << dtype_.mantissa_bits | mantissa;
  }

 private:
  const DTypeCase& dtype_;
  TestRandom random_;
};

// A block of such codes; layers from `noise_layer` on are noise.
inline Bytes KvBlock(const DTypeCase& dtype, const KvGeometry& geometry,
                     std::uint32_t noise_layer) {
  Bytes raw(geometry.raw_block_bytes());
  KvCodes codes(dtype);
  const std::size_t size = DTypeBytes(dtype.dtype);
  std::byte* to = raw.data();
  for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      for (std::uint32_t token = 0; token < geometry.block_tokens(); ++token) {
        for (std::uint32_t c = 0; c < geometry.row_components(layer, kind); ++c, to += size) {
          const std::uint32_t code = layer >= noise_layer ? codes.Noise() : codes.Next(c);
          std::memcpy(to, &code, size);
        }
      }
    }
  }
  return raw;
}

inline Bytes Noise(std::size_t size, std::uint64_t seed) {
  TestRandom random(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.Below(256));
  return bytes;
}

}  // namespace kvtrie
