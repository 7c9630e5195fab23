// Holds every operation of lanes.h and rans_lanes.h, as compiled in the including file, against
// plain loops. lanes_test.cc runs it for each instruction set.
#include <cstddef>
#include <cstdint>

#include "storage/codec/rans_lanes.h"
#include "tests/storage/codec/lanes_check.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace kvtrie {
namespace {

struct Checks {
  const char* failed = nullptr;  // the first

  template <typename T, typename Expected>
  void Same(const char* what, Lanes<T> lanes, Expected expected) {
    T values[kLanes];
    Store(lanes, values);
    for (std::size_t i = 0; i < kLanes; ++i) {
      const T value = expected(i);
      if (__builtin_memcmp(&value, &values[i], sizeof value) != 0 && failed == nullptr)
        failed = what;
    }
  }
  template <typename Expected>
  void SameMask(const char* what, LaneMask mask, Expected expected) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      if ((mask >> i & 1) != (expected(i) ? 1 : 0) && failed == nullptr) failed = what;
    }
  }
  void True(const char* what, bool holds) {
    if (!holds && failed == nullptr) failed = what;
  }
};

constexpr std::uint32_t kA[kLanes] = {
    0,    1,    2,     0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65535,      65536,
    4095, 4096, 12345, 99,         0xDEADBEEF, 7,          0x40000000, 3};
constexpr std::uint32_t kB[kLanes] = {5,    1,    3,    1,    0x7FFFFFFF, 2, 65536,      65535,
                                      4096, 4096, 6789, 1000, 17,         9, 0x40000001, 31};
constexpr std::uint32_t kShift[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 30, 31};
constexpr LaneMask kSome = 0b1010'0111'0001'1100;

void CheckIntegers(Checks& checks) {
  const U32x16 a = Load(kA);
  const U32x16 b = Load(kB);
  const U32x16 shift = Load(kShift);
  checks.Same("+", a + b, [](std::size_t i) { return kA[i] + kB[i]; });
  checks.Same("-", a - b, [](std::size_t i) { return kA[i] - kB[i]; });
  checks.Same("*", a * b, [](std::size_t i) { return kA[i] * kB[i]; });
  checks.Same("/", a / b, [](std::size_t i) { return kA[i] / kB[i]; });
  checks.Same("&", a & b, [](std::size_t i) { return kA[i] & kB[i]; });
  checks.Same("|", a | b, [](std::size_t i) { return kA[i] | kB[i]; });
  checks.Same("^", a ^ b, [](std::size_t i) { return kA[i] ^ kB[i]; });
  checks.Same("<<", a << shift, [](std::size_t i) { return kA[i] << kShift[i]; });
  checks.Same(">>", a >> shift, [](std::size_t i) { return kA[i] >> kShift[i]; });
  checks.Same(">> of signed", BitCast<std::int32_t>(a) >> 3,
              [](std::size_t i) { return static_cast<std::int32_t>(kA[i]) >> 3; });
  checks.SameMask("unsigned <", Less(a, b), [](std::size_t i) { return kA[i] < kB[i]; });
  checks.SameMask("signed <", Less(BitCast<std::int32_t>(a), BitCast<std::int32_t>(b)),
                  [](std::size_t i) {
                    return static_cast<std::int32_t>(kA[i]) < static_cast<std::int32_t>(kB[i]);
                  });
  checks.SameMask("==", Equal(a, b), [](std::size_t i) { return kA[i] == kB[i]; });
  checks.SameMask("signed ==", Equal(BitCast<std::int32_t>(a), BitCast<std::int32_t>(b)),
                  [](std::size_t i) { return kA[i] == kB[i]; });
  checks.Same("Select", Select(kSome, a, b),
              [](std::size_t i) { return (kSome >> i & 1) != 0 ? kA[i] : kB[i]; });
  checks.Same("one number", U32x16(77), [](std::size_t) { return 77u; });
  checks.Same("SelectLess", SelectLess(a, b, shift, a),
              [](std::size_t i) { return kA[i] < kB[i] ? kShift[i] : kA[i]; });
  checks.Same("SelectEqual", SelectEqual(a, b, shift, a),
              [](std::size_t i) { return kA[i] == kB[i] ? kShift[i] : kA[i]; });
  std::uint32_t table[200];
  for (std::uint32_t i = 0; i < 200; ++i) table[i] = i * i;
  const U32x16 index = b & 127;
  checks.Same("Gather", Gather(table, index),
              [](std::size_t i) { return (kB[i] & 127) * (kB[i] & 127); });
}

void CheckFloats(Checks& checks) {
  float x[kLanes];
  float y[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    x[i] = 0.1f * static_cast<float>(i) - 0.7f;
    y[i] = 3.3f / static_cast<float>(i + 1);
  }
  y[3] = x[3];
  y[5] = __builtin_nanf("");
  x[9] = -0.0f;
  y[9] = 0.0f;
  const F32x16 a = Load(x);
  const F32x16 b = Load(y);
  checks.SameMask("float <", Less(a, b), [&](std::size_t i) { return x[i] < y[i]; });
  checks.SameMask("float ==", Equal(a, b), [&](std::size_t i) { return x[i] == y[i]; });
  y[5] = 2.5f;
  const F32x16 c = Load(y);
  checks.Same("float +", a + c, [&](std::size_t i) { return x[i] + y[i]; });
  checks.Same("float *", a * c, [&](std::size_t i) { return x[i] * y[i]; });
  checks.Same("float /", a / c, [&](std::size_t i) { return x[i] / y[i]; });
  checks.Same("SquareRoot", SquareRoot(c * c + F32x16(0.3f)),
              [&](std::size_t i) { return __builtin_sqrtf(y[i] * y[i] + 0.3f); });
  checks.Same("SwapPairs", SwapPairs(a), [&](std::size_t i) { return x[i ^ 1]; });
  checks.Same("Gather of floats", Gather(x, U32x16(15) - (Load(kShift) & 15)),
              [&](std::size_t i) { return x[15 - (kShift[i] & 15)]; });
  checks.Same("to float", Convert<float>(BitCast<std::int32_t>(Load(kA))),
              [](std::size_t i) { return static_cast<float>(static_cast<std::int32_t>(kA[i])); });
  checks.Same("to integer", Convert<std::int32_t>(a * F32x16(100.0f)),
              [&](std::size_t i) { return static_cast<std::int32_t>(x[i] * 100.0f); });
}

void CheckMemory(Checks& checks) {
  std::uint8_t bytes[2 * kLanes + 2];
  for (std::size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<std::uint8_t>(200 + 5 * i);
  const auto at16 = [&](std::size_t i) {
    return static_cast<std::uint32_t>(bytes[1 + 2 * i] | bytes[2 + 2 * i] << 8);
  };
  checks.Same("LoadU8", LoadU8(bytes + 1),
              [&](std::size_t i) { return std::uint32_t{bytes[1 + i]}; });
  checks.Same("LoadU16", LoadU16(bytes + 1), at16);

  std::uint8_t wide[4 * kLanes + 1];
  StoreU32(Load(kA), wide + 1);
  checks.Same("StoreU32 and LoadU32", LoadU32(wide + 1), [](std::size_t i) { return kA[i]; });

  std::uint16_t values[kLanes];
  __builtin_memcpy(values, bytes + 1, sizeof values);
  constexpr LaneMask kFirst5 = 0b11111;
  checks.Same("LoadU8 of some", LoadU8(bytes, kFirst5),
              [&](std::size_t i) { return i < 5 ? std::uint32_t{bytes[i]} : 0; });
  checks.Same("LoadU16 of some", LoadU16(values, kFirst5),
              [&](std::size_t i) { return i < 5 ? at16(i) : 0; });

  checks.Same("LoadFirst", LoadFirst(kA, 3), [](std::size_t i) { return i < 3 ? kA[i] : 0; });
  std::uint32_t stored[kLanes] = {};
  StoreFirst(Load(kB), stored, 3);
  checks.Same("StoreFirst", Load(stored), [](std::size_t i) { return i < 3 ? kB[i] : 0; });

  std::uint8_t stored8[kLanes + 1] = {};
  StoreU8(Load(kA), stored8);
  bool same = stored8[kLanes] == 0;
  for (std::size_t i = 0; i < kLanes; ++i) same &= stored8[i] == static_cast<std::uint8_t>(kA[i]);
  checks.True("StoreU8", same);
  std::uint16_t stored16[kLanes + 1] = {};
  StoreU16(Load(kA), stored16);
  same = stored16[kLanes] == 0;
  for (std::size_t i = 0; i < kLanes; ++i) same &= stored16[i] == static_cast<std::uint16_t>(kA[i]);
  checks.True("StoreU16", same);
  std::uint8_t some8[kLanes] = {};
  std::uint16_t some16[kLanes] = {};
  StoreU8(Load(kB), some8, kFirst5);
  StoreU16(Load(kB), some16, kFirst5);
  same = true;
  for (std::size_t i = 0; i < kLanes; ++i) {
    same &= some8[i] == (i < 5 ? static_cast<std::uint8_t>(kB[i]) : 0);
    same &= some16[i] == (i < 5 ? static_cast<std::uint16_t>(kB[i]) : 0);
  }
  checks.True("StoreU8 and StoreU16 of some", same);
}

}  // namespace

void KV_RECORD_MIXED(const std::uint32_t* tables, const MixedStep* steps, std::size_t count,
                     std::uint32_t* records) {
  for (std::size_t s = 0; s < count; ++s) {
    const MixedStep& step = steps[s];
    Store(RansSymbolRecords(tables, Load(step.table), Load(step.symbol), step.symbols), records);
    Store(RansBitsRecords(Load(step.bits), Load(step.bit_count), step.raw), records + kLanes);
    records += 2 * kLanes;
  }
}

const char* KV_CHECK_LANES(const std::uint32_t* tables, const MixedStep* steps, std::size_t count,
                           const void* bytes, std::size_t byte_count) {
  Checks checks;
  CheckIntegers(checks);
  CheckFloats(checks);
  CheckMemory(checks);

  RansDecoder decoder;
  decoder.Start(bytes, byte_count);
  for (std::size_t s = 0; s < count; ++s) {
    const MixedStep& step = steps[s];
    checks.True("not finished", !decoder.Finished());
    const U32x16 symbols = decoder.DecodeSymbols(tables, Load(step.table), step.symbols);
    const U32x16 bits = decoder.DecodeBits(Load(step.bit_count), step.raw);
    checks.SameMask("symbols", Equal(symbols, Load(step.symbol)) & step.symbols,
                    [&](std::size_t i) { return (step.symbols >> i & 1) != 0; });
    checks.SameMask("bits", Equal(bits, Load(step.bits)) & step.raw,
                    [&](std::size_t i) { return (step.raw >> i & 1) != 0; });
  }
  checks.True("finished", decoder.Finished());
  return checks.failed;
}

}  // namespace kvtrie
