#include "client/retry.h"

#include <algorithm>

namespace kvtrie {

Backoff::Backoff(const RetryOptions& options, std::uint64_t seed)
    : max_(options.max_backoff),
      factor_(options.backoff_factor),
      next_(options.initial_backoff),
      random_(static_cast<std::minstd_rand::result_type>(seed ^ (seed >> 32))) {}

std::chrono::nanoseconds Backoff::Next() {
  const std::chrono::nanoseconds full = std::min(next_, max_);
  next_ = std::min(max_, std::chrono::nanoseconds(static_cast<std::int64_t>(
                             static_cast<double>(full.count()) * factor_)));
  std::uniform_real_distribution<double> share(0.5, 1.0);
  return std::chrono::nanoseconds(
      static_cast<std::int64_t>(static_cast<double>(full.count()) * share(random_)));
}

RetryBudget::RetryBudget(const RetryOptions& options, Clock& clock)
    : tokens_max_(options.budget_tokens),
      tokens_per_second_(options.budget_tokens_per_second),
      tokens_per_success_(options.budget_tokens_per_success),
      clock_(clock),
      tokens_(options.budget_tokens),
      refilled_at_(clock.Monotonic()) {}

bool RetryBudget::TryTake() {
  absl::MutexLock lock(&mutex_);
  Refill();
  if (tokens_ < 1) return false;
  tokens_ -= 1;
  return true;
}

void RetryBudget::CallSucceeded() {
  absl::MutexLock lock(&mutex_);
  tokens_ = std::min(tokens_max_, tokens_ + tokens_per_success_);
}

void RetryBudget::Refill() {
  const Clock::Duration now = clock_.Monotonic();
  const double seconds = std::chrono::duration<double>(now - refilled_at_).count();
  tokens_ = std::min(tokens_max_, tokens_ + seconds * tokens_per_second_);
  refilled_at_ = now;
}

}  // namespace kvtrie
