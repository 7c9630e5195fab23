#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "storage/base/byte_order.h"

namespace kvtrie {

// Reads a format from foreign bytes. After the first read past the end every read gives zeros and
// ok() is false, so a parser checks once at its end (and before it uses a length).
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}
  explicit ByteReader(std::string_view text)
      : rest_(reinterpret_cast<const std::byte*>(text.data()), text.size()) {}

  template <typename T>
  T Read() {
    if (rest_.size() < sizeof(T)) {
      Fail();
      return T{};
    }
    const T value = LoadLittle<T>(rest_.data());
    rest_ = rest_.subspan(sizeof(T));
    return value;
  }

  std::span<const std::byte> ReadBytes(std::size_t count) {
    if (rest_.size() < count) {
      Fail();
      return {};
    }
    const auto bytes = rest_.first(count);
    rest_ = rest_.subspan(count);
    return bytes;
  }

  std::string_view ReadText(std::size_t count) {
    const auto bytes = ReadBytes(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  bool ok() const { return ok_; }
  std::size_t remaining_bytes() const { return rest_.size(); }
  // True when everything was read and nothing was missing.
  bool Done() const { return ok_ && rest_.empty(); }

 private:
  void Fail() {
    ok_ = false;
    rest_ = {};
  }

  std::span<const std::byte> rest_;
  bool ok_ = true;
};

// Appends to a string in the same order.
class ByteWriter {
 public:
  template <typename T>
  void Write(T value) {
    const std::size_t at = text_.size();
    text_.resize(at + sizeof value);
    StoreLittle(text_.data() + at, value);
  }
  void WriteText(std::string_view text) { text_.append(text); }

  const std::string& text() const { return text_; }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
inline std::string_view AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace kvtrie
