#pragma once

// Loops of predicted_lossless.cc, for codec_kernels_impl.h.
#include "storage/codec/predicted_entropy.h"
#include "storage/codec/residual_kernels.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

// Exponent of a float32 that is at least 1, as of an integer: floor(log2).
KV_LANES_INLINE I32x16 FloorLog2(I32x16 positive) {
  // Up to 2^24 the conversion is exact.
  return (BitCast<std::int32_t>(Convert<float>(positive)) >> 23) - I32x16(127);
}

// What is known of 16 numbers before they are decoded.
struct PredictedCells {
  I32x16 cell_exponent;  // cells are 2^that wide
  I32x16 scale;          // of the difference of cells
  I32x16 predicted;      // cell of the prediction

  KV_LANES_INLINE PredictedCells(const PredictedFormat& format, F32x16 prediction,
                                 std::int32_t exponent, std::int32_t base_scale) {
    // Where the format's own spacing is wider than a cell, cells are that wide.
    const I32x16 bits = BitCast<std::int32_t>(prediction);
    const I32x16 spacing =
        ((bits >> 23) & I32x16(0xFF)) - I32x16(127) - I32x16(format.mantissa_bits);
    cell_exponent = Max(spacing, I32x16(exponent));
    scale = I32x16(base_scale) - ((cell_exponent - I32x16(exponent)) << 3);
    // Exact: a power of two.
    const F32x16 cells = prediction * BitCast<float>((I32x16(127) - cell_exponent) << 23);
    const F32x16 bounded =
        Select(Less(cells, F32x16(kPredictedCellsMax)), cells, F32x16(kPredictedCellsMax));
    const F32x16 in_range =
        Select(Less(F32x16(-kPredictedCellsMax), bounded), bounded, F32x16(-kPredictedCellsMax));
    const I32x16 towards_zero = Convert<std::int32_t>(in_range);
    const LaneMask above = Less(in_range, Convert<float>(towards_zero));
    predicted = towards_zero - Select(above, I32x16(1), I32x16(0));
  }
};

// A number's bits without its sign, as cell and what is left within the cell.
struct CellOfNumber {
  I32x16 cell;       // floor(|x| / width)
  I32x16 rest;       // bits below the cell
  I32x16 rest_bits;  // how many
};

// The exponent field of a cell's width.
KV_LANES_INLINE I32x16 CellField(const PredictedFormat& format, I32x16 cell_exponent) {
  return Max(cell_exponent + I32x16(format.bias), I32x16(1));
}

KV_LANES_INLINE CellOfNumber ToCell(const PredictedFormat& format, I32x16 cell_field,
                                    I32x16 magnitude) {
  const I32x16 field = magnitude >> format.mantissa_bits;
  const I32x16 mantissa = magnitude & I32x16((1 << format.mantissa_bits) - 1);
  const I32x16 above = field - cell_field;  // octaves of cells
  const I32x16 octave = Max(Min(above, I32x16(22)), I32x16(0));
  const I32x16 shift = I32x16(format.mantissa_bits) - octave;
  const I32x16 down = Max(shift, I32x16(0));
  const I32x16 up = Max(I32x16(0) - shift, I32x16(0));
  CellOfNumber number;
  const LaneMask inside = Less(field, cell_field);
  number.cell = Select(inside, I32x16(0), (I32x16(1) << octave) + ((mantissa >> down) << up));
  number.rest_bits = Select(inside, I32x16(format.mantissa_bits), down);
  number.rest = mantissa & ((I32x16(1) << number.rest_bits) - I32x16(1));
  return number;
}

KV_LANES_INLINE I32x16 FromCell(const PredictedFormat& format, I32x16 cell_field, I32x16 cell,
                                I32x16 octave, I32x16 rest) {
  const I32x16 shift = I32x16(format.mantissa_bits) - octave;
  const I32x16 down = Max(I32x16(0) - shift, I32x16(0));
  const I32x16 up = Max(shift, I32x16(0));
  const I32x16 mantissa = (((cell - (I32x16(1) << octave)) >> down) << up) | rest;
  return ((cell_field + octave) << format.mantissa_bits) | mantissa;
}

// In the cell at zero numbers are told by how far their exponent field is below the cell's.
inline constexpr std::int32_t kFieldGapEscape = 7;

// numbers: [component][16], bits of the format. predictions: [component][16].
void PredictedDecodePlane(const ResidualTables& tables, const PredictedFormat& format,
                          const PredictedPlane& plane, LaneMask active, RansState* state,
                          std::int32_t* carried_shift, const float* predictions,
                          std::uint32_t* numbers) {
  RansDecoder decoder = Resume(*state);
  EnergyContext context(tables, carried_shift);
  const I32x16 sign_bit = I32x16(static_cast<std::int32_t>(1u << format.sign_shift));
  for (std::uint32_t c = 0; c < plane.components; ++c) {
    const PredictedCells cells(format, Load(predictions + c * kLanes), plane.cell_exponents[c],
                               plane.scales[c]);
    const I32x16 field = CellField(format, cells.cell_exponent);
    const I32x16 scale = ClampScale(cells.scale);
    const ScaleClass of(ClampScale(scale + context.Shift()));
    const I32x16 difference = DecodeValue(decoder, tables, of, active);
    context.Add(tables, scale, difference);
    const I32x16 signed_cell = cells.predicted + difference;
    const LaneMask negative = Less(signed_cell, I32x16(0));
    const I32x16 cell =
        Min(Select(negative, I32x16(-1) - signed_cell, signed_cell), I32x16(kEnergyMax));

    const LaneMask at_zero = static_cast<LaneMask>(Equal(cell, I32x16(0)) & active);
    const I32x16 octave = FloorLog2(Max(cell, I32x16(1)));
    I32x16 rest_bits = Max(I32x16(format.mantissa_bits) - octave, I32x16(0));
    rest_bits = Select(at_zero, I32x16(format.mantissa_bits), rest_bits);
    const LaneMask with_rest = static_cast<LaneMask>(NotZero(rest_bits) & active);
    I32x16 rest = 0;
    if (with_rest != 0) {
      rest = Select(with_rest, Signed(decoder.DecodeBits(Unsigned(rest_bits), with_rest)), rest);
    }
    I32x16 magnitude = FromCell(format, field, cell, octave, rest);
    if (at_zero != 0) {
      I32x16 gap = Signed(decoder.DecodeBits(U32x16(3), at_zero));
      const LaneMask far = static_cast<LaneMask>(Equal(gap, I32x16(kFieldGapEscape)) & at_zero);
      if (far != 0) gap = Select(far, Signed(decoder.DecodeBits(U32x16(8), far)), gap);
      const I32x16 own = Max(field - I32x16(1) - gap, I32x16(0));
      magnitude = Select(at_zero, (own << format.mantissa_bits) | rest, magnitude);
    }
    Store(Unsigned(magnitude | Select(negative, sign_bit, I32x16(0))), numbers + c * kLanes);
  }
  Store(context.Shift(), carried_shift);
  Suspend(decoder, *state);
}

// Records the steps of one plane for 16 tokens and returns how many; at most kPredictedStepsMax per
// component. REQUIRES: active numbers are finite, and less than 2^20 cells from zero.
std::size_t PredictedEncodePlane(const ResidualTables& tables, const PredictedFormat& format,
                                 const PredictedPlane& plane, LaneMask active,
                                 std::int32_t* carried_shift, const float* predictions,
                                 const std::uint32_t* numbers, std::uint32_t* records) {
  std::uint32_t* to = records;
  EnergyContext context(tables, carried_shift);
  const I32x16 magnitude_mask = I32x16(static_cast<std::int32_t>((1u << format.sign_shift) - 1));
  for (std::uint32_t c = 0; c < plane.components; ++c) {
    const PredictedCells cells(format, Load(predictions + c * kLanes), plane.cell_exponents[c],
                               plane.scales[c]);
    const I32x16 field = CellField(format, cells.cell_exponent);
    const I32x16 scale = ClampScale(cells.scale);
    const ScaleClass of(ClampScale(scale + context.Shift()));
    const I32x16 bits = Signed(Load(numbers + c * kLanes));
    const I32x16 magnitude = bits & magnitude_mask;
    const LaneMask negative = NotZero(bits & (magnitude_mask ^ I32x16(-1)));
    const CellOfNumber number = ToCell(format, field, magnitude);
    const I32x16 signed_cell = Select(negative, I32x16(-1) - number.cell, number.cell);
    const I32x16 difference = signed_cell - cells.predicted;
    to = RecordValue(tables, of, difference, active, to);
    context.Add(tables, scale, difference);

    const LaneMask with_rest = static_cast<LaneMask>(NotZero(number.rest_bits) & active);
    if (with_rest != 0) {
      to =
          Record(to, RansBitsRecords(Unsigned(number.rest), Unsigned(number.rest_bits), with_rest));
    }
    const LaneMask at_zero = static_cast<LaneMask>(Equal(number.cell, I32x16(0)) & active);
    if (at_zero != 0) {
      const I32x16 gap = field - I32x16(1) - (magnitude >> format.mantissa_bits);
      const I32x16 near = Min(gap, I32x16(kFieldGapEscape));
      to = Record(to, RansBitsRecords(Unsigned(near), U32x16(3), at_zero));
      const LaneMask far = static_cast<LaneMask>(Equal(near, I32x16(kFieldGapEscape)) & at_zero);
      if (far != 0) to = Record(to, RansBitsRecords(Unsigned(gap), U32x16(8), far));
    }
  }
  Store(context.Shift(), carried_shift);
  return static_cast<std::size_t>(to - records) / kLanes;
}

}  // namespace
}  // namespace kvtrie

#pragma GCC diagnostic pop
