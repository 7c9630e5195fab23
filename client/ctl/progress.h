#pragma once

#include <chrono>
#include <cmath>
#include <cstddef>
#include <ostream>
#include <string_view>

namespace kvtrie {

// How far long work is, on the error output: on a terminal one line that is written over, elsewhere
// (a file, a pipe) a line for each tenth. Short work shows nothing. Not thread-safe.
class Progress {
 public:
  Progress(std::ostream& err, bool is_terminal,
           std::chrono::steady_clock::duration silence = std::chrono::seconds(2))
      : err_(err),
        is_terminal_(is_terminal),
        shown_from_(std::chrono::steady_clock::now() + silence) {}
  ~Progress() { EndLine(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // done_share: 0 to 1.
  void Report(double done_share, std::string_view what) {
    if (std::chrono::steady_clock::now() < shown_from_) return;
    const auto percent = static_cast<int>(std::floor(100 * done_share));
    if (!is_terminal_ && percent < next_percent_) return;
    next_percent_ = (percent / 10 + 1) * 10;
    err_ << (is_terminal_ ? "\r" : "")
         << (percent < 10    ? "  "
             : percent < 100 ? " "
                             : "")
         << percent << " %  " << what;
    const std::size_t columns = what.size() + 6;
    for (std::size_t i = columns; i < shown_columns_; ++i) err_ << ' ';
    shown_columns_ = columns;
    if (!is_terminal_) EndLine();
    err_ << std::flush;
  }

  // So that something else can be written.
  void EndLine() {
    if (shown_columns_ > 0) err_ << "\n" << std::flush;
    shown_columns_ = 0;
  }

 private:
  std::ostream& err_;
  const bool is_terminal_;
  const std::chrono::steady_clock::time_point shown_from_;
  std::size_t shown_columns_ = 0;
  int next_percent_ = 0;
};

}  // namespace kvtrie
