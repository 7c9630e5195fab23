// Symbols per second of the rANS coder, for each kernel set that the machine has.
//
//   rans_bench [--symbols N] [--tables N]
//
// The symbols are drawn from two-sided geometric distributions of different widths, one per table,
// with tables in random order (seed 1): what residuals look like whose context changes from
// component to component.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"
#include "storage/codec/rans.h"
#include "tests/bench/best_cpu_seconds.h"

namespace kvtrie {
namespace {

constexpr std::size_t kSymbolCount = 64;

struct Data {
  RansTables tables{0};
  std::vector<std::uint8_t> table_of;
  std::vector<std::uint8_t> symbols;
  double entropy_bits = 0;
};

Data MakeData(std::size_t symbol_count, std::size_t table_count) {
  Data data;
  data.tables = RansTables(table_count);
  std::mt19937_64 random(1);
  std::vector<std::vector<std::uint8_t>> slots(table_count);
  std::vector<std::vector<std::uint16_t>> frequencies(table_count);
  for (std::size_t t = 0; t < table_count; ++t) {
    const double width =
        0.3 * std::pow(30.0, static_cast<double>(t) / static_cast<double>(table_count));
    std::vector<std::uint32_t> counts(kSymbolCount);
    for (std::size_t s = 0; s < kSymbolCount; ++s) {
      const double distance = std::abs(static_cast<double>(s) - kSymbolCount / 2.0);
      counts[s] = 1 + static_cast<std::uint32_t>(1e6 * std::exp(-distance / width));
    }
    frequencies[t].resize(kSymbolCount);
    NormalizeCounts(counts, frequencies[t]);
    KV_CHECK(data.tables.Set(t, frequencies[t]).ok());
    for (std::size_t s = 0; s < kSymbolCount; ++s) {
      slots[t].insert(slots[t].end(), frequencies[t][s], static_cast<std::uint8_t>(s));
    }
  }
  for (std::size_t i = 0; i < symbol_count; ++i) {
    const auto table = static_cast<std::size_t>(random() % table_count);
    const std::uint8_t symbol = slots[table][random() % kRansFrequencySum];
    data.table_of.push_back(static_cast<std::uint8_t>(table));
    data.symbols.push_back(symbol);
    data.entropy_bits += 12 - std::log2(frequencies[table][symbol]);
  }
  return data;
}

void Run(std::size_t symbol_count, std::size_t table_count) {
  const Data data = MakeData(symbol_count, table_count);
  const auto count = static_cast<double>(symbol_count);
  for (const KernelSet set : kKernelSets) {
    if (!UseKernelSet(set).ok()) continue;
    std::vector<std::byte> bytes;
    RansEncoder encoder;
    const double encode_seconds = BestCpuSeconds(9, [&] {
      bytes.clear();
      encoder.AddSymbols(data.tables, data.table_of, data.symbols);
      KV_CHECK(encoder.Finish(bytes).ok());
    });
    std::vector<std::uint8_t> decoded(symbol_count);
    const double decode_seconds = BestCpuSeconds(
        9, [&] { KV_CHECK(RansDecodeSymbols(data.tables, bytes, data.table_of, decoded).ok()); });
    KV_CHECK(decoded == data.symbols);
    std::printf(
        "%-8s %3zu tables  %.3f bits per symbol (entropy %.3f)  encode %4.0f M symbols/s  "
        "decode %4.0f M symbols/s\n",
        KernelSetName(set), table_count, 8.0 * static_cast<double>(bytes.size()) / count,
        data.entropy_bits / count, count / encode_seconds / 1e6, count / decode_seconds / 1e6);
  }
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  std::size_t symbol_count = 1u << 21;
  std::vector<std::size_t> table_counts = {1, 16, 64, 256};
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::size_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--symbols") symbol_count = value;
    if (name == "--tables") table_counts = {value};
  }
  for (const std::size_t table_count : table_counts) kvtrie::Run(symbol_count, table_count);
  return 0;
}
