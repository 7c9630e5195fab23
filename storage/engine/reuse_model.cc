#include "storage/engine/reuse_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvtrie {
namespace {

// Blocks for which the prior counts, and for which what is known of all blocks that were used as
// often does.
constexpr double kPriorBlocks = 1024;
constexpr double kPoolBlocks = 64;
// Where nothing is known, a block that has been idle for t is used at this many times 1 / (t + 10
// s): those that were used 0, 1, 2, 4, 8 times.
constexpr double kPriorRates[] = {0.12, 0.24, 0.36, 0.48, 0.6};
constexpr double kPriorSeconds = 10;
// Counts fade by half when there are so many for each block that is stored.
constexpr double kEventsPerBlock = 16;
constexpr double kEventsMin = 65'536;

}  // namespace

double ReuseModel::RangeBegin(std::size_t range) {
  if (range < 2) return static_cast<double>(range);
  return std::ldexp(range % 2 == 0 ? 1.0 : 1.5, static_cast<int>(range / 2));
}

std::size_t ReuseModel::RangeOf(std::uint32_t idle_seconds) {
  if (idle_seconds < 2) return idle_seconds;
  const auto octave = static_cast<std::size_t>(std::bit_width(idle_seconds) - 1);
  return std::min(kRanges - 1, 2 * octave + (idle_seconds >> (octave - 1) & 1u));
}

std::size_t ReuseModel::ClassOf(NodeTraffic traffic) {
  const auto origin = static_cast<std::size_t>(traffic.origin());
  const std::uint32_t uses = traffic.uses();
  if (uses == 0) return origin * NodeTraffic::kTraits + traffic.trait();
  const std::size_t use_class = uses < 2 ? 0 : uses < 4 ? 1 : uses < 8 ? 2 : 3;
  return 4 * NodeTraffic::kTraits +
         (origin * (kUseClasses - 1) + use_class) * NodeTraffic::kGapClasses + traffic.gap_class();
}

ReuseModel::Cell ReuseModel::CellOf(NodeTraffic traffic, std::uint32_t idle_seconds) {
  return static_cast<Cell>(ClassOf(traffic) * kRanges + RangeOf(idle_seconds));
}

ReuseModel::ReuseModel()
    : new_reused_(kClasses * kRanges),
      new_given_up_(kClasses * kRanges),
      reused_(kClasses),
      given_up_(kClasses),
      hazards_(kClasses),
      rates_(kClasses) {
  Update({});
}

void ReuseModel::Reused(Cell cell, std::uint32_t blocks) {
  new_reused_[cell].fetch_add(blocks, std::memory_order_relaxed);
  new_events_.fetch_add(blocks, std::memory_order_relaxed);
}

void ReuseModel::GivenUp(Cell cell, std::uint32_t blocks) {
  new_given_up_[cell].fetch_add(blocks, std::memory_order_relaxed);
  new_events_.fetch_add(blocks, std::memory_order_relaxed);
}

ReuseModel::Hazards ReuseModel::Learn(const Counts& reused, const Counts& given_up,
                                      const Hazards& prior, double prior_blocks) {
  Hazards hazards;
  double at_risk = 0;  // that were idle so long
  for (std::size_t range = kRanges; range-- > 0;) {
    // What is given up in the middle of a range has been at risk for half of it.
    const double exposed = at_risk + reused[range] + given_up[range] / 2;
    at_risk += reused[range] + given_up[range];
    hazards[range] = (reused[range] + prior_blocks * prior[range]) / (exposed + prior_blocks);
  }
  return hazards;
}

bool ReuseModel::WantsUpdate() const {
  const auto fresh = static_cast<double>(new_events_.load(std::memory_order_relaxed));
  return fresh > std::min(events_ / 32, 16'384.0);
}

void ReuseModel::Update(std::span<const Waiting> waiting) {
  new_events_ = 0;
  events_ = 0;
  for (std::size_t cell = 0; cell < kClasses * kRanges; ++cell) {
    double& reused = reused_[cell / kRanges][cell % kRanges];
    double& given_up = given_up_[cell / kRanges][cell % kRanges];
    reused += new_reused_[cell].exchange(0, std::memory_order_relaxed);
    given_up += new_given_up_[cell].exchange(0, std::memory_order_relaxed);
    events_ += reused + given_up;
  }
  double waiting_blocks = 0;
  for (const Waiting& some : waiting) waiting_blocks += some.blocks;
  if (events_ > std::max(kEventsMin, kEventsPerBlock * waiting_blocks)) {
    for (std::vector<Counts>* all : {&reused_, &given_up_}) {
      for (Counts& counts : *all) {
        for (double& count : counts) count /= 2;
      }
    }
    events_ /= 2;
  }
  std::vector<Counts> unused = given_up_;  // up to now
  for (const Waiting& some : waiting) {
    unused[some.cell / kRanges][some.cell % kRanges] += some.blocks;
  }

  // What is known of a class leans on what is known of all that were used as often.
  struct Sum {
    Counts reused{};
    Counts unused{};
  };
  std::array<Sum, kUseClasses> sums;
  const auto uses_of = [](std::size_t traffic_class) -> std::size_t {
    constexpr std::size_t kNeverUsed = 4 * NodeTraffic::kTraits;
    if (traffic_class < kNeverUsed) return 0;
    return 1 + (traffic_class - kNeverUsed) / NodeTraffic::kGapClasses % (kUseClasses - 1);
  };
  for (std::size_t i = 0; i < kClasses; ++i) {
    for (std::size_t range = 0; range < kRanges; ++range) {
      sums[uses_of(i)].reused[range] += reused_[i][range];
      sums[uses_of(i)].unused[range] += unused[i][range];
    }
  }
  std::array<Hazards, kUseClasses> of_uses;
  for (std::size_t i = 0; i < kUseClasses; ++i) {
    Hazards prior;
    for (std::size_t range = 0; range < kRanges; ++range) {
      const double begin = RangeBegin(range);
      const double octaves = (RangeBegin(range + 1) - begin) / (begin + kPriorSeconds);
      prior[range] = std::min(0.9, kPriorRates[i] * octaves);
    }
    of_uses[i] = Learn(sums[i].reused, sums[i].unused, prior, kPriorBlocks);
  }
  for (std::size_t i = 0; i < kClasses; ++i) {
    hazards_[i] = Learn(reused_[i], unused[i], of_uses[uses_of(i)], kPoolBlocks);
    for (std::size_t from = 0; from < kRanges; ++from) {
      double silent = 1;  // the chance that it is not used until then
      double kept_seconds = 0;
      double best = 0;
      for (std::size_t range = from; range < kRanges; ++range) {
        const double width = RangeBegin(range + 1) - RangeBegin(range);
        const double used = silent * hazards_[i][range];
        kept_seconds += (silent - used / 2) * width;
        silent -= used;
        best = std::max(best, (1 - silent) / kept_seconds);
      }
      rates_[i][from] = best;
    }
  }
}

double ReuseModel::UsesPerSecond(NodeTraffic traffic, std::uint32_t idle_seconds) const {
  const Hazards& rates = rates_[ClassOf(traffic)];
  const std::size_t range = RangeOf(idle_seconds);
  if (range + 1 == kRanges) return rates[range];
  // In between, so that of equals the one that is idle for longer differs.
  const double part =
      (idle_seconds - RangeBegin(range)) / (RangeBegin(range + 1) - RangeBegin(range));
  return rates[range] + (rates[range + 1] - rates[range]) * part;
}

double ReuseModel::Probability(NodeTraffic traffic, std::uint32_t idle_seconds,
                               double horizon_seconds) const {
  const Hazards& hazards = hazards_[ClassOf(traffic)];
  const double end = idle_seconds + horizon_seconds;
  double at = idle_seconds;
  double unused = 1;
  for (std::size_t range = RangeOf(idle_seconds); range < kRanges && at < end; ++range) {
    const double begin = RangeBegin(range);
    const double range_end = RangeBegin(range + 1);
    const double part = (std::min(end, range_end) - at) / (range_end - begin);
    unused *= std::pow(1 - hazards[range], part);
    at = range_end;
  }
  return 1 - unused;
}

}  // namespace kvtrie
