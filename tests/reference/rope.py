"""The rotation of K: storage/codec/RESIDUAL.md, RoPE and Portable functions."""

import math

from dtypes import float32
from model import HALF_SPLIT, INTERLEAVED


LN_2 = float.fromhex("0x1.62e42fefa39efp-1")
ROOT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
HALF_PI = [float.fromhex(part) for part in ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")]


def log(v: float) -> float:
    m, k = math.frexp(v)
    if m < ROOT_HALF:
        m, k = 2 * m, k - 1
    z = (m - 1) / (m + 1)
    s = 0.0
    for j in range(21, 0, -2):
        s = s * (z * z) + 1 / j
    return k * LN_2 + 2 * z * s


def exp(v: float) -> float:
    n = math.floor(v / LN_2 + 0.5)
    r = v - n * LN_2
    s = 1.0
    for j in range(16, 0, -1):
        s = 1 + r * (1 / j) * s
    return math.ldexp(s, n)


def cosine_and_sine(a: float):
    q = float(math.floor(a * TWO_OVER_PI + 0.5))
    r = a
    for part in HALF_PI:
        r = r - q * part
    t = r * r

    def series(n):
        s = 1.0
        for j in range(n + 14, n - 1, -2):
            s = 1 - t * (1 / (j * (j + 1))) * s
        return s

    sine, cosine = r * series(2), series(1)
    sine, cosine = ((sine, cosine), (cosine, -sine), (-sine, -cosine), (-cosine, sine))[int(q) % 4]
    return cosine, sine


class Rope:
    """Of one layer, for one position."""

    def __init__(self, spec, layer: int, position: int):
        head_dim = spec.layers[layer][1]
        self.head_dim = head_dim
        self.pairs = []  # (index of a, of b, cosine, sine)
        d = spec.rotary_dims or head_dim
        if spec.pairing not in (HALF_SPLIT, INTERLEAVED) or spec.theta <= 0 or spec.scaling or d % 2 or d > head_dim:
            return
        for i in range(d // 2):
            cosine, sine = cosine_and_sine(position * exp(-(i / (d // 2)) * log(spec.theta)))
            a, b = (i, i + d // 2) if spec.pairing == HALF_SPLIT else (2 * i, 2 * i + 1)
            self.pairs.append((a, b, float32(cosine), float32(sine)))

    def turn(self, row) -> list:
        return self._rotate(row, lambda a, b, cos, sin: (float32(float32(a * cos) - float32(b * sin)),
                                                         float32(float32(b * cos) + float32(a * sin))))

    def turn_back(self, row) -> list:
        return self._rotate(row, lambda a, b, cos, sin: (float32(float32(a * cos) + float32(b * sin)),
                                                         float32(float32(b * cos) - float32(a * sin))))

    def _rotate(self, row, rotation) -> list:
        row = list(row)
        for head in range(0, len(row), self.head_dim):
            for a, b, cos, sin in self.pairs:
                row[head + a], row[head + b] = rotation(row[head + a], row[head + b], cos, sin)
        return row
