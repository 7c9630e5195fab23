#pragma once

// Loops of rotated.cc, for codec_kernels_impl.h. ROTATED.md says what they compute.
#include "storage/codec/codec_kernel_table.h"
#include "storage/codec/lanes.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

// A lane for each of 16 vectors, so that no step of the transform crosses lanes: `work` is
// [head_dim][16], and as much again.
KV_LANES_INLINE void Transform(const RotatedShape& shape, float* work) {
  for (std::size_t block = 0; block < shape.head_dim; block += shape.hadamard_dim) {
    for (std::size_t half = 1; half < shape.hadamard_dim; half *= 2) {
      for (std::size_t pair = 0; pair < shape.hadamard_dim; pair += 2 * half) {
        float* const low = work + (block + pair) * kLanes;
        float* const high = low + half * kLanes;
        for (std::size_t i = 0; i < half * kLanes; i += kLanes) {
          const F32x16 a = Load(low + i);
          const F32x16 b = Load(high + i);
          Store(a + b, low + i);
          Store(a - b, high + i);
        }
      }
    }
  }
  if (shape.hartley_dim == 1) return;
  float* const column = work + shape.head_dim * kLanes;
  const std::size_t stride = shape.hadamard_dim * kLanes;
  for (std::size_t at = 0; at < stride; at += kLanes) {
    for (std::size_t i = 0; i < shape.hartley_dim; ++i) {
      Store(Load(work + at + i * stride), column + i * kLanes);
    }
    for (std::size_t i = 0; i < shape.hartley_dim; ++i) {
      F32x16 sum = Load(column);  // cas(0) = 1
      std::size_t turn = 0;
      for (std::size_t j = 1; j < shape.hartley_dim; ++j) {
        turn += i;
        if (turn >= shape.hartley_dim) turn -= shape.hartley_dim;
        sum = sum + F32x16(shape.cas[turn]) * Load(column + j * kLanes);
      }
      Store(sum, work + at + i * stride);
    }
  }
}

// rows: 16 vectors of head_dim. Returns the lanes that cannot be quantized; their codes mean
// nothing.
std::uint16_t RotatedEncode(const RotatedShape& shape, const float* rows, float* work,
                            float* scales, std::uint8_t* planes) {
  U32x16 row_begins;
  std::uint32_t begins[kLanes];
  for (std::uint32_t i = 0; i < kLanes; ++i) {
    begins[i] = i * static_cast<std::uint32_t>(shape.head_dim);
  }
  row_begins = Load(begins);
  F32x16 squares = 0.0f;
  U32x16 any_bits = 0;
  for (std::size_t i = 0; i < shape.head_dim; ++i) {
    const F32x16 value = Gather(rows + i, row_begins);
    squares = squares + value * value;
    any_bits = any_bits | (BitCast<std::uint32_t>(value) & 0x7FFFFFFF);
    Store(value * F32x16(shape.signs[i]), work + i * kLanes);
  }
  const LaneMask zero = Equal(any_bits, U32x16(0));
  // What is too small or too large for the scale, or no number, is not in between.
  const auto sane =
      static_cast<LaneMask>(Less(F32x16(0x1p-28f), squares) & Less(squares, F32x16(0x1p32f)));
  squares = Select(sane, squares, F32x16(1.0f));
  const F32x16 norm = SquareRoot(squares);
  const F32x16 to_unit = F32x16(shape.inverse_root_dim) / norm;
  for (std::size_t i = 0; i < shape.head_dim; ++i) {
    const F32x16 value = Load(work + i * kLanes) * to_unit;
    Store(Select(sane, value, F32x16(0.0f)), work + i * kLanes);
  }
  Transform(shape, work);

  const auto magnitude_count = std::size_t{1} << (shape.bits - 1);
  F32x16 along = 0.0f;  // what of the vector lies along its codewords, and their squared length
  F32x16 code_squares = 0.0f;
  for (std::size_t i = 0; i < shape.head_dim; ++i) {
    const U32x16 bits = BitCast<std::uint32_t>(Load(work + i * kLanes));
    const F32x16 magnitude = BitCast<float>(bits & 0x7FFFFFFF);
    U32x16 code = 0;
    for (std::size_t b = 0; b + 1 < magnitude_count; ++b) {
      code = code + SelectLess(magnitude, F32x16(shape.bounds[b]), U32x16(0), U32x16(1));
    }
    const F32x16 codeword = Gather(shape.codewords, code);
    along = along + codeword * magnitude;
    code_squares = code_squares + codeword * codeword;
    code = code | (bits >> 31) << (shape.bits - 1);
    for (std::uint32_t p = 0; p < shape.bits; ++p) {
      const LaneMask plane = SignBits(BitCast<std::int32_t>(code << (31 - p)));
      __builtin_memcpy(planes, &plane, sizeof plane);
      planes += sizeof plane;
    }
  }
  // The scale of least error; the norm alone would leave what the codewords are too short.
  const F32x16 scale = norm * (along / code_squares);
  const auto in_range =
      static_cast<LaneMask>(sane & ~Less(scale, F32x16(0x1p-14f)) & Less(scale, F32x16(65504.0f)));
  Store(Select(in_range, scale, F32x16(0.0f)), scales);
  return static_cast<std::uint16_t>(~(in_range | zero));
}

void RotatedDecode(const RotatedShape& shape, const std::uint8_t* planes, const float* scales,
                   float* work, float* rows) {
  for (std::size_t i = 0; i < shape.head_dim; ++i) {
    U32x16 code = 0;
    for (std::uint32_t p = 0; p < shape.bits; ++p) {
      LaneMask plane;
      __builtin_memcpy(&plane, planes, sizeof plane);
      planes += sizeof plane;
      code = code | Select(plane, U32x16(1u << p), U32x16(0));
    }
    const std::uint32_t sign = 1u << (shape.bits - 1);
    const F32x16 codeword = Gather(shape.codewords, code & (sign - 1));
    const U32x16 negative = (code & sign) << (32 - shape.bits);
    Store(BitCast<float>(BitCast<std::uint32_t>(codeword) | negative), work + i * kLanes);
  }
  Transform(shape, work);
  const F32x16 scale = Load(scales) * F32x16(shape.inverse_root_dim);
  for (std::size_t i = 0; i < shape.head_dim; ++i) {
    // Plus 0: a vector of zeros has no negative ones.
    const F32x16 value = Load(work + i * kLanes) * (scale * F32x16(shape.signs[i])) + F32x16(0.0f);
    float lanes[kLanes];
    Store(value, lanes);
    for (std::size_t v = 0; v < kLanes; ++v) rows[v * shape.head_dim + i] = lanes[v];
  }
}

}  // namespace
}  // namespace kvtrie

#pragma GCC diagnostic pop
