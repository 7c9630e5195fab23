#include "storage/base/clock.h"

namespace kvtrie {
namespace {

class RealClock final : public Clock {
 public:
  Duration Monotonic() const override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
  std::int64_t UnixSeconds() const override {
    return std::chrono::duration_cast<std::chrono::seconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace

Clock& SystemClock() {
  static RealClock clock;
  return clock;
}

}  // namespace kvtrie
