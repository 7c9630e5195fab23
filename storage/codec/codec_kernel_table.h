#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/predicted_entropy.h"
#include "storage/codec/residual_entropy.h"

namespace kvtrie {

// For the loops of lossless.cc.
inline constexpr std::uint32_t kLosslessClasses = 16;
inline constexpr std::int32_t kLosslessClassOffset = 11;
inline constexpr std::size_t kLosslessStateWords = 4;  // per channel
struct LosslessRates {
  std::int32_t mean;
  std::int32_t spread;
};
struct LosslessKind {
  std::size_t token_count;
  std::size_t row_components;
  const LosslessRates* rates;  // of each token
  std::int32_t mean;
  std::uint32_t planes;
};
struct LosslessSums {
  std::uint64_t exponents;
  std::uint32_t mantissa_bits;  // those that are set somewhere
};

// For the loops of rotated.cc: one head size and number of bits.
struct RotatedShape {
  std::size_t head_dim;
  std::size_t hadamard_dim;
  std::size_t hartley_dim;
  const float* cas;
  const float* signs;
  float inverse_root_dim;
  std::uint32_t bits;
  const float* codewords;
  const float* bounds;
};

// The inner loops of one set. Each is described where it is used; pointers are to arrays whose
// sizes the caller has checked.
struct CodecKernels {
  // rans.cc
  std::uint8_t* (*rans_encode)(const std::uint32_t* records, std::size_t step_count,
                               std::uint32_t* states, std::uint8_t* end);
  void (*rans_record_symbols)(const std::uint32_t* tables, const std::uint8_t* table_of,
                              const std::uint8_t* symbols, std::size_t count,
                              std::uint32_t* records);
  void (*rans_record_bits)(const std::uint8_t* bit_counts, const std::uint16_t* values,
                           std::size_t count, std::uint32_t* records);
  bool (*rans_decode_symbols)(const std::uint32_t* tables, const std::uint8_t* bytes,
                              std::size_t byte_count, const std::uint8_t* table_of,
                              std::uint8_t* symbols, std::size_t count);
  bool (*rans_decode_bits)(const std::uint8_t* bytes, std::size_t byte_count,
                           const std::uint8_t* bit_counts, std::uint16_t* values,
                           std::size_t count);

  // raw_kv.cc; the first two by the value of DType
  void (*load_floats[8])(const std::uint8_t* raw, std::size_t count, float* values);
  void (*store_floats[8])(const float* values, std::size_t count, std::uint8_t* raw);
  void (*rotate_half_split)(float* rows, std::size_t token_count, std::size_t head_count,
                            std::size_t head_dim, std::size_t pair_count, const float* angles,
                            float direction);
  void (*rotate_interleaved)(float* rows, std::size_t token_count, std::size_t head_count,
                             std::size_t head_dim, std::size_t pair_count, const float* angles,
                             float direction);
  bool (*all_below)(const float* values, std::size_t count, float limit);

  // residual_codec.cc, plane_transform.cc; residual_kernels.h describes them
  void (*residual_start)(const std::uint8_t* bytes, std::size_t byte_count, RansState* state);
  bool (*residual_finished)(const RansState* state);
  void (*residual_decode)(const ResidualTables& tables, const ResidualPlane& plane, LaneMask active,
                          RansState* state, ResidualCarry* carry, float* values);
  std::size_t (*residual_encode)(const ResidualTables& tables, const ResidualPlane& plane,
                                 LaneMask active, const std::int32_t* exponents,
                                 const float* targets, ResidualCarry* carry, float* values,
                                 std::uint32_t* records);
  void (*predicted_decode)(const ResidualTables& tables, const PredictedFormat& format,
                           const PredictedPlane& plane, LaneMask active, RansState* state,
                           std::int32_t* carried_shift, const float* predictions,
                           std::uint32_t* numbers);
  std::size_t (*predicted_encode)(const ResidualTables& tables, const PredictedFormat& format,
                                  const PredictedPlane& plane, LaneMask active,
                                  std::int32_t* carried_shift, const float* predictions,
                                  const std::uint32_t* numbers, std::uint32_t* records);
  void (*residual_codes_of_rows)(const float* rows, std::size_t row_count, std::size_t components,
                                 const float* bias, const float* inverse_scales,
                                 std::uint8_t* codes);
  void (*residual_rows_of_products)(const std::int32_t* products, std::size_t row_count,
                                    std::size_t components, const float* offset, const float* scale,
                                    float* rows, std::size_t row_stride);
  void (*residual_add_values)(const float* values, std::size_t value_count,
                              std::size_t value_stride, const float* basis, std::size_t row_count,
                              std::size_t components, float* rows, std::size_t row_stride);
  // lossless.cc; by the value of DType
  LosslessSums (*lossless_sum[8])(const std::uint8_t* raw, std::size_t count);
  void (*lossless_model[8])(const LosslessKind& kind, const std::uint8_t* raw,
                            std::uint32_t* states, std::uint8_t* tables, std::uint8_t* symbols);
  std::uint32_t* (*lossless_record[8])(const LosslessKind& kind, const std::uint8_t* raw,
                                       const std::uint32_t* rans_tables, const std::uint8_t* tables,
                                       const std::uint8_t* symbols, std::uint32_t* records,
                                       std::uint8_t* planes);
  bool (*lossless_decode[8])(const LosslessKind* kinds, const std::uint32_t* const* rans_tables,
                             const std::uint8_t* bytes, std::size_t byte_count,
                             const std::uint8_t* const* planes, std::uint32_t* states,
                             std::uint8_t* const* raw);

  // rotated.cc; work is [2][head_dim][16]
  std::uint16_t (*rotated_encode)(const RotatedShape& shape, const float* rows, float* work,
                                  float* scales, std::uint8_t* planes);
  void (*rotated_decode)(const RotatedShape& shape, const std::uint8_t* planes, const float* scales,
                         float* work, float* rows);
};

}  // namespace kvtrie
