#pragma once

#include <time.h>

#include <algorithm>

namespace kvtrie {

// CPU time of this thread in the fastest of `rounds` calls of body(): what the code takes however
// busy the machine is, but for the caches that it shares.
template <typename Body>
double BestCpuSeconds(int rounds, Body body) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const double start = now();
    body();
    best = std::min(best, now() - start);
  }
  return best;
}

}  // namespace kvtrie
