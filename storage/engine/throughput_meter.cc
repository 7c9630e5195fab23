#include "storage/engine/throughput_meter.h"

#include <algorithm>
#include <chrono>

namespace kvtrie {
namespace {

constexpr double kRememberedSeconds = 1;

}  // namespace

void ThroughputMeter::Begin() {
  absl::MutexLock lock(&mutex_);
  if (under_way_++ == 0) counted_to_ = clock_.Monotonic();
}

void ThroughputMeter::End(double amount) {
  absl::MutexLock lock(&mutex_);
  const Clock::Duration now = clock_.Monotonic();
  if (now - Clock::Duration(measured_.load(std::memory_order_relaxed)) > kKnownFor) {
    seconds_ = 0;
    amount_ = 0;
  }
  seconds_ += std::chrono::duration<double>(now - counted_to_).count();
  counted_to_ = now;
  --under_way_;
  amount_ += amount;
  if (amount_ > 0) {
    seconds_per_unit_.store(seconds_ / amount_, std::memory_order_relaxed);
    measured_.store(now.count(), std::memory_order_relaxed);
  }
  if (seconds_ < kRememberedSeconds) return;
  seconds_ /= 2;
  amount_ /= 2;
}

double ThroughputMeter::SecondsPerUnit() const {
  const Clock::Duration measured(measured_.load(std::memory_order_relaxed));
  return clock_.Monotonic() - measured > kKnownFor
             ? 0
             : seconds_per_unit_.load(std::memory_order_relaxed);
}

ThroughputMeters::PerCodec ThroughputMeters::SecondsPerUnit() const {
  PerCodec seconds;
  for (std::size_t i = 0; i < seconds.size(); ++i) seconds[i] = meters_[i].SecondsPerUnit();
  const double slowest = *std::max_element(seconds.begin(), seconds.end());
  for (double& of_codec : seconds) {
    if (of_codec == 0) of_codec = slowest;
  }
  return seconds;
}

}  // namespace kvtrie
