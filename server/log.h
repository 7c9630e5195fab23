#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "spdlog/spdlog.h"

namespace kvtrie {

// Sends the log to standard error. What is logged at which level: error = someone must act; warn =
// degraded but serving; info = once per process life or operator action; debug = once per request.
// Never tokens, salts, session ids or KV.
void StartLogging(const std::string& level, bool json);

// `text` as the inside of a JSON string.
std::string EscapeJson(std::string_view text);

// Lets one message of a kind through per period, and says with the next how many it held back.
// Thread-safe.
class LogLimiter {
 public:
  explicit LogLimiter(std::chrono::seconds period = std::chrono::seconds(10)) : period_(period) {}

  template <typename... Arguments>
  void Warn(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    std::uint64_t suppressed = 0;
    if (!Admit(std::chrono::steady_clock::now(), &suppressed)) return;
    const std::string text = fmt::format(format, std::forward<Arguments>(arguments)...);
    if (suppressed == 0) {
      spdlog::warn("{}", text);
    } else {
      spdlog::warn("{} (suppressed {} like it)", text, suppressed);
    }
  }

  // False: hold this one back.
  bool Admit(std::chrono::steady_clock::time_point now, std::uint64_t* suppressed);

 private:
  const std::chrono::seconds period_;
  absl::Mutex mutex_;
  std::chrono::steady_clock::time_point next_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
