#pragma once

// Loops of rans.cc, for codec_kernels_impl.h.
#include "storage/codec/rans_lanes.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

// The quotient of each lane. REQUIRES: divisor <= 2^12.
KV_LANES_INLINE U32x16 Divide(U32x16 dividend, U32x16 divisor) {
#if defined(KV_LANES_AVX512)
  // Exact: a quotient that is not whole lies 2^-44 of itself, at least, from the next whole one.
  const auto half = [](__m256i a, __m256i b) KV_LANES_INLINE_LAMBDA {
    return _mm512_cvttpd_epu32(_mm512_div_pd(_mm512_cvtepu32_pd(a), _mm512_cvtepu32_pd(b)));
  };
  const __m512i a = (__m512i)dividend.piece[0];
  const __m512i b = (__m512i)divisor.piece[0];
  const __m256i low = half(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
  const __m256i high = half(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1));
  dividend.piece[0] = (U32x16::Piece)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return dividend;
#else
  return dividend / divisor;
#endif
}

// Writes the low words of the lanes of `mask`, in lane order, so that they end at `end`. Returns
// where they begin.
KV_LANES_INLINE std::uint8_t* WriteWordsBefore(std::uint8_t* end, LaneMask mask, U32x16 words) {
  std::uint8_t* const begin = end - 2 * __builtin_popcount(mask);
#if defined(KV_LANES_AVX512)
  const __m256i packed =
      _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(mask, (__m512i)words.piece[0]));
  const auto used = static_cast<__mmask16>((1u << __builtin_popcount(mask)) - 1);
  _mm256_mask_storeu_epi16(begin, used, packed);
#else
  std::uint32_t lanes[kLanes];
  Store(words, lanes);
  std::uint8_t* to = begin;
  for (std::size_t i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const auto word = static_cast<std::uint16_t>(lanes[i]);
    __builtin_memcpy(to, &word, sizeof word);
    to += sizeof word;
  }
#endif
  return begin;
}

// Codes steps from the last to the first; their words end at `end`. Returns where they begin.
std::uint8_t* RansEncode(const std::uint32_t* records, std::size_t step_count,
                         std::uint32_t* lane_states, std::uint8_t* end) {
  U32x16 states = Load(lane_states);
  for (std::size_t step = step_count; step-- > 0;) {
    const U32x16 record = Load(records + step * kLanes);
    const U32x16 frequency = (record & (kRansFrequencySum - 1)) + 1;
    const auto full = static_cast<LaneMask>(~Less(states >> 20, frequency));
    end = WriteWordsBefore(end, full, states);
    states = Select(full, states >> 16, states);
    const U32x16 quotient = Divide(states, frequency);
    states = (quotient << kRansFrequencyBits) + (states - quotient * frequency) +
             (record >> kRansFrequencyBits);
  }
  Store(states, lane_states);
  return end;
}

// Calls body(first index, mask) for each 16 of `count`.
template <typename Body>
KV_LANES_INLINE void ForEachStep(std::size_t count, Body body) {
  std::size_t at = 0;
  for (; count - at >= kLanes; at += kLanes) body(at, kAllLanes);
  if (at < count) body(at, static_cast<LaneMask>((1u << (count - at)) - 1));
}

void RansRecordSymbols(const std::uint32_t* tables, const std::uint8_t* table_of,
                       const std::uint8_t* symbols, std::size_t count, std::uint32_t* records) {
  ForEachStep(count, [=](std::size_t at, LaneMask mask) KV_LANES_INLINE_LAMBDA {
    Store(RansSymbolRecords(tables, LoadU8(table_of + at, mask), LoadU8(symbols + at, mask), mask),
          records + at);
  });
}

void RansRecordBits(const std::uint8_t* bit_counts, const std::uint16_t* values, std::size_t count,
                    std::uint32_t* records) {
  ForEachStep(count, [=](std::size_t at, LaneMask mask) KV_LANES_INLINE_LAMBDA {
    Store(RansBitsRecords(LoadU16(values + at, mask), LoadU8(bit_counts + at, mask), mask),
          records + at);
  });
}

bool RansDecodeSymbols(const std::uint32_t* tables, const std::uint8_t* bytes,
                       std::size_t byte_count, const std::uint8_t* table_of, std::uint8_t* symbols,
                       std::size_t count) {
  RansDecoder decoder;
  decoder.Start(bytes, byte_count);
  ForEachStep(count, [&, tables, table_of, symbols](std::size_t at,
                                                    LaneMask mask) KV_LANES_INLINE_LAMBDA {
    StoreU8(decoder.DecodeSymbols(tables, LoadU8(table_of + at, mask), mask), symbols + at, mask);
  });
  return decoder.Finished();
}

bool RansDecodeBits(const std::uint8_t* bytes, std::size_t byte_count,
                    const std::uint8_t* bit_counts, std::uint16_t* values, std::size_t count) {
  RansDecoder decoder;
  decoder.Start(bytes, byte_count);
  ForEachStep(count, [&, bit_counts, values](std::size_t at, LaneMask mask) KV_LANES_INLINE_LAMBDA {
    StoreU16(decoder.DecodeBits(LoadU8(bit_counts + at, mask), mask), values + at, mask);
  });
  return decoder.Finished();
}

}  // namespace
}  // namespace kvtrie

#pragma GCC diagnostic pop
