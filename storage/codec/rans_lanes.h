#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/lanes.h"

// The steps of rans.h for code that decides between them what comes next: a loop that computes the
// contexts of 16 lanes from symbols that it has decoded. Compiled for the including file's
// instruction set, as lanes.h is.

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {

inline constexpr std::size_t kRansTableSlots = kRansFrequencySum;
inline constexpr std::size_t kRansTableSymbols = 256;

// What RansTables::decode() holds for a slot: the symbol in the low 8 bits, then slot minus the
// symbol's first slot, then the symbol's frequency minus 1 (12 bits each).
// What an encoder records for a lane: frequency minus 1 and first slot, 12 bits each. With
// kRansIdleRecord a lane codes nothing; kRansImpossible marks a symbol that the table has not.
inline constexpr std::uint32_t kRansIdleRecord = kRansFrequencySum - 1;
inline constexpr std::uint32_t kRansImpossible = 1u << 31;

inline namespace KV_LANES_NAMESPACE {

#if defined(KV_LANES_AVX2)
// kExpand.from[m][i]: which word goes to lane i of 8 when the lanes of m take words in turn.
struct ExpandTable {
  std::uint8_t from[256][8];
};
constexpr ExpandTable MakeExpandTable() {
  ExpandTable table{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    std::uint8_t next = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      table.from[mask][lane] = (mask >> lane & 1) != 0 ? next++ : std::uint8_t{0};
    }
  }
  return table;
}
inline constexpr ExpandTable kExpand = MakeExpandTable();
#endif

// Reads what RansEncoder wrote. Whatever the bytes are, it reads only these, and ends: after the
// last of them it goes on with zeros, and Finished() is false.
//
// A plain value: copied, it is two decoders that go on alike. `next` and `end` may be moved to
// another copy of the bytes, or `end` forward when more of them have arrived.
struct RansDecoder {
  U32x16 states = kRansStateMin;
  const std::uint8_t* next = nullptr;
  const std::uint8_t* end = nullptr;
  bool damaged = false;

  KV_LANES_INLINE void Start(const void* bytes, std::size_t byte_count) {
    next = static_cast<const std::uint8_t*>(bytes);
    end = next + byte_count;
    states = kRansStateMin;
    damaged = byte_count < kRansStateBytes;
    if (damaged) {
      next = end;
      return;
    }
    U32x16 first;
    __builtin_memcpy(&first, next, sizeof first);
    next += kRansStateBytes;
    // Each later state is large enough when the first is.
    const LaneMask bad = Equal(first >> 16, U32x16(0));
    damaged = bad != 0;
    states = Select(bad, states, first);
  }

  // A symbol in each lane of `active`, coded with table `table` (of the lane) of `tables`, which is
  // RansTables::decode(). What the other lanes return is of no meaning.
  KV_LANES_INLINE U32x16 DecodeSymbols(const std::uint32_t* tables, U32x16 table, LaneMask active) {
    const U32x16 slot = states & (kRansFrequencySum - 1);
    const U32x16 entry = Gather(tables, (table << kRansFrequencyBits) | slot);
    const U32x16 high = states >> kRansFrequencyBits;
    const U32x16 rest = high + ((entry >> 8) & (kRansFrequencySum - 1));
    Advance(MultiplyAdd(entry, high, rest), active);
    return entry & 0xFF;
  }

  // `bit_count` bits (0 to 12, of the lane) in each lane of `active`.
  KV_LANES_INLINE U32x16 DecodeBits(U32x16 bit_count, LaneMask active) {
    const U32x16 shift = U32x16(kRansFrequencyBits) - bit_count;
    const U32x16 slot = states & (kRansFrequencySum - 1);
    const U32x16 rest = slot & ((U32x16(1) << shift) - 1);
    Advance(((states >> kRansFrequencyBits) << shift) + rest, active);
    return slot >> shift;
  }

  // Whether all that was encoded has been decoded, and as far as the states can tell, intact.
  KV_LANES_INLINE bool Finished() const {
    return !damaged && next == end && Equal(states, U32x16(kRansStateMin)) == kAllLanes;
  }

 private:
  // (entry >> 20) * high + rest. REQUIRES: it is below 2^32.
  static KV_LANES_INLINE U32x16 MultiplyAdd(U32x16 entry, U32x16 high, U32x16 rest) {
#if defined(KV_LANES_AVX512)
    // Two products of half the lanes take half the time of one product of all.
    const __m512i entries = (__m512i)entry.piece[0];
    const __m512i highs = (__m512i)high.piece[0];
    const __m512i even = _mm512_mul_epu32(_mm512_srli_epi32(entries, 20), highs);
    const __m512i odd =
        _mm512_mul_epu32(_mm512_srli_epi64(entries, 52), _mm512_srli_epi64(highs, 32));
    rest.piece[0] = (U32x16::Piece)_mm512_add_epi32(_mm512_add_epi32((__m512i)rest.piece[0], even),
                                                    _mm512_slli_epi64(odd, 32));
    return rest;
#else
    return (entry >> 20) * high + rest;
#endif
  }

  KV_LANES_INLINE void Advance(U32x16 advanced, LaneMask active) {
    states = Select(active, advanced, states);
    const LaneMask low = Less(states, U32x16(kRansStateMin));
    // A state takes one word, since a step leaves it at 2^4 or more. Words come in lane order.
    const auto word_count = static_cast<std::size_t>(__builtin_popcount(low));
    alignas(64) std::uint8_t last_words[2 * kLanes];
    const std::uint8_t* words = next;
    const auto left_bytes = static_cast<std::size_t>(end - next);
    if (left_bytes >= 2 * kLanes) [[likely]] {
      next += 2 * word_count;
    } else {
      __builtin_memset(last_words, 0, sizeof last_words);
      if (left_bytes > 0) __builtin_memcpy(last_words, next, left_bytes);
      words = last_words;
      const bool short_of_words = left_bytes < 2 * word_count;
      damaged |= short_of_words;
      next = short_of_words ? end : next + 2 * word_count;
    }
#if defined(KV_LANES_AVX512)
    const __m512i state = (__m512i)states.piece[0];
    const __m512i word = _mm512_maskz_expand_epi32(
        low, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words)));
    states.piece[0] =
        (U32x16::Piece)_mm512_mask_or_epi32(state, low, _mm512_slli_epi32(state, 16), word);
#elif defined(KV_LANES_AVX2)
    const auto half = [](unsigned mask, const std::uint8_t* from) KV_LANES_INLINE_LAMBDA {
      const __m256i words_of_half = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
      const __m256i order = _mm256_cvtepu8_epi32(_mm_loadu_si64(kExpand.from[mask]));
      return (U32x16::Piece)_mm256_permutevar8x32_epi32(words_of_half, order);
    };
    U32x16 word;
    word.piece[0] = half(low & 0xFF, words);
    word.piece[1] = half(low >> 8, words + 2 * __builtin_popcount(low & 0xFF));
    states = Select(low, (states << 16) | word, states);
#else
    for (std::size_t i = 0; i < kLanes; ++i) {
      if ((low >> i & 1) == 0) continue;
      std::uint16_t word;
      __builtin_memcpy(&word, words, sizeof word);
      words += sizeof word;
      auto& piece = states.piece[i / kPieceLanes];
      piece[i % kPieceLanes] = piece[i % kPieceLanes] << 16 | word;
    }
#endif
  }
};

// What RansEncoder is to record for a step: a symbol in each lane of `active`. `tables` is
// RansTables::encode().
KV_LANES_INLINE U32x16 RansSymbolRecords(const std::uint32_t* tables, U32x16 table, U32x16 symbol,
                                         LaneMask active) {
  return Select(active, Gather(tables, (table << 8) | symbol), U32x16(kRansIdleRecord));
}

// The same for `bit_count` bits (0 to 12, of the lane). REQUIRES: bits < 2^bit_count.
KV_LANES_INLINE U32x16 RansBitsRecords(U32x16 bits, U32x16 bit_count, LaneMask active) {
  const U32x16 shift = U32x16(kRansFrequencyBits) - bit_count;
  const U32x16 record = ((U32x16(1) << shift) - 1) | (bits << shift << kRansFrequencyBits);
  return Select(active, record, U32x16(kRansIdleRecord));
}

}  // namespace KV_LANES_NAMESPACE
}  // namespace kvtrie

#pragma GCC diagnostic pop
