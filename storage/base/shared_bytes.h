#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace kvtrie {

// Memory aligned for direct I/O. Content is not initialised.
class AlignedBuffer {
 public:
  static constexpr std::size_t kAlignment = 4096;

  AlignedBuffer() = default;
  // Rounds `bytes` up to kAlignment. Aborts when memory is exhausted (callers bound sizes first).
  explicit AlignedBuffer(std::size_t bytes);

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  // What it takes of memory: the allocator rounds up too.
  std::size_t memory_bytes() const;

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

// Immutable bytes with shared ownership: a view into memory that lives as long as any view does.
// Copying shares. Thread-safe as std::shared_ptr is.
struct SharedBytes {
  std::shared_ptr<const AlignedBuffer> owner;
  std::span<const std::byte> view;

  explicit operator bool() const { return owner != nullptr; }
};

}  // namespace kvtrie
