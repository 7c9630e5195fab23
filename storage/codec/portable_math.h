#pragma once

#include <cmath>

#include "storage/codec/host_device_code.h"

namespace kvtrie {

// Functions of a decoder whose results must have the same bits on every machine: a C library's own
// differ in their last bits between versions and processors. Only IEEE additions, multiplications
// and divisions of doubles, in the order that RESIDUAL.md gives.
// Thread-safe.

struct SineAndCosine {
  double sine;
  double cosine;
};

// A Taylor series from its end: 1 - t / (n (n+1)) (1 - t / ((n+2) (n+3)) (...)), eight times.
KV_HOST_DEVICE inline double AlternatingSeries(double t, int n) {
  double sum = 1;
  for (int k = n + 14; k >= n; k -= 2) sum = 1 - t * (1.0 / (k * (k + 1))) * sum;
  return sum;
}

// Of an angle in radians, at least 0, as far off as the next double of the angle is. REQUIRES: the
// including file is compiled without contraction.
KV_HOST_DEVICE inline SineAndCosine PortableSineAndCosine(double angle) {
  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
  // pi / 2 in three parts: products of the first two with small integers are exact.
  constexpr double kHalfPi0 = 0x1.921fb544p+0;
  constexpr double kHalfPi1 = 0x1.0b4611a6p-34;
  constexpr double kHalfPi2 = 0x1.3198a2e037073p-69;
  const double quarters = std::floor(angle * kTwoOverPi + 0.5);
  const double rest = ((angle - quarters * kHalfPi0) - quarters * kHalfPi1) - quarters * kHalfPi2;
  const double square = rest * rest;
  const double sine = rest * AlternatingSeries(square, 2);
  const double cosine = AlternatingSeries(square, 1);
  switch (static_cast<int>(std::fmod(quarters, 4.0))) {
    case 0:
      return {sine, cosine};
    case 1:
      return {cosine, -sine};
    case 2:
      return {-sine, -cosine};
    default:
      return {-cosine, sine};
  }
}

// base^-exponent, within 4e-15 of itself for bases from 1e-9 to 1e9. REQUIRES: base is positive and
// finite; exponent from 0 to 1.
double PortableInversePower(double base, double exponent);

}  // namespace kvtrie
