#pragma once

#include <chrono>
#include <cstdint>
#include <random>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"

namespace kvtrie {

struct RetryOptions {
  std::chrono::milliseconds initial_backoff{20};
  std::chrono::milliseconds max_backoff{2000};
  double backoff_factor = 2;

  // A fleet that retries without bound keeps an overloaded server down. Each retry takes one token;
  // tokens come back with time and with calls that succeed.
  double budget_tokens = 20;
  double budget_tokens_per_second = 2;
  double budget_tokens_per_success = 0.1;
};

// Whether the same call may succeed later: the server starts, drains, is overloaded or was not
// reached.
inline bool IsRetriable(const absl::Status& status) { return absl::IsUnavailable(status); }

// Pauses between the attempts of one call: each up to `backoff_factor` times the last, with jitter
// of half of it, so that callers that failed together do not come back together. Not thread-safe.
class Backoff {
 public:
  Backoff(const RetryOptions& options, std::uint64_t seed);

  std::chrono::nanoseconds Next();

 private:
  std::chrono::nanoseconds max_;
  double factor_;
  std::chrono::nanoseconds next_;
  std::minstd_rand random_;
};

// Tokens for retries, shared by all calls of a client. Thread-safe.
class RetryBudget {
 public:
  RetryBudget(const RetryOptions& options, Clock& clock);

  // False: fail the call instead of trying again.
  bool TryTake();
  void CallSucceeded();

 private:
  void Refill() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const double tokens_max_;
  const double tokens_per_second_;
  const double tokens_per_success_;
  Clock& clock_;

  absl::Mutex mutex_;
  double tokens_ ABSL_GUARDED_BY(mutex_);
  Clock::Duration refilled_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
