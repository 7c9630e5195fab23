#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "client/load_plan.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// What a client has measured of its own loading. What was not measured for kKnownFor is as good as
// never measured: a client that loads nothing, for what it takes loading to cost, so finds out when
// that has changed. Not thread-safe.
class LoadRates {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kKnownFor{30};

  // So many bytes arrived within the time, decoding left out. The best of the last fetches counts,
  // forgotten as bytes come slower: what made others slower was the server, which says so itself.
  void Fetched(std::uint64_t bytes, double seconds, Time now);
  void Decoded(CodecId codec, double tokens, double seconds, Time now);

  // `server_decodes` is left as it is.
  LoadCost cost(Time now) const;

 private:
  struct Decoding {
    double tokens = 0;
    double seconds = 0;
    Time measured;
  };
  double bytes_per_second_ = 0;
  Time fetched_;
  std::array<Decoding, std::size(kAllCodecs)> decodings_{};
};

// The prefill cost of one model on one engine, from what the engine measured: least squares of
// relative errors, in which older reports fade. Not thread-safe.
class PrefillFit {
 public:
  // Computing `tokens` tokens behind `context_tokens` others took so long. REQUIRES: both times are
  // finite and above 0.
  void Add(std::uint64_t tokens, std::uint64_t context_tokens, double seconds);

  // Where the reports do not tell the two parts apart, all is put on the tokens. Unknown before the
  // first report.
  const PrefillCost& cost() const { return cost_; }

 private:
  // Sums over reports, of x = tokens / seconds and y = token pairs / seconds.
  double xx_ = 0, xy_ = 0, yy_ = 0, x_ = 0, y_ = 0;
  PrefillCost cost_;
};

}  // namespace kvtrie
