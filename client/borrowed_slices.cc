#include "client/borrowed_slices.h"

namespace kvtrie {

grpc::Slice BorrowedSlices::Lend(std::span<const std::byte> bytes) {
  {
    absl::MutexLock lock(&mutex_);
    ++lent_;
  }
  // gRPC reads only; its signature lacks the const.
  return grpc::Slice(const_cast<std::byte*>(bytes.data()), bytes.size(), &Return, this);
}

void BorrowedSlices::WaitUntilReturned() {
  const auto none_lent = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return lent_ == 0; };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&none_lent));
}

void BorrowedSlices::Return(void* self) {
  auto* slices = static_cast<BorrowedSlices*>(self);
  absl::MutexLock lock(&slices->mutex_);
  --slices->lent_;
}

}  // namespace kvtrie
