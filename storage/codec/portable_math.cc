#include "storage/codec/portable_math.h"

#include <cmath>

namespace kvtrie {
namespace {

constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
// pi / 2 in three parts: products of the first two with small integers are exact.
constexpr double kHalfPi[3] = {0x1.921fb544p+0, 0x1.0b4611a6p-34, 0x1.3198a2e037073p-69};
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kRootHalf = 0x1.6a09e667f3bcdp-1;

// A Taylor series from its end: 1 - t / (n (n+1)) (1 - t / ((n+2) (n+3)) (...)), eight times.
double Alternating(double t, int n) {
  double sum = 1;
  for (int k = n + 14; k >= n; k -= 2) sum = 1 - t * (1.0 / (k * (k + 1))) * sum;
  return sum;
}

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

SineAndCosine PortableSineAndCosine(double angle) {
  const double quarters = std::floor(angle * kTwoOverPi + 0.5);
  const double rest =
      ((angle - quarters * kHalfPi[0]) - quarters * kHalfPi[1]) - quarters * kHalfPi[2];
  const double square = rest * rest;
  const double sine = rest * Alternating(square, 2);
  const double cosine = Alternating(square, 1);
  switch (static_cast<int>(std::fmod(quarters, 4.0))) {
    case 0:
      return {.sine = sine, .cosine = cosine};
    case 1:
      return {.sine = cosine, .cosine = -sine};
    case 2:
      return {.sine = -sine, .cosine = -cosine};
    default:
      return {.sine = -cosine, .cosine = sine};
  }
}

double PortableInversePower(double base, double exponent) { return Exp(-exponent * Log(base)); }

}  // namespace kvtrie
