#include "client/ctl/format.h"

#include <time.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace kvtrie {

std::string FormatBytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string FormatCount(std::uint64_t count) {
  const std::string digits = std::to_string(count);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string FormatBits(double bits) {
  return FormatCount(static_cast<std::uint64_t>(std::llround(bits)));
}

std::string FormatDuration(std::uint64_t seconds) {
  const std::uint64_t minutes = seconds / 60;
  const std::uint64_t hours = minutes / 60;
  const std::uint64_t days = hours / 24;
  if (days > 0) return absl::StrCat(days, "d ", hours % 24, "h");
  if (hours > 0) return absl::StrCat(hours, "h ", minutes % 60, "m");
  if (minutes > 0) return absl::StrCat(minutes, "m ", seconds % 60, "s");
  return absl::StrCat(seconds, "s");
}

std::string FormatTime(std::int64_t unix_seconds) {
  if (unix_seconds == 0) return "-";
  const time_t when = static_cast<time_t>(unix_seconds);
  tm parts;
  if (gmtime_r(&when, &parts) == nullptr) return "?";
  char text[64];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

std::string FormatRatio(double numerator, double denominator) {
  if (denominator <= 0) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.2fx", numerator / denominator);
  return text;
}

std::string FormatText(std::string_view text) {
  std::string safe(text);
  for (char& c : safe) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = '?';
  }
  return safe;
}

std::string IdToHex(std::string_view id) {
  return absl::BytesToHexString(absl::string_view(id.data(), id.size()));
}

std::optional<std::string> IdFromHex(std::string_view hex) {
  constexpr std::size_t kDigits = 32;
  if (hex.size() != kDigits ||
      !std::all_of(hex.begin(), hex.end(), [](unsigned char c) { return std::isxdigit(c) != 0; })) {
    return std::nullopt;
  }
  return absl::HexStringToBytes(absl::string_view(hex.data(), hex.size()));
}

std::string_view RungName(v1::Rung rung) {
  switch (rung) {
    case v1::RUNG_TOKENS:
      return "tokens";
    case v1::RUNG_CODED:
      return "coded";
    case v1::RUNG_EXACT:
      return "exact";
    default:
      return "unknown";
  }
}

std::string_view QualityName(v1::Quality quality) {
  switch (quality) {
    case v1::QUALITY_HIGH:
      return "high";
    case v1::QUALITY_NEAR_EXACT:
      return "near-exact";
    case v1::QUALITY_EXACT:
      return "exact";
    case v1::QUALITY_SMALL:
      return "small";
    case v1::QUALITY_UNRATED:
      return "unrated";
    default:
      return "-";
  }
}

std::string_view CodecName(v1::FrameCodec codec) {
  switch (codec) {
    case v1::CODEC_RAW:
      return "raw";
    case v1::CODEC_LOSSLESS:
      return "lossless";
    case v1::CODEC_RESIDUAL:
      return "residual";
    case v1::CODEC_REFERENCED:
      return "referenced";
    case v1::CODEC_ROTATED:
      return "rotated";
    default:
      return "unknown";
  }
}

std::string_view DTypeName(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FLOAT32:
      return "float32";
    case v1::DTYPE_FLOAT16:
      return "float16";
    case v1::DTYPE_BFLOAT16:
      return "bfloat16";
    case v1::DTYPE_FLOAT8_E4M3:
      return "float8_e4m3";
    case v1::DTYPE_FLOAT8_E5M2:
      return "float8_e5m2";
    case v1::DTYPE_INT8:
      return "int8";
    case v1::DTYPE_UINT8:
      return "uint8";
    default:
      return "unknown";
  }
}

}  // namespace kvtrie
