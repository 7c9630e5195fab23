#include "storage/base/byte_budget.h"

#include <vector>

#include "storage/base/check.h"

namespace kvtrie {

bool ByteBudget::AcquireOrWait(std::size_t bytes, std::function<void()> on_granted) {
  absl::MutexLock lock(&mutex_);
  if (waiters_.empty() && Fits(bytes)) {
    used_bytes_ += bytes;
    return true;
  }
  waiters_.push_back({bytes, std::move(on_granted)});
  return false;
}

bool ByteBudget::TryAcquire(std::size_t bytes, std::size_t keep_free_bytes) {
  absl::MutexLock lock(&mutex_);
  if (!waiters_.empty() || !Fits(bytes + keep_free_bytes)) return false;
  used_bytes_ += bytes;
  return true;
}

void ByteBudget::Release(std::size_t bytes) {
  std::vector<std::function<void()>> granted;
  {
    absl::MutexLock lock(&mutex_);
    KV_CHECK(used_bytes_ >= bytes);
    used_bytes_ -= bytes;
    while (!waiters_.empty() && Fits(waiters_.front().bytes)) {
      used_bytes_ += waiters_.front().bytes;
      granted.push_back(std::move(waiters_.front().on_granted));
      waiters_.pop_front();
    }
  }
  for (auto& callback : granted) callback();
}

std::size_t ByteBudget::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return used_bytes_;
}

std::size_t ByteBudget::waiting() const {
  absl::MutexLock lock(&mutex_);
  return waiters_.size();
}

}  // namespace kvtrie
