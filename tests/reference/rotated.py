"""The rotated body: storage/codec/ROTATED.md."""

import functools
import itertools
import math
import struct

import dtypes
import rope
from damage import Reader, require
from dtypes import float32
from model import K, V


def decode(frame, spec) -> bytes:
    reader = Reader(frame.body, "rotated")
    reader.bytes(24)
    require(reader.number("I") == 1, "rotated: rotation")
    sizes = reader.array("I", len(spec.layers))
    raw = b""
    for layer, size in enumerate(sizes):
        data = Reader(reader.bytes(size), "rotated: layer")
        raw += _decode_kind(data, spec, layer, K) + _decode_kind(data, spec, layer, V)
        data.end()
    reader.end()
    return raw


def _decode_kind(data, spec, layer, kind) -> bytes:
    heads, dim = spec.layers[layer][0], spec.layers[layer][1 + kind]
    if dim == 0:
        return b""
    count = spec.block_tokens * heads
    bits = data.number("I")
    if bits == 0:
        return data.bytes(spec.kind_bytes(layer, kind))
    require(2 <= bits <= 5, "rotated: bits")
    exact_count = data.number("I")
    require(exact_count <= count, "rotated: exact_count")
    scale_codes = data.array("H", count)
    require(all(code <= 0x7BFF for code in scale_codes), "rotated: scale")
    scales = struct.unpack(f"<{count}e", struct.pack(f"<{count}H", *scale_codes))
    vectors = []
    for first in range(0, count, 16):
        words = data.array("H", bits * dim)
        for v in range(16):
            codes = [sum((words[i * bits + p] >> v & 1) << p for p in range(bits)) for i in range(dim)]
            if first + v < count:
                vectors.append(_vector(codes, bits, scales[first + v], spec.dtype))
            else:
                require(not any(codes), "rotated: codes behind the last vector")
    exact = data.array("I", exact_count)
    require(all(a < b for a, b in zip(exact, exact[1:])) and all(index < count for index in exact), "rotated: exact vectors")
    for index in exact:
        vectors[index] = data.bytes(dim * spec.dtype_bytes)
    return b"".join(vectors)


def _vector(codes, bits, scale, dtype) -> bytes:
    dim = len(codes)
    if scale == 0:
        return bytes(dim * dtypes.BYTES[dtype])
    words = codebook(dim, bits)
    negative = 1 << bits - 1
    y = [-words[code & negative - 1] if code & negative else words[code & negative - 1] for code in codes]
    factor = float32(scale * float32(1 / math.sqrt(dim)))
    x = [float32(value * (factor * sign)) + 0.0 for sign, value in zip(signs(dim), transform(y))]
    return dtypes.write(dtype, [dtypes.code(dtype, value) for value in x])


@functools.cache
def signs(dim: int):
    mask = 2**64 - 1

    def z(n):
        value = 0x4B56524F54415445 + (n + 1) * 0x9E3779B97F4A7C15 & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    return [-1 if z(i // 64) >> i % 64 & 1 else 1 for i in range(dim)]


def transform(x) -> list:
    """T x, in the order of operations that the page gives."""
    dim = len(x)
    h = dim & -dim
    m = dim // h
    t = list(x)
    half = 1
    while half < h:
        for i in range(dim):
            if i & half == 0:
                t[i], t[i + half] = float32(t[i] + t[i + half]), float32(t[i] - t[i + half])
        half *= 2
    if m == 1:
        return t
    angles = [2 * math.pi * n / m for n in range(m)]
    cas = [float32(sum(rope.cosine_and_sine(angle))) for angle in angles]
    result = []
    for i in range(m):
        for k in range(h):
            value = t[k]
            for j in range(1, m):
                value = float32(value + float32(cas[i * j % m] * t[j * h + k]))
            result.append(value)
    return result


@functools.cache
def codebook(dim: int, bits: int):
    """The positive codewords. With x = sin(t), the density of t is cos(t)^(dim-2), integrated by Simpson's rule."""
    count = 1 << bits - 1
    if dim == 1:
        return [1.0] * count
    cells = 4096
    step = math.pi / 2 / cells

    def density(t):
        return max(math.cos(t), 0.0)**(dim - 2)

    def simpson(low, high):
        return (high - low) / 6 * (density(low) + 4 * density((low + high) / 2) + density(high))

    masses = list(itertools.accumulate((simpson(i * step, (i + 1) * step) for i in range(cells)), initial=0.0))

    def mass(x):  # between 0 and x
        t = math.asin(x)
        cell = min(int(t / step), cells - 1)
        return masses[cell] + simpson(cell * step, t)

    def mean(low, high):
        moment = (1 - low * low)**((dim - 1) / 2) - (1 - high * high)**((dim - 1) / 2)
        return moment / (dim - 1) / (mass(high) - mass(low))

    words = [min(3 / math.sqrt(dim), 1) * (i + 0.5) / count for i in range(count)]
    change = 1.0
    while change > 1e-13:
        bounds = [0.0] + [(a + b) / 2 for a, b in zip(words, words[1:])] + [1.0]
        better = [mean(low, high) for low, high in zip(bounds, bounds[1:])]
        change = max(abs(a - b) for a, b in zip(words, better))
        words = better
    return [round(word * 2**20) / 2**20 for word in words]
