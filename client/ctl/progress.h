#pragma once

#include <chrono>
#include <cmath>
#include <ostream>
#include <string_view>

namespace kvtrie {

// How far long work is, on one line of the error output that is written over. Short work shows
// nothing. Not thread-safe.
class Progress {
 public:
  explicit Progress(std::ostream& err,
                    std::chrono::steady_clock::duration silence = std::chrono::seconds(2))
      : err_(err), shown_from_(std::chrono::steady_clock::now() + silence) {}
  ~Progress() {
    if (shown_columns_ > 0) err_ << "\n" << std::flush;
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // done_share: 0 to 1.
  void Report(double done_share, std::string_view what) {
    if (std::chrono::steady_clock::now() < shown_from_) return;
    const auto percent = static_cast<int>(std::floor(100 * done_share));
    const std::size_t columns = what.size() + 6;
    err_ << "\r" << (percent < 10 ? "  " : percent < 100 ? " " : "") << percent << " %  " << what;
    for (std::size_t i = columns; i < shown_columns_; ++i) err_ << ' ';
    err_ << std::flush;
    shown_columns_ = columns;
  }

 private:
  std::ostream& err_;
  const std::chrono::steady_clock::time_point shown_from_;
  std::size_t shown_columns_ = 0;
};

}  // namespace kvtrie
