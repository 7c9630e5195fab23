#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "storage/codec/rans_lanes.h"

// Range asymmetric numeral systems (Duda, arXiv:1311.2540) with static tables, 16 lanes side by
// side.
//
// A step codes at most one symbol in each lane, with a table that may differ from lane to lane, or
// some bits as they are. The bytes of an encoder: the 16 states that a decoder starts with (u32),
// then u16 words, all little-endian. A lane's state x lies in [2^16, 2^32). To decode, with
// slot = x mod 4096 and the symbol whose slots [first, first + frequency) hold it,
//   x = frequency * (x / 4096) + slot - first,
// and when that is below 2^16, x = 2^16 x + the next word; in each step the lanes take words in
// the order of their numbers. k bits are a symbol of frequency 2^(12-k). When all has been decoded,
// each state is 2^16 and no word is left.
namespace kvtrie {

inline constexpr std::size_t kRansTablesMax = 256;

// Shares of 4096 for symbols that came so many times: each symbol with a count gets 1 at least, one
// without a count gets 0 and cannot be coded. Nearly the shortest code; the same on all machines.
// REQUIRES: frequencies.size() == counts.size() <= 256, and some count is not 0.
void NormalizeCounts(std::span<const std::uint32_t> counts, std::span<std::uint16_t> frequencies);

// Tables to code with; both directions. Immutable use is thread-safe. 17 KiB per table.
class RansTables {
 public:
  // Tables that code nothing until they are set. REQUIRES: table_count <= kRansTablesMax.
  explicit RansTables(std::size_t table_count);

  // `frequencies` of symbols 0, 1, ... InvalidArgument unless they are at most 256 and sum up to
  // 4096. REQUIRES: table < table_count().
  absl::Status Set(std::size_t table, std::span<const std::uint16_t> frequencies);

  std::size_t table_count() const { return decode_.size() / kRansTableSlots; }

  // For the steps of rans_lanes.h: [table][4096], and [table][256].
  const std::uint32_t* decode() const { return decode_.data(); }
  const std::uint32_t* encode() const { return encode_.data(); }

 private:
  std::vector<std::uint32_t> decode_;
  std::vector<std::uint32_t> encode_;
};

// Records steps in the order in which they will be decoded, and then codes them from the last to
// the first. 96 bytes of memory per step, kept for what it encodes next. Not thread-safe.
class RansEncoder {
 public:
  // Place for the records of so many steps (16 each, see rans_lanes.h), of lanes that code nothing
  // until they are written. Valid until the next call.
  std::uint32_t* AddSteps(std::size_t step_count);

  // One step per 16 symbols: symbols[i] in lane i % 16, with table table_of[i]. The last step may
  // have fewer. REQUIRES: table_of.size() == symbols.size(); each below tables.table_count().
  void AddSymbols(const RansTables& tables, std::span<const std::uint8_t> table_of,
                  std::span<const std::uint8_t> symbols);

  // The same for the low bit_counts[i] bits (0 to 12) of values[i], whose other bits are 0.
  void AddBits(std::span<const std::uint8_t> bit_counts, std::span<const std::uint16_t> values);

  // Appends the bytes and starts anew. InvalidArgument when a symbol's table has not that symbol;
  // nothing is appended then.
  absl::Status Finish(std::vector<std::byte>& to);
  // The same; bytes_at[i] is how many of them a decoder needs for the first step_marks[i] steps
  // (ascending).
  absl::Status Finish(std::vector<std::byte>& to, std::span<const std::size_t> step_marks,
                      std::vector<std::size_t>& bytes_at);

 private:
  std::vector<std::uint32_t> records_;
  std::vector<std::uint8_t> room_;  // of Finish, kept
};

// What AddSymbols coded, when nothing else was. DataLoss unless `bytes` is exactly what an encoder
// writes for some symbols, so many; `symbols` holds anything then. That finds most damage, and is
// no checksum. REQUIRES: as AddSymbols.
absl::Status RansDecodeSymbols(const RansTables& tables, std::span<const std::byte> bytes,
                               std::span<const std::uint8_t> table_of,
                               std::span<std::uint8_t> symbols);

// What AddBits coded, when nothing else was.
absl::Status RansDecodeBits(std::span<const std::byte> bytes,
                            std::span<const std::uint8_t> bit_counts,
                            std::span<std::uint16_t> values);

}  // namespace kvtrie
