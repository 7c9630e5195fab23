#include "storage/engine/compute_speeds.h"

#include <algorithm>
#include <cmath>

namespace kvtrie {
namespace {

// Reports that the mean of a model is made of, and what one may differ from it by; beyond that it
// counts as this. So one moves a mean by a factor of at most 1.09, and 40 equal ones by 32.
constexpr std::uint32_t kReportsRemembered = 16;
constexpr double kReportRatioMax = 4;

}  // namespace

void ComputeSpeeds::Report(ModelSlot model, double seconds_per_flop) {
  const double reported = std::log(seconds_per_flop);
  Mean& mean = means_[model];
  mean.reports = std::min(mean.reports + 1, kReportsRemembered);
  double change = 0;
  if (mean.reports > 1) {
    const double bound = std::log(kReportRatioMax);
    change = std::clamp(reported - mean.log_seconds, -bound, bound) / mean.reports;
  } else if (means_.size() == 1) {
    change = reported;
  } else {
    const double of_others = sum_ / static_cast<double>(means_.size() - 1);
    const double bound = std::log(kRatioMax);
    change = of_others + std::clamp(reported - of_others, -bound, bound);
  }
  mean.log_seconds += change;
  sum_ += change;
}

double ComputeSpeeds::Relative(ModelSlot model) const {
  const auto found = means_.find(model);
  if (found == means_.end()) return 1;
  const double bound = std::log(kRatioMax);
  const double mean = sum_ / static_cast<double>(means_.size());
  return std::exp(std::clamp(found->second.log_seconds - mean, -bound, bound));
}

}  // namespace kvtrie
