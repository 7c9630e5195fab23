#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvtrie/v1/types.pb.h"

namespace kvtrie {

// Numbers and ids as people read them.

std::string FormatBytes(std::uint64_t bytes);       // "1.5 MiB"
std::string FormatCount(std::uint64_t count);       // "12,345"
std::string FormatBits(double bits);                // to whole ones, as counts
std::string FormatDuration(std::uint64_t seconds);  // "3d 4h", "5m 12s"
std::string FormatTime(std::int64_t unix_seconds);  // UTC, "2026-01-31 12:00:00"; "-" for 0
std::string FormatRatio(double numerator,
                        double denominator);  // "2.50x"; "-" when there is nothing to compare

// What others chose, safe to print: without control characters.
std::string FormatText(std::string_view text);

std::string IdToHex(std::string_view id);
// The 16 bytes of an id; nullopt unless `hex` is 32 hexadecimal digits.
std::optional<std::string> IdFromHex(std::string_view hex);

std::string_view RungName(v1::Rung rung);
std::string_view QualityName(v1::Quality quality);
std::string_view CodecName(v1::FrameCodec codec);
std::string_view DTypeName(v1::DType dtype);

}  // namespace kvtrie
