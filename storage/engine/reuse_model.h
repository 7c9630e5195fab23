#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/trie/node_traffic.h"

namespace kvtrie {

// How likely a block that nobody has asked for since `idle_seconds` will be asked for again, and
// how soon: learned from what happened to blocks of the same traffic. For each class of traffic
// (how often used, at what distance, how it came) it counts the idle times after which blocks were
// used again, and those after which they were given up without; the ratio of the two to all that
// had been idle as long is the hazard. So nothing is assumed of the workload: a session that pauses
// for a minute and a document that is read each hour look different, and scans are those that have
// not come back. Classes that have been seen little lean on those around them, and a store that has
// seen nothing on a prior under which the chance falls with the idle time.
//
// Counts fade, so that a workload that changes is followed. Source of the idea, ranking by reuse
// per time that space is taken: Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing
// Hit Density" (NSDI 2018). Departures: hazards are not cut off by eviction, since what is evicted
// is remembered (GhostTable), and of all times to keep a block the best is taken, not that under
// one policy (an index as Gittins').
//
// Reused and GivenUp are thread-safe; the others are for one thread at a time, beside any number of
// those.
class ReuseModel {
 public:
  // What is counted together: a class of traffic and a range of idle times.
  using Cell = std::uint32_t;

  ReuseModel();

  static Cell CellOf(NodeTraffic traffic, std::uint32_t idle_seconds);

  // So many blocks of this cell were asked for again.
  void Reused(Cell cell, std::uint32_t blocks);
  // They were forgotten without.
  void GivenUp(Cell cell, std::uint32_t blocks);

  // Blocks that are idle now, in the store or among those remembered: they have not been used again
  // so far. A sample, each with the number of blocks that it stands for.
  struct Waiting {
    Cell cell = 0;
    double blocks = 0;
  };
  // Whether enough was counted for an update to be worth its time.
  bool WantsUpdate() const;
  // Learns from what was counted. What is older than some uses of each block fades.
  void Update(std::span<const Waiting> waiting);

  // The most uses per second for which a block can be kept: the highest ratio, over all horizons,
  // of the chance that it is used within the horizon to the time that it is kept until it is used
  // or the horizon ends.
  double UsesPerSecond(NodeTraffic traffic, std::uint32_t idle_seconds) const;

  // The chance that it is used within the next `horizon_seconds`.
  double Probability(NodeTraffic traffic, std::uint32_t idle_seconds, double horizon_seconds) const;

 private:
  // Idle times: 0, 1, 2, 3, 4, 6, 8, 12, 16 ... seconds begin a range; the last one has no end.
  static constexpr std::size_t kRanges = 44;
  static constexpr std::size_t kUseClasses = 5;
  // Never used: origin and trait. Used: origin, uses, gap.
  static constexpr std::size_t kClasses =
      4 * NodeTraffic::kTraits + 4 * (kUseClasses - 1) * NodeTraffic::kGapClasses;

  static std::size_t ClassOf(NodeTraffic traffic);
  static std::size_t RangeOf(std::uint32_t idle_seconds);
  static double RangeBegin(std::size_t range);

  using Counts = std::array<double, kRanges>;
  using Hazards = std::array<double, kRanges>;
  static Hazards Learn(const Counts& reused, const Counts& given_up, const Hazards& prior,
                       double prior_blocks);

  std::vector<std::atomic<std::uint32_t>> new_reused_;  // [cell], since the last update
  std::vector<std::atomic<std::uint32_t>> new_given_up_;
  std::atomic<std::uint64_t> new_events_{0};

  std::vector<Counts> reused_;  // [class]
  std::vector<Counts> given_up_;
  double events_ = 0;             // in them
  std::vector<Hazards> hazards_;  // [class]
  std::vector<Hazards> rates_;    // [class], UsesPerSecond at the beginning of each range
};

}  // namespace kvtrie
