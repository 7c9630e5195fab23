#include "server/watchdog.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvtrie {

Watchdog::Watchdog(Submit submit, std::chrono::milliseconds stuck_limit, Clock& clock)
    : submit_(std::move(submit)),
      stuck_limit_(stuck_limit),
      clock_(clock),
      state_(std::make_shared<State>()) {}

void Watchdog::Tick() {
  {
    absl::MutexLock lock(&state_->mutex);
    if (!state_->under_way) {
      state_->under_way = true;
      state_->started = clock_.Monotonic();
    }
  }
  // A queue that stays full is stuck as well; one more piece in it does no harm.
  static_cast<void>(submit_([state = state_] {
    absl::MutexLock lock(&state->mutex);
    state->under_way = false;
  }));
}

std::string Watchdog::Complaint() const {
  absl::MutexLock lock(&state_->mutex);
  if (!state_->under_way) return {};
  const auto waited = clock_.Monotonic() - state_->started;
  if (waited < stuck_limit_) return {};
  return absl::StrCat("work that waits for the disk has not moved for ",
                      std::chrono::duration_cast<std::chrono::seconds>(waited).count(), " s");
}

}  // namespace kvtrie
