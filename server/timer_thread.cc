#include "server/timer_thread.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace kvtrie {

TimerThread::TimerThread() : thread_([this] { Run(); }) {}

TimerThread::~TimerThread() { Stop(); }

void TimerThread::Post(std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  if (!stopping_) posted_.push_back(std::move(work));
}

void TimerThread::Every(std::chrono::milliseconds period, std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  const absl::Duration duration = absl::FromChrono(period);
  periodic_.push_back({absl::Now() + duration, duration, std::move(work)});
  changed_ = true;
}

void TimerThread::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

absl::Time TimerThread::NextDue() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Periodic& periodic : periodic_) next = std::min(next, periodic.due);
  return next;
}

void TimerThread::Run() {
  while (true) {
    std::vector<std::function<void()>> ready;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithDeadline(absl::Condition(this, &TimerThread::HasWork), NextDue());
      if (stopping_) return;
      changed_ = false;
      ready.assign(std::make_move_iterator(posted_.begin()),
                   std::make_move_iterator(posted_.end()));
      posted_.clear();
      const absl::Time now = absl::Now();
      for (Periodic& periodic : periodic_) {
        if (periodic.due > now) continue;
        ready.push_back(periodic.work);
        periodic.due = now + periodic.period;
      }
    }
    for (auto& work : ready) work();
  }
}

}  // namespace kvtrie
