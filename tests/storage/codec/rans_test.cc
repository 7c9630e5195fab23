#include "storage/codec/rans.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_reader.h"
#include "tests/golden/golden_file.h"
#include "tests/storage/codec/golden_rans_tables.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/test_random.h"

namespace kvtrie {
namespace {

struct Symbols {
  std::vector<std::uint8_t> table_of;
  std::vector<std::uint8_t> symbols;
};
Symbols DrawSymbols(std::size_t count) {
  TestRandom random(1);
  Symbols drawn;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t table = random.Below(static_cast<std::uint32_t>(kGoldenFrequencies.size()));
    std::uint32_t slot = random.Below(4096);
    std::uint8_t symbol = 0;
    for (; slot >= kGoldenFrequencies[table][symbol]; ++symbol)
      slot -= kGoldenFrequencies[table][symbol];
    drawn.table_of.push_back(static_cast<std::uint8_t>(table));
    drawn.symbols.push_back(symbol);
  }
  return drawn;
}

struct Bits {
  std::vector<std::uint8_t> bit_counts;
  std::vector<std::uint16_t> values;
};
Bits DrawBits(std::size_t count) {
  TestRandom random(2);
  Bits drawn;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bit_count = random.Below(13);
    drawn.bit_counts.push_back(static_cast<std::uint8_t>(bit_count));
    drawn.values.push_back(static_cast<std::uint16_t>(random.Below(1u << bit_count)));
  }
  return drawn;
}

std::vector<std::byte> EncodeSymbols(const RansTables& tables, const Symbols& drawn) {
  RansEncoder encoder;
  encoder.AddSymbols(tables, drawn.table_of, drawn.symbols);
  std::vector<std::byte> bytes;
  EXPECT_TRUE(encoder.Finish(bytes).ok());
  return bytes;
}

TEST(RansTest, BytesAreTheGoldenOnesOfEveryKernelSet) {
  const RansTables tables = GoldenRansTables();
  WithEachKernelSet([&tables] {
    EXPECT_EQ(AsText(EncodeSymbols(tables, DrawSymbols(1000))), ReadGolden("v1/rans_symbols.bin"));

    const Bits bits = DrawBits(333);
    RansEncoder encoder;
    encoder.AddBits(bits.bit_counts, bits.values);
    std::vector<std::byte> bytes;
    ASSERT_TRUE(encoder.Finish(bytes).ok());
    EXPECT_EQ(AsText(bytes), ReadGolden("v1/rans_bits.bin"));
  });
}

TEST(RansTest, EveryCountOfSymbolsComesBack) {
  const RansTables tables = GoldenRansTables();
  WithEachKernelSet([&tables] {
    for (const std::size_t count : {0, 1, 15, 16, 17, 31, 32, 33, 1000, 4097}) {
      const Symbols drawn = DrawSymbols(count);
      const auto bytes = EncodeSymbols(tables, drawn);
      std::vector<std::uint8_t> decoded(count);
      const absl::Status status = RansDecodeSymbols(tables, bytes, drawn.table_of, decoded);
      EXPECT_TRUE(status.ok()) << count << status;
      EXPECT_EQ(decoded, drawn.symbols) << count;
    }
  });
}

TEST(RansTest, EveryCountOfBitsComesBack) {
  WithEachKernelSet([] {
    for (const std::size_t count : {0, 1, 15, 16, 17, 31, 32, 33, 1000, 4097}) {
      const Bits drawn = DrawBits(count);
      RansEncoder encoder;
      encoder.AddBits(drawn.bit_counts, drawn.values);
      std::vector<std::byte> bytes;
      ASSERT_TRUE(encoder.Finish(bytes).ok());
      std::vector<std::uint16_t> decoded(count);
      const absl::Status status = RansDecodeBits(bytes, drawn.bit_counts, decoded);
      EXPECT_TRUE(status.ok()) << count << status;
      EXPECT_EQ(decoded, drawn.values) << count;
    }
  });
}

TEST(RansTest, TheMostTablesAndSymbolsFit) {
  RansTables tables(kRansTablesMax);
  std::vector<std::uint16_t> frequencies(kRansTableSymbols, 16);
  for (std::size_t t = 0; t < kRansTablesMax; ++t) {
    frequencies[t] = 1;
    frequencies[255 - t] = 31;
    ASSERT_TRUE(tables.Set(t, frequencies).ok());
    frequencies[t] = frequencies[255 - t] = 16;
  }
  WithEachKernelSet([&tables] {
    TestRandom random(3);
    Symbols drawn;
    for (std::size_t i = 0; i < 5000; ++i) {
      drawn.table_of.push_back(static_cast<std::uint8_t>(random.Below(256)));
      drawn.symbols.push_back(static_cast<std::uint8_t>(random.Below(256)));
    }
    std::vector<std::uint8_t> decoded(drawn.symbols.size());
    ASSERT_TRUE(
        RansDecodeSymbols(tables, EncodeSymbols(tables, drawn), drawn.table_of, decoded).ok());
    EXPECT_EQ(decoded, drawn.symbols);
  });
}

TEST(RansTest, TakesLittleMoreThanTheEntropy) {
  constexpr std::size_t kCount = 100000;
  const RansTables tables = GoldenRansTables();
  const Symbols drawn = DrawSymbols(kCount);
  double entropy_bits = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    entropy_bits += 12 - std::log2(kGoldenFrequencies[drawn.table_of[i]][drawn.symbols[i]]);
  }
  const auto bytes = static_cast<double>(EncodeSymbols(tables, drawn).size());
  EXPECT_GT(bytes, entropy_bits / 8);
  EXPECT_LT(bytes, 1.0005 * entropy_bits / 8 + 64);
}

TEST(RansTest, CertainSymbolsTakeNoBytes) {
  const RansTables tables = GoldenRansTables();
  const Symbols drawn = {std::vector<std::uint8_t>(5000, 0), std::vector<std::uint8_t>(5000, 0)};
  EXPECT_EQ(EncodeSymbols(tables, drawn).size(), kRansStateBytes);
}

TEST(RansTest, AnEncoderStartsAnewAfterFinish) {
  const RansTables tables = GoldenRansTables();
  RansEncoder encoder;
  std::vector<std::byte> bytes;
  for (const std::size_t count : {1000, 10, 300}) {
    const Symbols drawn = DrawSymbols(count);
    bytes.clear();
    encoder.AddSymbols(tables, drawn.table_of, drawn.symbols);
    ASSERT_TRUE(encoder.Finish(bytes).ok());
    EXPECT_EQ(bytes, EncodeSymbols(tables, drawn));
  }
}

TEST(RansTest, FinishAppends) {
  RansEncoder encoder;
  std::vector<std::byte> bytes(3, std::byte{7});
  ASSERT_TRUE(encoder.Finish(bytes).ok());
  EXPECT_EQ(bytes.size(), 3 + kRansStateBytes);
  EXPECT_EQ(bytes[2], std::byte{7});
}

// A decoder that has so many bytes, and garbage behind them, decodes the steps before a mark.
TEST(RansTest, MarksSayHowManyBytesTheStepsBeforeNeed) {
  const RansTables tables = GoldenRansTables();
  constexpr std::size_t kSteps = 60;
  const Symbols drawn = DrawSymbols(kSteps * kLanes);
  WithEachKernelSet([&] {
    RansEncoder encoder;
    encoder.AddSymbols(tables, drawn.table_of, drawn.symbols);
    const std::vector<std::size_t> marks = {0, 1, 2, 2, 17, 59, 60};
    std::vector<std::byte> bytes(3, std::byte{7});  // Finish appends
    std::vector<std::size_t> bytes_at;
    ASSERT_TRUE(encoder.Finish(bytes, marks, bytes_at).ok());
    bytes.erase(bytes.begin(), bytes.begin() + 3);
    EXPECT_EQ(bytes, EncodeSymbols(tables, drawn)) << "marks change nothing";
    ASSERT_EQ(bytes_at.size(), marks.size());
    EXPECT_EQ(bytes_at.front(), kRansStateBytes);
    EXPECT_EQ(bytes_at.back(), bytes.size());
    for (std::size_t m = 0; m < marks.size(); ++m) {
      std::vector<std::byte> arrived = bytes;
      std::fill(arrived.begin() + static_cast<std::ptrdiff_t>(bytes_at[m]), arrived.end(),
                std::byte{0xEE});
      RansDecoder decoder;
      decoder.Start(arrived.data(), arrived.size());
      for (std::size_t step = 0; step < marks[m]; ++step) {
        const std::uint8_t* const table_of = drawn.table_of.data() + step * kLanes;
        std::uint8_t symbols[kLanes];
        StoreU8(decoder.DecodeSymbols(tables.decode(), LoadU8(table_of), kAllLanes), symbols);
        EXPECT_TRUE(std::equal(symbols, symbols + kLanes, drawn.symbols.begin() + step * kLanes));
      }
      EXPECT_EQ(decoder.next, reinterpret_cast<const std::uint8_t*>(arrived.data()) + bytes_at[m]);
    }
  });
}

TEST(RansTest, RefusesASymbolThatItsTableHasNot) {
  const RansTables tables = GoldenRansTables();
  WithEachKernelSet([&tables] {
    for (const auto& [table, symbol] : {std::pair{2, 1}, {2, 5}, {0, 1}, {1, 255}}) {
      Symbols drawn = DrawSymbols(100);
      drawn.table_of[50] = static_cast<std::uint8_t>(table);
      drawn.symbols[50] = static_cast<std::uint8_t>(symbol);
      RansEncoder encoder;
      encoder.AddSymbols(tables, drawn.table_of, drawn.symbols);
      std::vector<std::byte> bytes;
      EXPECT_TRUE(absl::IsInvalidArgument(encoder.Finish(bytes)));
      EXPECT_TRUE(bytes.empty());
      EXPECT_TRUE(encoder.Finish(bytes).ok());
    }
  });
}

TEST(RansTest, CutOrLongerBytesAreDamage) {
  const RansTables tables = GoldenRansTables();
  const Symbols drawn = DrawSymbols(300);
  std::vector<std::byte> bytes = EncodeSymbols(tables, drawn);
  std::vector<std::uint8_t> decoded(drawn.symbols.size());
  WithEachKernelSet([&] {
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      // A copy, so that a sanitizer sees a read past its end.
      const std::vector<std::byte> cut(bytes.begin(),
                                       bytes.begin() + static_cast<std::ptrdiff_t>(length));
      EXPECT_TRUE(absl::IsDataLoss(RansDecodeSymbols(tables, cut, drawn.table_of, decoded)));
    }
    for (const std::size_t more : {1, 2, 3, 64}) {
      std::vector<std::byte> longer = bytes;
      longer.resize(bytes.size() + more);
      EXPECT_TRUE(absl::IsDataLoss(RansDecodeSymbols(tables, longer, drawn.table_of, decoded)));
    }
  });
}

TEST(RansTest, EveryBitFlipIsDamageAndAllKernelSetsSeeTheSame) {
  const RansTables tables = GoldenRansTables();
  const Symbols drawn = DrawSymbols(300);
  const std::vector<std::byte> bytes = EncodeSymbols(tables, drawn);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::vector<std::byte> damaged = bytes;
    damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    std::vector<std::uint8_t> baseline;
    WithEachKernelSet([&] {
      std::vector<std::uint8_t> decoded(drawn.symbols.size());
      EXPECT_TRUE(absl::IsDataLoss(RansDecodeSymbols(tables, damaged, drawn.table_of, decoded)))
          << bit;
      if (baseline.empty()) baseline = decoded;
      EXPECT_EQ(decoded, baseline) << bit;
    });
  }
}

TEST(RansTest, NoiseIsDamage) {
  const RansTables tables = GoldenRansTables();
  TestRandom random(4);
  const Symbols drawn = DrawSymbols(1000);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::byte> noise(random.Below(500));
    for (std::byte& byte : noise) byte = static_cast<std::byte>(random.Below(256));
    WithEachKernelSet([&] {
      std::vector<std::uint8_t> decoded(drawn.symbols.size());
      EXPECT_TRUE(absl::IsDataLoss(RansDecodeSymbols(tables, noise, drawn.table_of, decoded)));
    });
  }
}

TEST(RansTablesTest, RefusesFrequenciesThatAreNotSharesOf4096) {
  RansTables tables(1);
  EXPECT_TRUE(absl::IsInvalidArgument(tables.Set(0, std::vector<std::uint16_t>{4095})));
  EXPECT_TRUE(absl::IsInvalidArgument(tables.Set(0, std::vector<std::uint16_t>{4096, 1})));
  EXPECT_TRUE(absl::IsInvalidArgument(tables.Set(0, {})));
  std::vector<std::uint16_t> too_many(257, 0);
  too_many[0] = 4096;
  EXPECT_TRUE(absl::IsInvalidArgument(tables.Set(0, too_many)));
}

TEST(RansTablesTest, ATableThatWasNotSetCodesNothing) {
  const RansTables tables(2);
  RansEncoder encoder;
  encoder.AddSymbols(tables, std::vector<std::uint8_t>{1}, std::vector<std::uint8_t>{0});
  std::vector<std::byte> bytes;
  EXPECT_TRUE(absl::IsInvalidArgument(encoder.Finish(bytes)));
}

TEST(NormalizeCountsTest, SharesAreExactWhereTheyCanBe) {
  std::vector<std::uint16_t> frequencies(4);
  NormalizeCounts(std::vector<std::uint32_t>{2, 1, 0, 1}, frequencies);
  EXPECT_EQ(frequencies, (std::vector<std::uint16_t>{2048, 1024, 0, 1024}));
  NormalizeCounts(std::vector<std::uint32_t>{0, 0, 7, 0}, frequencies);
  EXPECT_EQ(frequencies, (std::vector<std::uint16_t>{0, 0, 4096, 0}));
  NormalizeCounts(std::vector<std::uint32_t>{1, 1, 1, 0}, frequencies);
  EXPECT_EQ(frequencies, (std::vector<std::uint16_t>{1366, 1365, 1365, 0}));
}

TEST(NormalizeCountsTest, WhatCameIsPossibleHoweverRare) {
  std::vector<std::uint32_t> counts(256, 1);
  counts[7] = 0xFFFFFFFF;
  counts[9] = 0;
  std::vector<std::uint16_t> frequencies(256);
  NormalizeCounts(counts, frequencies);
  EXPECT_EQ(std::accumulate(frequencies.begin(), frequencies.end(), 0), 4096);
  EXPECT_EQ(frequencies[7], 4096 - 254);
  EXPECT_EQ(frequencies[9], 0);
  for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(frequencies[i] == 0, counts[i] == 0) << i;
}

TEST(NormalizeCountsTest, NoExchangeOfOneSlotMakesTheCodeShorter) {
  TestRandom random(5);
  for (int round = 0; round < 200; ++round) {
    const std::size_t symbol_count = 1 + random.Below(256);
    std::vector<std::uint32_t> counts(symbol_count);
    for (std::uint32_t& count : counts) count = random.Below(1u << random.Below(20));
    counts[0] += 1;
    std::vector<std::uint16_t> frequencies(symbol_count);
    NormalizeCounts(counts, frequencies);
    ASSERT_EQ(std::accumulate(frequencies.begin(), frequencies.end(), 0), 4096);

    const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), 0.0));
    const auto saving = [&](std::size_t i, int slots) {
      return counts[i] * std::log2((frequencies[i] + slots) / static_cast<double>(frequencies[i]));
    };
    for (std::size_t to = 0; to < symbol_count; ++to) {
      for (std::size_t from = 0; from < symbol_count; ++from) {
        if (to == from || counts[to] == 0 || frequencies[from] < 2) continue;
        // The rule compares count / (f + 1/2), which is within a part in 12 f^2 of the logarithm.
        EXPECT_LT(saving(to, 1) + saving(from, -1), 2e-3 * total) << round;
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie
