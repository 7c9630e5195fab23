// Any bytes as those of an rANS coder: every kernel set reads no byte beyond, and all give the
// same.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/rans.h"
#include "tests/fuzz/body_target.h"
#include "tests/storage/codec/golden_rans_tables.h"

namespace kvtrie {
namespace {

void Try(std::span<const std::byte> bytes, std::size_t count) {
  static const RansTables tables = GoldenRansTables();
  std::vector<std::uint8_t> choice(count);
  for (std::size_t i = 0; i < count; ++i) choice[i] = static_cast<std::uint8_t>(i * 7 % 13);
  std::vector<std::uint8_t> table_of(count);
  for (std::size_t i = 0; i < count; ++i) table_of[i] = choice[i] % 3;

  bool is_first = true;
  std::vector<std::uint8_t> first_symbols;
  std::vector<std::uint16_t> first_values;
  bool first_symbols_ok = false;
  bool first_values_ok = false;
  WithEachKernelSet([&] {
    std::vector<std::uint8_t> symbols(count);
    const bool symbols_ok = RansDecodeSymbols(tables, bytes, table_of, symbols).ok();
    std::vector<std::uint16_t> values(count);
    const bool values_ok = RansDecodeBits(bytes, choice, values).ok();
    if (is_first) {
      is_first = false;
      first_symbols = symbols;
      first_values = values;
      first_symbols_ok = symbols_ok;
      first_values_ok = values_ok;
    }
    KV_CHECK(symbols == first_symbols);
    KV_CHECK(values == first_values);
    KV_CHECK(symbols_ok == first_symbols_ok);
    KV_CHECK(values_ok == first_values_ok);
  });
  if (!first_symbols_ok) return;

  // What was accepted is what an encoder writes.
  RansEncoder encoder;
  encoder.AddSymbols(tables, table_of, first_symbols);
  std::vector<std::byte> again;
  KV_CHECK(encoder.Finish(again).ok());
  KV_CHECK(again.size() == bytes.size());
  KV_CHECK(std::memcmp(again.data(), bytes.data(), bytes.size()) == 0);
}

}  // namespace
}  // namespace kvtrie

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const kvtrie::Bytes exact = kvtrie::ExactBytes(data, size);
  for (const std::size_t count : {std::size_t{0}, std::size_t{100}, std::size_t{200}, 8 * size}) {
    kvtrie::Try(exact, count);
  }
  return 0;
}
