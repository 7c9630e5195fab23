#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace kvtrie {

// Calls work(i) for each i below `count`, on at most so many threads, the calling one among them.
template <typename Work>
void OnThreads(int thread_count, std::size_t count, const Work& work) {
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  const std::size_t wanted = std::min(count, static_cast<std::size_t>(std::max(thread_count, 1)));
  for (std::size_t i = 1; i < wanted; ++i) others.emplace_back(run);
  run();
  for (std::thread& thread : others) thread.join();
}

// Tokens whose blocks are coded together: as many as make products fast, and no more, so that what
// they take of memory is bounded.
inline constexpr std::size_t kCodingTokens = 256;

constexpr std::size_t CodingBlocks(std::size_t block_tokens) {
  return std::max<std::size_t>(kCodingTokens / ((block_tokens + 15) / 16 * 16), 1);
}

}  // namespace kvtrie
