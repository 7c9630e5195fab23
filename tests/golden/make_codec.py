"""Writes the codecs' files of tests/golden/v1 and the corpora of their fuzz targets, from the descriptions alone: the
comment at the top of storage/codec/rans.h, LOSSLESS.md and ROTATED.md. It shares no code with the C++ writers. Files that are
released are not written anew.
"""

import fractions
import functools
import math
import pathlib
import struct

HERE = pathlib.Path(__file__).parent
CORPUS = HERE.parent / "fuzz" / "corpus"
LANES = 16


class Random:
    """The generator of the tests: the high bits of a 64-bit linear congruence."""

    def __init__(self, seed: int):
        self.state = seed

    def below(self, bound: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % bound


def rans_encode(steps) -> bytes:
    """`steps`: lists of 16, each (first slot, frequency) or None for a lane that codes nothing."""
    states = [1 << 16] * LANES
    words = []  # from the last to the first
    for step in reversed(steps):
        for lane in reversed(range(LANES)):
            if step[lane] is None:
                continue
            first, frequency = step[lane]
            if states[lane] >= frequency << 20:
                words.append(states[lane] & 0xFFFF)
                states[lane] >>= 16
            states[lane] = (states[lane] // frequency << 12) + states[lane] % frequency + first
    return struct.pack("<16I", *states) + struct.pack(f"<{len(words)}H", *reversed(words))


def in_steps(codes) -> list:
    padded = codes + [None] * (-len(codes) % LANES)
    return [padded[i:i + LANES] for i in range(0, len(padded), LANES)]


# Three tables of up to 5 symbols, with one that is certain.
FREQUENCIES = [[4096], [4000, 90, 5, 1], [1000, 0, 1096, 2000 - 17, 17]]


def golden_symbols(count: int):
    """(table, symbol) of each, drawn by the tables' own frequencies."""
    random = Random(1)
    drawn = []
    for _ in range(count):
        table = random.below(len(FREQUENCIES))
        slot = random.below(4096)
        symbol = 0
        while slot >= FREQUENCIES[table][symbol]:
            slot -= FREQUENCIES[table][symbol]
            symbol += 1
        drawn.append((table, symbol))
    return drawn


def rans_symbols(count: int) -> bytes:
    return rans_encode(in_steps([(sum(FREQUENCIES[table][:symbol]), FREQUENCIES[table][symbol])
                                 for table, symbol in golden_symbols(count)]))


def rans_bits(count: int) -> bytes:
    random = Random(2)
    codes = []
    for _ in range(count):
        bits = random.below(13)
        codes.append((random.below(1 << bits) << (12 - bits), 1 << (12 - bits)))
    return rans_encode(in_steps(codes))


def frequencies_of(counts):
    """Counts to frequencies, as LOSSLESS.md says."""
    total = sum(counts)
    f = [max(4096 * count // total, 1 if count else 0) for count in counts]
    while (missing := 4096 - sum(f)) != 0:
        if missing > 0:
            best = max((i for i, count in enumerate(counts) if count),
                       key=lambda i: (fractions.Fraction(counts[i], 2 * f[i] + 1), -i))
            f[best] += 1
        else:
            best = min((i for i, count in enumerate(counts) if f[i] > 1),
                       key=lambda i: (fractions.Fraction(counts[i], 2 * f[i] - 1), i))
            f[best] -= 1
    return f


# Name: number of the DType, bytes, bits of the mantissa (None for integers).
DTYPES = {"float32": (1, 4, 23), "float16": (2, 2, 10), "bfloat16": (3, 2, 7), "float8_e4m3": (4, 1, 3),
          "float8_e5m2": (5, 1, 2), "int8": (6, 1, None), "uint8": (7, 1, None)}
# KV heads, dims of K and of V; tokens; the layer of random bytes, which are kept raw.
LOSSLESS_BLOCK = ([(2, 20, 7), (1, 33, 0), (1, 5, 16)], 64, 2)
ROTATED_BLOCK = ([(2, 16, 12), (1, 5, 0)], 24, 2)


def golden_codes(name: str, layers, token_count: int, noise_layer: int):
    """The raw values of a golden block, [layer][K, V][token][channel]."""
    number, size, mantissa_bits = DTYPES[name]
    random = Random(number)
    block = []
    for layer, (heads, k_dim, v_dim) in enumerate(layers):
        kinds = []
        for dim in (k_dim, v_dim):
            tokens = []
            for _ in range(token_count):
                row = []
                for channel in range(heads * dim):
                    if layer == noise_layer:
                        code = random.below(1 << 16) << 16 | random.below(1 << 16)
                        row.append(code & ((1 << 8 * size) - 1))
                        continue
                    sign = int(random.below(8) == 0) ^ channel & 1
                    rare = random.below(50) == 0
                    scale = random.below(256) | 256
                    noise = random.below(1 << 23)
                    lower = (scale & -scale).bit_length() - 1
                    if mantissa_bits is None:
                        bound = 1 << channel % 8
                        value = noise % (bound + 1)
                        value = 128 if rare else value >> lower // 4
                        value = -value if sign or rare else min(value, 127)
                        row.append((value + (128 if name == "uint8" else 0)) & 0xFF)
                        continue
                    exponent_bits = 8 * size - 1 - mantissa_bits
                    middle = (1 << exponent_bits) * 5 // 8
                    exponent = 0 if rare else max(middle + channel % 5 - lower, 0)
                    mantissa = noise & ((1 << mantissa_bits) - 1)
                    if name == "float32":
                        mantissa &= ~0xFFFF  # as of a bfloat16
                    row.append(sign << 8 * size - 1 | exponent << mantissa_bits | mantissa)
                tokens.append(row)
            kinds.append(tokens)
        block.append(kinds)
    return block


def split(code: int, name: str):
    """Sign, exponent, mantissa, and how many bits of the mantissa go to the rANS coder."""
    _, size, mantissa_bits = DTYPES[name]
    if mantissa_bits is None:
        value = code - 128 if name == "uint8" else code - 256 * (code >> 7)
        exponent = abs(value).bit_length()
        bits = max(exponent - 1, 0)
        return int(value < 0), exponent, abs(value) & ((1 << bits) - 1), bits
    exponent_bits = 8 * size - 1 - mantissa_bits
    return (code >> 8 * size - 1, code >> mantissa_bits & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1),
            0)


def exponent_bits_of(name: str) -> int:
    _, size, mantissa_bits = DTYPES[name]
    return 4 if mantissa_bits is None else 8 * size - 1 - mantissa_bits


def lossless_symbols(tokens, name: str, mean: int):
    """(table, symbol) of each value, [token][channel]."""
    states = [[mean, 16, 0, 0] for _ in tokens[0]]
    result = []
    for t, row in enumerate(tokens):
        symbols = []
        for state, code in zip(states, row):
            sign, exponent, _, _ = split(code, name)
            mean, spread, last, same = state
            half = mean + 4 >> 3
            table = (half & 1) + 2 * sum(bound <= spread for bound in (8, 14, 22)) + 8 * (same == 2)
            cls = exponent - (half >> 1) + 11
            symbols.append((table, 2 * (cls if 1 <= cls <= 15 else 0) + (sign ^ last)))
            difference = 16 * exponent - mean
            state[0] += difference * (256 // min(t + 3, 16)) >> 8
            state[1] += (abs(difference) - spread) * (256 // min(t + 2, 16)) >> 8
            state[3] = min(same + 1, 2) if sign == last else 0
            state[2] = sign
        result.append(symbols)
    return result


def weight(code: int) -> int:
    return (16, 19, 23, 27)[(code - 1) % 4] << (code - 1) // 4 if code else 0


def nearest_weight(count: int, most: int) -> int:
    best = 63
    if count == 0:
        return 0

    def distance(code):
        return abs(weight(code) * most - weight(63) * count)

    while best > 1 and distance(best - 1) <= distance(best):
        best -= 1
    return best


def lossless_tables(symbols):
    """The stored form of a kind's tables, and their frequencies; which weights to take is the writer's choice."""
    classes = [[0] * 16 for _ in range(8)]
    changes = [[0, 0] for _ in range(8)]
    for table, symbol in symbols:
        classes[table % 8][symbol // 2] += 1
        changes[table // 2][symbol % 2] += 1
    weights = [[nearest_weight(count, max(row)) for count in row] for row in classes]
    change = [min(max((256 * c[1] + sum(c) // 2) // sum(c), 1), 255) if sum(c) else 128 for c in changes]
    packed = sum(w << 6 * i for i, w in enumerate(w for row in weights for w in row))
    tables = []
    for table in range(16):
        counts = []
        for w in weights[table % 8]:
            counts += [weight(w) * (256 - change[table // 2]), weight(w) * change[table // 2]]
        tables.append(frequencies_of(counts) if any(counts) else None)
    return packed.to_bytes(96, "little") + bytes(change), tables


BINDING = struct.pack("<II", 4000, 0xE3069283) + bytes(16)


def lossless_body(block, name: str) -> bytes:
    _, size, mantissa_bits = DTYPES[name]
    models = []  # [layer][kind]: mean, planes, symbols
    all_symbols = [[], []]
    for kinds in block:
        models.append([])
        for k, tokens in enumerate(kinds):
            values = [split(code, name) for row in tokens for code in row]
            mean = 16 * sum(v[1] for v in values) // len(values) if values else 0
            planes = functools.reduce(int.__or__, (v[2] for v in values), 0) if mantissa_bits is not None else 0
            symbols = lossless_symbols(tokens, name, mean)
            all_symbols[k] += [s for row in symbols for s in row]
            models[-1].append((mean, planes, symbols))
    stored, tables = zip(*(lossless_tables(symbols) for symbols in all_symbols))

    layers, words = [], []
    for kinds, model in zip(block, models):
        steps, plane_bytes = [], b""
        for k, tokens in enumerate(kinds):
            mean, planes, symbols = model[k]
            for row, row_symbols in zip(tokens, symbols):
                for at in range(0, len(row), LANES):
                    values = [split(code, name) for code in row[at:at + LANES]]
                    idle = [None] * (LANES - len(values))
                    drawn = row_symbols[at:at + LANES]
                    steps.append([(sum(tables[k][t][:s]), tables[k][t][s]) for t, s in drawn] + idle)
                    if any(s < 2 for _, s in drawn):
                        width = exponent_bits_of(name)
                        steps.append([(v[1] << 12 - width, 1 << 12 - width) if s < 2 else None
                                      for v, (_, s) in zip(values, drawn)] + idle)
                    if mantissa_bits is None:
                        steps.append([(v[2] << 12 - v[3], 1 << 12 - v[3]) for v in values] + idle)
                    for b in range(23):
                        if planes >> b & 1:
                            plane_bytes += struct.pack("<H", sum((v[2] >> b & 1) << i for i, v in enumerate(values)))
        rans = rans_encode(steps)
        layer = struct.pack("<HHIII", model[0][0], model[1][0], model[0][1], model[1][1], len(rans)) + rans + plane_bytes
        raw = b"".join(code.to_bytes(size, "little") for tokens in kinds for row in tokens for code in row)
        words.append(len(layer) if len(layer) < len(raw) else len(raw) | 1 << 31)
        layers.append(layer if len(layer) < len(raw) else raw)
    head = BINDING + struct.pack("<I", 1) + b"".join(stored) + struct.pack(f"<{len(words)}I", *words)
    assert len(head) + sum(map(len, layers)) < 28 + sum(word & ~(1 << 31) for word in words if word >> 31) + size * sum(
        len(tokens) * len(tokens[0]) for kinds, word in zip(block, words) for tokens in kinds if not word >> 31), "raw is smaller"
    return head + b"".join(layers)


def lloyd_max(dim: int, bits: int):
    """The codewords for positive components. The density of arcsin(x) is cos^(dim - 2)."""
    count = 1 << bits - 1
    cells = 20000
    step = math.pi / 2 / cells
    masses = [0.0]
    for i in range(cells):
        masses.append(masses[-1] + math.cos((i + 0.5) * step)**(dim - 2) * step)

    def mass(x):
        t = math.asin(x) / step
        cell = min(int(t), cells - 1)
        return masses[cell] + (t - cell) * (masses[cell + 1] - masses[cell])

    def mean(low, high):
        moment = (1 - low * low)**((dim - 1) / 2) - max(1 - high * high, 0.0)**((dim - 1) / 2)
        return moment / (dim - 1) / (mass(high) - mass(low))

    words = [min(3 / math.sqrt(dim), 1) * (i + 0.5) / count for i in range(count)]
    for _ in range(3000):
        bounds = [0.0] + [(a + b) / 2 for a, b in zip(words, words[1:])] + [1.0]
        words = [mean(low, high) for low, high in zip(bounds, bounds[1:])]
    return words


def signs(dim: int):
    def z(n):
        value = 0x4B56524F54415445 + (n + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return value ^ value >> 31

    return [-1 if z(i // 64) >> i % 64 & 1 else 1 for i in range(dim)]


def transform(x):
    """T x, by its definition."""
    dim = len(x)
    h = dim & -dim
    m = dim // h

    def entry(i, j):
        angle = 2 * math.pi * (i // h) * (j // h) / m
        return (-1)**(i % h & j % h).bit_count() * (math.cos(angle) + math.sin(angle))

    return [sum(entry(i, j) * x[j] for j in range(dim)) for i in range(dim)]


def bfloat16_of(x: float) -> int:
    return (bits := struct.unpack("<I", struct.pack("<f", x))[0]) + 0x7FFF + (bits >> 16 & 1) >> 16


def float_of_bfloat16(code: int) -> float:
    return struct.unpack("<f", struct.pack("<I", code << 16))[0]


def rotated_codes():
    """The golden block, with vectors that cannot be quantized among those of the first V."""
    block = golden_codes("bfloat16", *ROTATED_BLOCK)
    block = [[[[code - (32 << 7) if code >> 7 & 255 >= 32 else code for code in row] for row in kind] for kind in kinds]
             for kinds in block]
    v = block[0][1]
    v[1][12:] = [0] * 12
    v[2][12] = 0x7FC1
    v[3][12:] = [1] * 12
    return block


def rotated_kind(tokens, heads: int, bits: int, exact_tokens: int):
    """The coded kind, and what it decodes to."""
    dim = len(tokens[0]) // heads
    if dim == 0:
        return b"", b""
    vectors = [row[head * dim:(head + 1) * dim] for row in tokens for head in range(heads)]
    words = lloyd_max(dim, bits)
    sign = signs(dim)
    scales, codes, exact, decoded = [], [], [], []
    for index, vector in enumerate(vectors):
        x = [float_of_bfloat16(code) for code in vector]
        norm = math.sqrt(sum(value * value for value in x))
        scale, code, y = 0.0, [0] * dim, [0.0] * dim
        quantized = 2**-14 < norm < 65504
        if quantized:
            u = [c / math.sqrt(dim) for c in transform([s * value / norm for s, value in zip(sign, x)])]
            nearest = [min(range(len(words)), key=lambda w: abs(words[w] - abs(c))) for c in u]
            y = [math.copysign(words[w], c) for w, c in zip(nearest, u)]
            scale = norm * sum(a * b for a, b in zip(y, u)) / sum(a * a for a in y)
            code = [w | (c < 0) << bits - 1 for w, c in zip(nearest, u)]
        scales.append(struct.pack("<e", scale))
        codes.append(code)
        if not quantized and any(vector) or index < exact_tokens * heads:
            exact.append(index)
            decoded.append(vector)
        else:
            stored = struct.unpack("<e", scales[-1])[0] / math.sqrt(dim)
            decoded.append([bfloat16_of(stored * s * c) if stored else 0 for s, c in zip(sign, transform(y))])
    planes = b""
    for at in range(0, len(codes), LANES):
        group = codes[at:at + LANES]
        for i in range(dim):
            for p in range(bits):
                planes += struct.pack("<H", sum((code[i] >> p & 1) << v for v, code in enumerate(group)))
    stored = (struct.pack("<II", bits, len(exact)) + b"".join(scales) + planes + struct.pack(f"<{len(exact)}I", *exact) +
              b"".join(struct.pack("<H", code) for index in exact for code in vectors[index]))
    assert len(stored) < 4 + 2 * len(vectors) * dim, "raw is smaller"
    return stored, b"".join(struct.pack("<H", code) for vector in decoded for code in vector)


def rotated(k_bits: int, v_bits: int):
    """The body of the golden block, the first of its session, and what it decodes to."""
    layers, decoded = [], b""
    for (heads, _, _), (k, v) in zip(ROTATED_BLOCK[0], rotated_codes()):
        (k_stored, k_decoded), (v_stored, v_decoded) = rotated_kind(k, heads, k_bits, 1), rotated_kind(v, heads, v_bits, 1)
        layers.append(k_stored + v_stored)
        decoded += k_decoded + v_decoded
    binding = struct.pack("<II", 0, 0xE3069283) + bytes(16)
    sizes = struct.pack(f"<{len(layers)}I", *map(len, layers))
    return binding + struct.pack("<I", 1) + sizes + b"".join(layers), decoded


def write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        assert path.read_bytes() == content, f"{path} would change"
        return
    path.write_bytes(content)


if __name__ == "__main__":
    write(HERE / "v1" / "rans_symbols.bin", rans_symbols(1000))
    write(HERE / "v1" / "rans_bits.bin", rans_bits(333))
    write(CORPUS / "rans" / "symbols", rans_symbols(200))
    write(CORPUS / "rans" / "bits", rans_bits(100))
    write(CORPUS / "rans" / "nothing", rans_symbols(0))
    for dtype, (number, _, _) in DTYPES.items():
        body = lossless_body(golden_codes(dtype, *LOSSLESS_BLOCK), dtype)
        write(HERE / "v1" / f"lossless_{dtype}.bin", body)
        write(CORPUS / "lossless" / dtype, bytes([number - 1]) + body)
    write(CORPUS / "lossless" / "raw", bytes([2]) + BINDING + struct.pack("<I", 2) + bytes(range(100)))
    for k_bits, v_bits in ((2, 3), (4, 5)):
        body, decoded = rotated(k_bits, v_bits)
        write(HERE / "v1" / f"rotated_{k_bits}{v_bits}.bin", body)
        write(HERE / "v1" / f"rotated_{k_bits}{v_bits}_decoded.bin", decoded)
        write(CORPUS / "rotated" / f"bits_{k_bits}{v_bits}", body)
