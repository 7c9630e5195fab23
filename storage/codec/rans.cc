#include "storage/codec/rans.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/codec/codec_kernels.h"

namespace kvtrie {
namespace {

absl::Status Damaged() {
  return absl::DataLossError("rans: the bytes do not end where their symbols do");
}

std::size_t StepsOf(std::size_t count) { return (count + kLanes - 1) / kLanes; }

}  // namespace

void NormalizeCounts(std::span<const std::uint32_t> counts, std::span<std::uint16_t> frequencies) {
  KV_CHECK(counts.size() == frequencies.size());
  KV_CHECK(counts.size() <= kRansTableSymbols);
  std::uint64_t total = 0;
  for (const std::uint32_t count : counts) total += count;
  KV_CHECK(total > 0);

  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::uint64_t share = counts[i] * std::uint64_t{kRansFrequencySum} / total;
    frequencies[i] =
        static_cast<std::uint16_t>(counts[i] == 0 ? 0 : std::max<std::uint64_t>(share, 1));
    sum += frequencies[i];
  }
  // A slot more for a symbol saves count * log((f + 1) / f) bits, nearly count / (f + 1/2). So
  // slots that are left go one by one to whom they save most, and those that are too many come from
  // whom they cost least. Ties go to the lowest symbol.
  while (sum != kRansFrequencySum) {
    const bool add = sum < kRansFrequencySum;
    std::size_t best = counts.size();
    std::uint64_t best_halves = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] == 0 || (!add && frequencies[i] == 1)) continue;
      const std::uint64_t halves = 2u * frequencies[i] + (add ? 1u : 0u) - (add ? 0u : 1u);
      const bool better =
          best == counts.size() || (add ? counts[i] * best_halves > counts[best] * halves
                                        : counts[i] * best_halves < counts[best] * halves);
      if (better) {
        best = i;
        best_halves = halves;
      }
    }
    frequencies[best] = static_cast<std::uint16_t>(frequencies[best] + (add ? 1 : -1));
    sum += add ? 1u : ~0u;
  }
}

RansTables::RansTables(std::size_t table_count)
    : decode_(table_count * kRansTableSlots),
      encode_(table_count * kRansTableSymbols, kRansImpossible | kRansIdleRecord) {
  KV_CHECK(table_count <= kRansTablesMax);
}

absl::Status RansTables::Set(std::size_t table, std::span<const std::uint16_t> frequencies) {
  KV_CHECK(table < table_count());
  std::uint32_t sum = 0;
  for (const std::uint16_t frequency : frequencies) sum += frequency;
  if (frequencies.size() > kRansTableSymbols || sum != kRansFrequencySum) {
    return absl::InvalidArgumentError(absl::StrCat("rans: frequencies of ", frequencies.size(),
                                                   " symbols sum up to ", sum, ", must be ",
                                                   kRansFrequencySum, " of at most 256"));
  }
  std::uint32_t* slots = decode_.data() + table * kRansTableSlots;
  std::uint32_t* const records = encode_.data() + table * kRansTableSymbols;
  std::fill_n(records, kRansTableSymbols, kRansImpossible | kRansIdleRecord);
  std::uint32_t first = 0;
  for (std::uint32_t symbol = 0; symbol < frequencies.size(); ++symbol) {
    const std::uint32_t frequency = frequencies[symbol];
    if (frequency == 0) continue;
    for (std::uint32_t i = 0; i < frequency; ++i)
      slots[i] = (frequency - 1) << 20 | i << 8 | symbol;
    slots += frequency;
    records[symbol] = first << kRansFrequencyBits | (frequency - 1);
    first += frequency;
  }
  return absl::OkStatus();
}

std::uint32_t* RansEncoder::AddSteps(std::size_t step_count) {
  const std::size_t at = records_.size();
  records_.resize(at + step_count * kLanes, kRansIdleRecord);
  return records_.data() + at;
}

void RansEncoder::AddSymbols(const RansTables& tables, std::span<const std::uint8_t> table_of,
                             std::span<const std::uint8_t> symbols) {
  KV_CHECK(table_of.size() == symbols.size());
  KV_DCHECK(std::all_of(table_of.begin(), table_of.end(),
                        [&](std::uint8_t table) { return table < tables.table_count(); }));
  Kernels().rans_record_symbols(tables.encode(), table_of.data(), symbols.data(), symbols.size(),
                                AddSteps(StepsOf(symbols.size())));
}

void RansEncoder::AddBits(std::span<const std::uint8_t> bit_counts,
                          std::span<const std::uint16_t> values) {
  KV_CHECK(bit_counts.size() == values.size());
  Kernels().rans_record_bits(bit_counts.data(), values.data(), values.size(),
                             AddSteps(StepsOf(values.size())));
}

absl::Status RansEncoder::Finish(std::vector<std::byte>& to) {
  std::vector<std::size_t> none;
  return Finish(to, none, none);
}

absl::Status RansEncoder::Finish(std::vector<std::byte>& to,
                                 std::span<const std::size_t> step_marks,
                                 std::vector<std::size_t>& bytes_at) {
  std::uint32_t all_bits = 0;
  for (const std::uint32_t record : records_) all_bits |= record;
  std::size_t step_end = records_.size() / kLanes;
  if ((all_bits & kRansImpossible) != 0) {
    records_.clear();
    return absl::InvalidArgumentError("rans: a symbol that its table has not");
  }
  // A lane writes at most one word in a step.
  const std::size_t most_bytes = kRansStateBytes + step_end * kLanes * 2;
  if (room_.size() < most_bytes) room_.resize(most_bytes);
  std::uint8_t* const end = room_.data() + room_.size();
  std::uint8_t* begin = end;
  std::uint32_t states[kLanes];
  std::fill_n(states, kLanes, kRansStateMin);
  bytes_at.resize(step_marks.size());
  for (std::size_t i = step_marks.size() + 1; i-- > 0;) {
    const std::size_t step = i == 0 ? 0 : step_marks[i - 1];
    KV_CHECK(step <= step_end);
    begin = Kernels().rans_encode(records_.data() + step * kLanes, step_end - step, states, begin);
    if (i > 0) bytes_at[i - 1] = static_cast<std::size_t>(end - begin);
    step_end = step;
  }
  begin -= kRansStateBytes;
  std::memcpy(begin, states, sizeof states);
  // What was counted from the end lies behind the mark.
  const auto total = static_cast<std::size_t>(end - begin);
  for (std::size_t& bytes : bytes_at) bytes = total - bytes;
  const auto* const first = reinterpret_cast<const std::byte*>(begin);
  to.insert(to.end(), first, first + total);
  records_.clear();
  return absl::OkStatus();
}

absl::Status RansDecodeSymbols(const RansTables& tables, std::span<const std::byte> bytes,
                               std::span<const std::uint8_t> table_of,
                               std::span<std::uint8_t> symbols) {
  KV_CHECK(table_of.size() == symbols.size());
  KV_DCHECK(std::all_of(table_of.begin(), table_of.end(),
                        [&](std::uint8_t table) { return table < tables.table_count(); }));
  const auto* const from = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return Kernels().rans_decode_symbols(tables.decode(), from, bytes.size(), table_of.data(),
                                       symbols.data(), symbols.size())
             ? absl::OkStatus()
             : Damaged();
}

absl::Status RansDecodeBits(std::span<const std::byte> bytes,
                            std::span<const std::uint8_t> bit_counts,
                            std::span<std::uint16_t> values) {
  KV_CHECK(bit_counts.size() == values.size());
  const auto* const from = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return Kernels().rans_decode_bits(from, bytes.size(), bit_counts.data(), values.data(),
                                    values.size())
             ? absl::OkStatus()
             : Damaged();
}

}  // namespace kvtrie
