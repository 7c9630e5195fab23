#include "storage/engine/event_log.h"

#include <utility>

namespace kvtrie {

void EventLog::Append(std::vector<StoreEvent> events) {
  std::vector<std::function<void()>> due;
  {
    absl::MutexLock lock(&mutex_);
    for (StoreEvent& event : events) {
      event.sequence = next_sequence_++;
      events_.push_back(std::move(event));
      if (events_.size() > events_max_) events_.pop_front();
    }
    for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
      if (waiter->second.from < next_sequence_) {
        due.push_back(std::move(waiter->second.on_event));
        waiter = waiters_.erase(waiter);
      } else {
        ++waiter;
      }
    }
  }
  for (const auto& on_event : due) on_event();
}

EventLog::Page EventLog::Read(TenantId tenant, std::uint64_t from, std::size_t count) const {
  absl::MutexLock lock(&mutex_);
  Page page;
  const std::uint64_t oldest = next_sequence_ - events_.size();
  page.gap = from < oldest || from > next_sequence_;
  page.next_sequence = page.gap ? oldest : from;
  while (page.next_sequence < next_sequence_ && page.events.size() < count) {
    const StoreEvent& event = events_[page.next_sequence - oldest];
    if (event.tenant == tenant) page.events.push_back(event);
    ++page.next_sequence;
  }
  return page;
}

std::uint64_t EventLog::NotifyAt(std::uint64_t from, std::function<void()> on_event) const {
  {
    absl::MutexLock lock(&mutex_);
    if (from >= next_sequence_) {
      const std::uint64_t notification = next_waiter_++;
      waiters_.emplace(notification, Waiter{from, std::move(on_event)});
      return notification;
    }
  }
  on_event();
  return 0;
}

void EventLog::Cancel(std::uint64_t notification) const {
  absl::MutexLock lock(&mutex_);
  waiters_.erase(notification);
}

std::uint64_t EventLog::next_sequence() const {
  absl::MutexLock lock(&mutex_);
  return next_sequence_;
}

}  // namespace kvtrie
