#include "storage/codec/lloyd_max.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

#include "storage/base/check.h"

namespace kvtrie {
namespace {

// The density of a component x is proportional to (1 - x^2)^((dim - 3) / 2). With x = sin(t), that
// is cos(t)^(dim - 2) dt: smooth everywhere, and integrated here once on a grid of t.
class ComponentDensity {
 public:
  explicit ComponentDensity(std::uint32_t dim) : dim_(dim), masses_(kCells + 1) {
    for (std::size_t i = 0; i < kCells; ++i) {
      const double t = static_cast<double>(i) * kStep;
      const double simpson = (At(t) + 4 * At(t + kStep / 2) + At(t + kStep)) / 6;
      masses_[i + 1] = masses_[i] + simpson * kStep;
    }
  }

  // Between 0 and x.
  double Mass(double x) const {
    const double t = std::asin(x);
    const std::size_t cell = std::min(static_cast<std::size_t>(t / kStep), kCells - 1);
    const double begin = static_cast<double>(cell) * kStep;
    const double part = t - begin;
    return masses_[cell] + part * (At(begin) + 4 * At(begin + part / 2) + At(t)) / 6;
  }
  // The mean of x between two bounds.
  double Mean(double low, double high) const {
    const auto moment = [this](double x) {  // from x to 1
      return std::pow(std::max(1 - x * x, 0.0), (dim_ - 1) / 2.0) / (dim_ - 1);
    };
    const double mass = Mass(high) - Mass(low);
    return mass > 0 ? (moment(low) - moment(high)) / mass : (low + high) / 2;
  }

 private:
  static constexpr std::size_t kCells = 8192;
  static constexpr double kStep = std::numbers::pi / 2 / kCells;

  double At(double t) const { return std::pow(std::max(std::cos(t), 0.0), dim_ - 2.0); }

  double dim_;
  std::vector<double> masses_;
};

}  // namespace

LloydMaxCodebook MakeLloydMaxCodebook(std::uint32_t dim, std::uint32_t bits) {
  KV_CHECK(dim >= 1);
  KV_CHECK(bits >= 1 && bits <= 6);
  const std::size_t count = std::size_t{1} << (bits - 1);
  LloydMaxCodebook book;
  if (dim == 1) {
    book.codewords.assign(count, 1.0f);
    book.bounds.assign(count - 1, 2.0f);
    return book;
  }
  const ComponentDensity density(dim);
  const double widest = std::min(3 / std::sqrt(static_cast<double>(dim)), 1.0);
  std::vector<double> words(count);
  for (std::size_t i = 0; i < count; ++i) {
    words[i] = widest * (static_cast<double>(i) + 0.5) / static_cast<double>(count);
  }
  // Each round takes the means between the bounds that the last words have. What is left after n
  // rounds is less than the last change times n, and far below a float's precision.
  constexpr int kRoundsMax = 20000;
  constexpr double kChangeMin = 1e-12;
  std::vector<double> bounds(count + 1, 0.0);
  bounds.back() = 1.0;
  for (int round = 0; round < kRoundsMax; ++round) {
    for (std::size_t i = 1; i < count; ++i) bounds[i] = (words[i - 1] + words[i]) / 2;
    double change = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const double mean = density.Mean(bounds[i], bounds[i + 1]);
      change = std::max(change, std::abs(mean - words[i]) / widest);
      words[i] = mean;
    }
    if (change < kChangeMin) break;
  }
  // On a grid that is coarser than what the last bits of a C library make of them.
  for (const double word : words) {
    book.codewords.push_back(static_cast<float>(std::nearbyint(word * 0x1p20) * 0x1p-20));
  }
  for (std::size_t i = 1; i < count; ++i) {
    book.bounds.push_back((book.codewords[i - 1] + book.codewords[i]) / 2);
  }
  return book;
}

}  // namespace kvtrie
