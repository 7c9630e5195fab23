#include "storage/base/shared_bytes.h"

#include <cstdlib>

#include "storage/base/check.h"

namespace kvtrie {

AlignedBuffer::AlignedBuffer(std::size_t bytes)
    : size_((bytes + kAlignment - 1) / kAlignment * kAlignment) {
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, size_)));
  KV_CHECK(size_ == 0 || data_ != nullptr);
}

void AlignedBuffer::Free::operator()(std::byte* data) const { std::free(data); }

}  // namespace kvtrie
