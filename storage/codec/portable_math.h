#pragma once

namespace kvtrie {

// Functions of a decoder whose results must have the same bits on every machine: a C library's own
// differ in their last bits between versions and processors. Only IEEE additions, multiplications
// and divisions of doubles, in the order that RESIDUAL.md gives.
// Thread-safe.

struct SineAndCosine {
  double sine;
  double cosine;
};

// Of an angle in radians, at least 0, as far off as the next double of the angle is.
SineAndCosine PortableSineAndCosine(double angle);

// base^-exponent, within 4e-15 of itself for bases from 1e-9 to 1e9. REQUIRES: base is positive and
// finite; exponent from 0 to 1.
double PortableInversePower(double base, double exponent);

}  // namespace kvtrie
