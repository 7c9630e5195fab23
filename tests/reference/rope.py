"""The rotation of K: storage/codec/RESIDUAL.md, RoPE."""

import math

from dtypes import float32
from model import HALF_SPLIT, INTERLEAVED


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
            angle = position * spec.theta**(-2 * i / d)
            a, b = (i, i + d // 2) if spec.pairing == HALF_SPLIT else (2 * i, 2 * i + 1)
            self.pairs.append((a, b, float32(math.cos(angle)), float32(math.sin(angle))))

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
