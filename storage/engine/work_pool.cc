#include "storage/engine/work_pool.h"

#include <utility>

namespace kvtrie {

WorkPool::WorkPool(unsigned thread_count, std::size_t queue_max)
    : thread_count_(thread_count), queue_max_(queue_max) {
  threads_.reserve(thread_count);
  for (unsigned i = 0; i < thread_count; ++i) threads_.emplace_back([this] { Run(); });
}

WorkPool::~WorkPool() { Finish(); }

void WorkPool::Finish() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool WorkPool::TryPost(std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  if (queue_.size() >= queue_max_) return false;
  queue_.push_back(std::move(work));
  return true;
}

void WorkPool::Post(std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(work));
}

std::size_t WorkPool::queue_length() const {
  absl::MutexLock lock(&mutex_);
  return queue_.size();
}

std::ptrdiff_t WorkPool::spare_threads() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<std::ptrdiff_t>(thread_count_) -
         static_cast<std::ptrdiff_t>(working_ + queue_.size());
}

void WorkPool::Run() {
  const auto ready = [this]()
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ending_ || !queue_.empty(); };
  while (true) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mutex_, absl::Condition(&ready));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
      ++working_;
    }
    work();
    work = nullptr;  // what it holds may be large
    absl::MutexLock lock(&mutex_);
    --working_;
  }
}

}  // namespace kvtrie
