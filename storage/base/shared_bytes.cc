#include "storage/base/shared_bytes.h"

#include "storage/base/check.h"
#include "storage/base/frame_memory.h"

namespace kvtrie {

AlignedBuffer::AlignedBuffer(std::size_t bytes)
    : size_((bytes + kAlignment - 1) / kAlignment * kAlignment) {
  data_.reset(static_cast<std::byte*>(AllocateFrameMemory(size_, kAlignment)));
  KV_CHECK(size_ == 0 || data_ != nullptr);
}

std::size_t AlignedBuffer::memory_bytes() const { return FrameMemoryBytes(size_, kAlignment); }

void AlignedBuffer::Free::operator()(std::byte* data) const { FreeFrameMemory(data); }

}  // namespace kvtrie
