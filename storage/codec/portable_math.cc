#include "storage/codec/portable_math.h"

#include <cmath>

namespace kvtrie {
namespace {

constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kRootHalf = 0x1.6a09e667f3bcdp-1;

// ln of a positive number: 2 (z + z^3 / 3 + ...), z = (m - 1) / (m + 1), m from 0.7 to 1.4.
double Log(double x) {
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);  // exact
  if (mantissa < kRootHalf) {
    mantissa *= 2;
    --exponent;
  }
  const double z = (mantissa - 1) / (mantissa + 1);
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * (z * z) + 1.0 / k;
  return exponent * kLn2 + 2 * z * sum;
}

// e^x: 2^n times the Taylor series of what is left, at most ln(2) / 2 in size.
double Exp(double x) {
  const double n = std::floor(x / kLn2 + 0.5);
  const double rest = x - n * kLn2;
  double sum = 1;
  for (int k = 16; k >= 1; --k) sum = 1 + rest * (1.0 / k) * sum;
  return std::ldexp(sum, static_cast<int>(n));  // exact
}

}  // namespace

double PortableInversePower(double base, double exponent) { return Exp(-exponent * Log(base)); }

}  // namespace kvtrie
