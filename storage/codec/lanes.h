#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/codec/symbol_constants.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Sixteen values side by side, compiled for whatever instruction set the including file is compiled
// for: one AVX-512 register, two of AVX2, or four of SSE2. Every set gives the same results, bit
// for bit: integers wrap, float operations round one by one (the library is built without
// contraction).
//
// All of it lies in a namespace of its instruction set, so that a linker never takes the code of
// one for that of another. Code that is built for several sets (codec_kernels_impl.h) uses nothing
// else that the compiler could leave out of line: no templates of the standard library.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KV_LANES_AVX512 1
#define KV_LANES_NAMESPACE lanes_avx512
#elif defined(__AVX2__)
#define KV_LANES_AVX2 1
#define KV_LANES_NAMESPACE lanes_avx2
#else
#define KV_LANES_NAMESPACE lanes_baseline
#endif
#define KV_LANES_INLINE __attribute__((always_inline)) inline
#define KV_LANES_INLINE_LAMBDA __attribute__((always_inline))

// GCC notes that vectors wider than the set's registers are passed in memory; all here is inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {

inline namespace KV_LANES_NAMESPACE {

#if defined(KV_LANES_AVX512)
inline constexpr std::size_t kPieceBytes = 64;
#elif defined(KV_LANES_AVX2)
inline constexpr std::size_t kPieceBytes = 32;
#else
inline constexpr std::size_t kPieceBytes = 16;
#endif
inline constexpr std::size_t kPieceLanes = kPieceBytes / 4;
inline constexpr std::size_t kPieces = kLanes / kPieceLanes;

// T is std::uint32_t, std::int32_t or float.
template <typename T>
struct Lanes {
  static_assert(sizeof(T) == 4);
  typedef T Piece __attribute__((vector_size(kPieceBytes)));
  Piece piece[kPieces];

  Lanes() = default;
  KV_LANES_INLINE Lanes(T value) {  // NOLINT(google-explicit-constructor): a number is 16 of it
    for (std::size_t p = 0; p < kPieces; ++p) piece[p] = Piece{} + value;
  }

#define KV_LANES_OPERATOR(op)                                                        \
  friend KV_LANES_INLINE Lanes operator op(Lanes a, Lanes b) {                       \
    for (std::size_t p = 0; p < kPieces; ++p) a.piece[p] = a.piece[p] op b.piece[p]; \
    return a;                                                                        \
  }
  KV_LANES_OPERATOR(+)
  KV_LANES_OPERATOR(-)
  KV_LANES_OPERATOR(*)
  KV_LANES_OPERATOR(/)
  KV_LANES_OPERATOR(&)
  KV_LANES_OPERATOR(|)
  KV_LANES_OPERATOR(^)
  KV_LANES_OPERATOR(<<)
  KV_LANES_OPERATOR(>>)
#undef KV_LANES_OPERATOR
};

using U32x16 = Lanes<std::uint32_t>;
using I32x16 = Lanes<std::int32_t>;
using F32x16 = Lanes<float>;

template <typename To, typename From>
KV_LANES_INLINE Lanes<To> BitCast(Lanes<From> from) {
  Lanes<To> to;
  for (std::size_t p = 0; p < kPieces; ++p) to.piece[p] = (typename Lanes<To>::Piece)from.piece[p];
  return to;
}

// To a float: rounded to nearest even. To an integer: towards zero. REQUIRES: it fits.
template <typename To, typename From>
KV_LANES_INLINE Lanes<To> Convert(Lanes<From> from) {
  Lanes<To> to;
  for (std::size_t p = 0; p < kPieces; ++p) {
    to.piece[p] = __builtin_convertvector(from.piece[p], typename Lanes<To>::Piece);
  }
  return to;
}

// 16 values from memory of any alignment.
template <typename T>
KV_LANES_INLINE Lanes<T> Load(const T* from) {
  // Piece by piece, or GCC 12 keeps the whole in memory.
  Lanes<T> lanes;
  for (std::size_t p = 0; p < kPieces; ++p) {
    __builtin_memcpy(&lanes.piece[p], from + p * kPieceLanes, kPieceBytes);
  }
  return lanes;
}
template <typename T>
KV_LANES_INLINE void Store(Lanes<T> lanes, T* to) {
  for (std::size_t p = 0; p < kPieces; ++p) {
    __builtin_memcpy(to + p * kPieceLanes, &lanes.piece[p], kPieceBytes);
  }
}

// The first `count` (at most 16) of them; the other lanes are 0.
template <typename T>
KV_LANES_INLINE Lanes<T> LoadFirst(const T* from, std::size_t count) {
  T values[kLanes] = {};
  __builtin_memcpy(values, from, count * sizeof(T));
  return Load(values);
}
template <typename T>
KV_LANES_INLINE void StoreFirst(Lanes<T> lanes, T* to, std::size_t count) {
  T values[kLanes];
  Store(lanes, values);
  __builtin_memcpy(to, values, count * sizeof(T));
}

KV_LANES_INLINE U32x16 LoadU16(const void* from) {
  U32x16 lanes;
#if defined(KV_LANES_AVX512)
  lanes.piece[0] = (U32x16::Piece)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(KV_LANES_AVX2)
  const auto* half = static_cast<const __m128i*>(from);
  lanes.piece[0] = (U32x16::Piece)_mm256_cvtepu16_epi32(_mm_loadu_si128(half));
  lanes.piece[1] = (U32x16::Piece)_mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1));
#else
  std::uint16_t values[kLanes];
  __builtin_memcpy(values, from, sizeof values);
  for (std::size_t i = 0; i < kLanes; ++i)
    lanes.piece[i / kPieceLanes][i % kPieceLanes] = values[i];
#endif
  return lanes;
}

KV_LANES_INLINE U32x16 LoadU32(const void* from) {
  U32x16 lanes;
  const auto* const bytes = static_cast<const std::uint8_t*>(from);
  for (std::size_t p = 0; p < kPieces; ++p) {
    __builtin_memcpy(&lanes.piece[p], bytes + p * kPieceBytes, kPieceBytes);
  }
  return lanes;
}
KV_LANES_INLINE void StoreU32(U32x16 lanes, void* to) {
  auto* const bytes = static_cast<std::uint8_t*>(to);
  for (std::size_t p = 0; p < kPieces; ++p) {
    __builtin_memcpy(bytes + p * kPieceBytes, &lanes.piece[p], kPieceBytes);
  }
}

KV_LANES_INLINE U32x16 LoadU8(const std::uint8_t* from) {
  U32x16 lanes;
#if defined(KV_LANES_AVX512)
  lanes.piece[0] = (U32x16::Piece)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(KV_LANES_AVX2)
  lanes.piece[0] = (U32x16::Piece)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
  lanes.piece[1] = (U32x16::Piece)_mm256_cvtepu8_epi32(_mm_loadu_si64(from + 8));
#else
  for (std::size_t i = 0; i < kLanes; ++i) lanes.piece[i / kPieceLanes][i % kPieceLanes] = from[i];
#endif
  return lanes;
}

#if defined(KV_LANES_AVX2)
// REQUIRES: each lane is below 2^16.
KV_LANES_INLINE __m256i PackU16(U32x16 lanes) {
  const __m256i packed = _mm256_packus_epi32((__m256i)lanes.piece[0], (__m256i)lanes.piece[1]);
  return _mm256_permute4x64_epi64(packed, 0xD8);  // a pack keeps to its half of the register
}
#endif

// The low 16 or 8 bits of each lane.
KV_LANES_INLINE void StoreU16(U32x16 lanes, void* to) {
#if defined(KV_LANES_AVX512)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)lanes.piece[0]));
#elif defined(KV_LANES_AVX2)
  _mm256_storeu_si256((__m256i*)to, PackU16(lanes & 0xFFFF));
#else
  std::uint16_t values[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    values[i] = static_cast<std::uint16_t>(lanes.piece[i / kPieceLanes][i % kPieceLanes]);
  }
  __builtin_memcpy(to, values, sizeof values);
#endif
}
KV_LANES_INLINE void StoreU8(U32x16 lanes, std::uint8_t* to) {
#if defined(KV_LANES_AVX512)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)lanes.piece[0]));
#elif defined(KV_LANES_AVX2)
  const __m256i halves = PackU16(lanes & 0xFF);
  _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(_mm256_castsi256_si128(halves),
                                                  _mm256_extracti128_si256(halves, 1)));
#else
  for (std::size_t i = 0; i < kLanes; ++i) {
    to[i] = static_cast<std::uint8_t>(lanes.piece[i / kPieceLanes][i % kPieceLanes]);
  }
#endif
}

// The same for the first lanes only: the end of an array may be short of 16. REQUIRES: the mask is
// one of the first lanes.
KV_LANES_INLINE U32x16 LoadU8(const std::uint8_t* from, LaneMask mask) {
  if (mask == kAllLanes) [[likely]]
    return LoadU8(from);
  std::uint8_t bytes[kLanes] = {};
  __builtin_memcpy(bytes, from, static_cast<std::size_t>(__builtin_popcount(mask)));
  return LoadU8(bytes);
}
KV_LANES_INLINE U32x16 LoadU16(const std::uint16_t* from, LaneMask mask) {
  if (mask == kAllLanes) [[likely]]
    return LoadU16(from);
  std::uint16_t values[kLanes] = {};
  __builtin_memcpy(values, from, 2 * static_cast<std::size_t>(__builtin_popcount(mask)));
  return LoadU16(values);
}
KV_LANES_INLINE void StoreU8(U32x16 lanes, std::uint8_t* to, LaneMask mask) {
  if (mask == kAllLanes) [[likely]]
    return StoreU8(lanes, to);
  std::uint8_t bytes[kLanes];
  StoreU8(lanes, bytes);
  __builtin_memcpy(to, bytes, static_cast<std::size_t>(__builtin_popcount(mask)));
}
KV_LANES_INLINE void StoreU16(U32x16 lanes, std::uint16_t* to, LaneMask mask) {
  if (mask == kAllLanes) [[likely]]
    return StoreU16(lanes, to);
  std::uint16_t values[kLanes];
  StoreU16(lanes, values);
  __builtin_memcpy(to, values, 2 * static_cast<std::size_t>(__builtin_popcount(mask)));
}

// base[index] of each lane. REQUIRES: index < 2^31.
KV_LANES_INLINE U32x16 Gather(const std::uint32_t* base, U32x16 index) {
  U32x16 lanes;
#if defined(KV_LANES_AVX512)
  lanes.piece[0] = (U32x16::Piece)_mm512_i32gather_epi32((__m512i)index.piece[0], base, 4);
#elif defined(KV_LANES_AVX2)
  for (std::size_t p = 0; p < kPieces; ++p) {
    lanes.piece[p] =
        (U32x16::Piece)_mm256_i32gather_epi32((const int*)base, (__m256i)index.piece[p], 4);
  }
#else
  for (std::size_t p = 0; p < kPieces; ++p) {
    for (std::size_t i = 0; i < kPieceLanes; ++i) lanes.piece[p][i] = base[index.piece[p][i]];
  }
#endif
  return lanes;
}
KV_LANES_INLINE F32x16 Gather(const float* base, U32x16 index) {
  F32x16 lanes;
#if defined(KV_LANES_AVX512)
  lanes.piece[0] = (F32x16::Piece)_mm512_i32gather_ps((__m512i)index.piece[0], base, 4);
#elif defined(KV_LANES_AVX2)
  for (std::size_t p = 0; p < kPieces; ++p) {
    lanes.piece[p] = (F32x16::Piece)_mm256_i32gather_ps(base, (__m256i)index.piece[p], 4);
  }
#else
  for (std::size_t p = 0; p < kPieces; ++p) {
    for (std::size_t i = 0; i < kPieceLanes; ++i) lanes.piece[p][i] = base[index.piece[p][i]];
  }
#endif
  return lanes;
}

// The sign bits, which a comparison of pieces sets.
KV_LANES_INLINE LaneMask SignBits(I32x16 lanes) {
#if defined(KV_LANES_AVX512)
  return static_cast<LaneMask>(_mm512_movepi32_mask((__m512i)lanes.piece[0]));
#elif defined(KV_LANES_AVX2)
  return static_cast<LaneMask>(_mm256_movemask_ps((__m256)lanes.piece[0]) |
                               _mm256_movemask_ps((__m256)lanes.piece[1]) << 8);
#else
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < kLanes; ++i) {
    bits |= (static_cast<std::uint32_t>(lanes.piece[i / kPieceLanes][i % kPieceLanes]) >> 31) << i;
  }
  return static_cast<LaneMask>(bits);
#endif
}

// Comparisons with a NaN are false.
template <typename T>
KV_LANES_INLINE LaneMask Less(Lanes<T> a, Lanes<T> b) {
  I32x16 less;
  for (std::size_t p = 0; p < kPieces; ++p)
    less.piece[p] = (I32x16::Piece)(a.piece[p] < b.piece[p]);
  return SignBits(less);
}
template <typename T>
KV_LANES_INLINE LaneMask Equal(Lanes<T> a, Lanes<T> b) {
  I32x16 equal;
  for (std::size_t p = 0; p < kPieces; ++p) {
    equal.piece[p] = (I32x16::Piece)(a.piece[p] == b.piece[p]);
  }
  return SignBits(equal);
}
#if defined(KV_LANES_AVX512)
// GCC 12 takes a detour through a vector of the results.
KV_LANES_INLINE LaneMask Less(U32x16 a, U32x16 b) {
  return _mm512_cmplt_epu32_mask((__m512i)a.piece[0], (__m512i)b.piece[0]);
}
KV_LANES_INLINE LaneMask Less(I32x16 a, I32x16 b) {
  return _mm512_cmplt_epi32_mask((__m512i)a.piece[0], (__m512i)b.piece[0]);
}
KV_LANES_INLINE LaneMask Less(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask((__m512)a.piece[0], (__m512)b.piece[0], _CMP_LT_OQ);
}
KV_LANES_INLINE LaneMask Equal(U32x16 a, U32x16 b) {
  return _mm512_cmpeq_epi32_mask((__m512i)a.piece[0], (__m512i)b.piece[0]);
}
KV_LANES_INLINE LaneMask Equal(I32x16 a, I32x16 b) {
  return _mm512_cmpeq_epi32_mask((__m512i)a.piece[0], (__m512i)b.piece[0]);
}
KV_LANES_INLINE LaneMask Equal(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask((__m512)a.piece[0], (__m512)b.piece[0], _CMP_EQ_OQ);
}
#endif

// `a` in the lanes of the mask, `b` in the others.
template <typename T>
KV_LANES_INLINE Lanes<T> Select(LaneMask mask, Lanes<T> a, Lanes<T> b) {
#if defined(KV_LANES_AVX512)
  b.piece[0] = (typename Lanes<T>::Piece)_mm512_mask_blend_epi32(mask, (__m512i)b.piece[0],
                                                                 (__m512i)a.piece[0]);
#else
  for (std::size_t p = 0; p < kPieces; ++p) {
    I32x16::Piece bits;
    for (std::size_t i = 0; i < kPieceLanes; ++i) bits[i] = 1 << (p * kPieceLanes + i);
    const auto chosen = ((I32x16::Piece{} + static_cast<std::int32_t>(mask)) & bits) != 0;
    b.piece[p] = chosen ? a.piece[p] : b.piece[p];
  }
#endif
  return b;
}

// Rounded to nearest.
KV_LANES_INLINE F32x16 SquareRoot(F32x16 lanes) {
#if defined(KV_LANES_AVX512)
  lanes.piece[0] = (F32x16::Piece)_mm512_sqrt_ps((__m512)lanes.piece[0]);
#elif defined(KV_LANES_AVX2)
  for (std::size_t p = 0; p < kPieces; ++p) {
    lanes.piece[p] = (F32x16::Piece)_mm256_sqrt_ps((__m256)lanes.piece[p]);
  }
#else
  for (std::size_t p = 0; p < kPieces; ++p) {
    for (std::size_t i = 0; i < kPieceLanes; ++i) {
      lanes.piece[p][i] = __builtin_sqrtf(lanes.piece[p][i]);
    }
  }
#endif
  return lanes;
}

// `x` where a < b (a == b), `y` elsewhere: what Select makes of the comparison, without the detour
// through bits where registers have no masks.
template <typename T, typename V>
KV_LANES_INLINE Lanes<V> SelectLess(Lanes<T> a, Lanes<T> b, Lanes<V> x, Lanes<V> y) {
#if defined(KV_LANES_AVX512)
  return Select(Less(a, b), x, y);
#else
  for (std::size_t p = 0; p < kPieces; ++p) {
    y.piece[p] = a.piece[p] < b.piece[p] ? x.piece[p] : y.piece[p];
  }
  return y;
#endif
}
template <typename T, typename V>
KV_LANES_INLINE Lanes<V> SelectEqual(Lanes<T> a, Lanes<T> b, Lanes<V> x, Lanes<V> y) {
#if defined(KV_LANES_AVX512)
  return Select(Equal(a, b), x, y);
#else
  for (std::size_t p = 0; p < kPieces; ++p) {
    y.piece[p] = a.piece[p] == b.piece[p] ? x.piece[p] : y.piece[p];
  }
  return y;
#endif
}

// Lanes 2i and 2i + 1 exchanged.
KV_LANES_INLINE F32x16 SwapPairs(F32x16 lanes) {
  typedef std::uint64_t Pairs __attribute__((vector_size(kPieceBytes)));
  for (std::size_t p = 0; p < kPieces; ++p) {
    const auto pairs = (Pairs)lanes.piece[p];
    lanes.piece[p] = (F32x16::Piece)(pairs >> 32 | pairs << 32);
  }
  return lanes;
}

}  // namespace KV_LANES_NAMESPACE
}  // namespace kvtrie

#pragma GCC diagnostic pop
