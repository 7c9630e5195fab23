#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"

namespace kvtrie {

// An integer that cannot be mixed up with another integer:
//   using TenantId = StrongId<std::uint32_t, struct TenantIdTag>;
template <typename Value, typename Tag>
struct StrongId {
  Value value{};
  constexpr auto operator<=>(const StrongId&) const = default;

  template <typename H>
  friend H AbslHashValue(H hash, const StrongId& id) {
    return H::combine(std::move(hash), id.value);
  }
};

// 16 opaque bytes of one kind: a digest or a random id. All zero means "none".
template <typename Tag>
struct Id128 {
  static constexpr std::size_t kBytes = 16;
  std::array<std::uint8_t, kBytes> bytes{};

  // nullopt unless `text` is exactly 16 bytes.
  static std::optional<Id128> FromBytes(std::string_view text) {
    if (text.size() != kBytes) return std::nullopt;
    Id128 id;
    std::memcpy(id.bytes.data(), text.data(), kBytes);
    return id;
  }

  constexpr auto operator<=>(const Id128&) const = default;

  bool empty() const { return *this == Id128{}; }
  std::string_view view() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::string ToHex() const { return absl::BytesToHexString({view().data(), view().size()}); }

  template <typename H>
  friend H AbslHashValue(H hash, const Id128& id) {
    return H::combine(std::move(hash), id.bytes);
  }
};

}  // namespace kvtrie
