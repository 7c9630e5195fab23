"""The lossless body without a profile: storage/codec/LOSSLESS.md."""

import fractions

import dtypes
import rans
from damage import Reader, require
from model import K, V

LANES = rans.LANES
EXPONENT_BITS = (None, 8, 5, 8, 4, 5, 4, 4)  # where class is 0; by dtype
MEAN_MAX = 4080


def decode(frame, spec) -> bytes:
    reader = Reader(frame.body, "lossless")
    reader.bytes(24)
    mode = reader.number("I")
    if mode == 2:
        raw = reader.bytes(spec.raw_bytes())
        reader.end()
        return raw
    require(mode == 1, "lossless: mode")
    tables = [_tables(reader.bytes(104)) for _ in (K, V)]
    words = reader.array("I", len(spec.layers))
    raw = b""
    for layer, (word, raw_bytes) in enumerate(zip(words, spec.layer_bytes())):
        data = reader.bytes(word & 0x7FFFFFFF)
        if word >> 31:
            require(len(data) == raw_bytes, "lossless: size of a raw layer")
            raw += data
        else:
            require(len(data) < raw_bytes, "lossless: a packed layer is not smaller than its raw KV")
            raw += _decode_layer(data, spec, layer, tables)
    reader.end()
    return raw


def frequencies_of(counts) -> list:
    total = sum(counts)
    f = [max(4096 * count // total, 1 if count else 0) for count in counts]
    while sum(f) < 4096:
        best = max(range(len(counts)), key=lambda i: (fractions.Fraction(counts[i], 2 * f[i] + 1), -i))
        f[best] += 1
    while sum(f) > 4096:
        best = min((i for i in range(len(counts)) if f[i] > 1),
                   key=lambda i: (fractions.Fraction(counts[i], 2 * f[i] - 1), i))
        f[best] -= 1
    return f


def _tables(data: bytes) -> list:
    """The 16 tables of a kind; None where no weight is set."""
    packed = int.from_bytes(data[:96], "little")
    changes = data[96:]
    require(all(changes), "lossless: a change of sign of probability 0")
    tables = []
    for table in range(16):
        counts = []
        for cls in range(16):
            w = packed >> 6 * (table % 8 * 16 + cls) & 63
            weight = (16, 19, 23, 27)[(w - 1) % 4] << (w - 1) // 4 if w else 0
            counts += [weight * (256 - changes[table // 2]), weight * changes[table // 2]]
        tables.append(rans.Table(frequencies_of(counts)) if any(counts) else None)
    return tables


def _decode_layer(data: bytes, spec, layer: int, tables) -> bytes:
    reader = Reader(data, "lossless: layer")
    means = reader.array("H", 2)
    planes = reader.array("I", 2)
    decoder = rans.Decoder(reader.bytes(reader.number("I")), "lossless: rANS")
    require(max(means) <= MEAN_MAX, "lossless: mean")
    parts = [_decode_symbols(decoder, spec, layer, kind, means[kind], tables[kind]) for kind in (K, V)]
    decoder.end()
    raw = b""
    for kind in (K, V):
        raw += _join(reader, spec, layer, kind, planes[kind], parts[kind])
    reader.end()
    return raw


def _decode_symbols(decoder, spec, layer, kind, first_mean, tables) -> list:
    """Per token and channel: sign, exponent, and the mantissa of an integer."""
    is_integer = spec.dtype in dtypes.INTEGER_RANGE
    channels = spec.components(layer, kind)
    exponent_max = 8 if is_integer else (1 << EXPONENT_BITS[spec.dtype]) - 1
    mean, spread = [first_mean] * channels, [16] * channels
    last, same = [0] * channels, [0] * channels
    rows = []
    for t in range(spec.block_tokens):
        row = []
        for first in range(0, channels, LANES):
            lanes = range(min(LANES, channels - first))
            base, chosen = {}, {}
            for lane in lanes:
                c = first + lane
                half = mean[c] + 4 >> 3
                base[lane] = half >> 1
                table = (half & 1) + 2 * sum(bound <= spread[c] for bound in (8, 14, 22)) + 8 * (same[c] == 2)
                require(tables[table] is not None, "lossless: a table without weights is used")
                chosen[lane] = tables[table]
            symbols = decoder.symbols(chosen)
            exponents = {lane: base[lane] + (symbols[lane] >> 1) - 11 for lane in lanes}
            exponents |= decoder.bits({lane: EXPONENT_BITS[spec.dtype] for lane in lanes if symbols[lane] < 2})
            require(all(0 <= e <= exponent_max for e in exponents.values()), "lossless: exponent")
            mantissas = decoder.bits({lane: max(exponents[lane] - 1, 0) for lane in lanes}) if is_integer else {}
            for lane in lanes:
                c = first + lane
                sign = symbols[lane] & 1 ^ last[c]
                row.append((sign, exponents[lane], mantissas.get(lane, 0)))
                difference = 16 * exponents[lane] - mean[c]
                mean[c] += difference * (256 // min(t + 3, 16)) >> 8
                spread[c] += (abs(difference) - spread[c]) * (256 // min(t + 2, 16)) >> 8
                same[c] = min(same[c] + 1, 2) if sign == last[c] else 0
                last[c] = sign
        rows.append(row)
    return rows


def _join(reader, spec, layer, kind, planes, rows) -> bytes:
    """Raw bytes of one kind: signs and exponents of `rows`, mantissas of the planes that `reader` is at."""
    channels = spec.components(layer, kind)
    if spec.dtype in dtypes.INTEGER_RANGE:
        require(planes == 0, "lossless: planes of integers")
        codes = []
        for sign, exponent, mantissa in (value for row in rows for value in row):
            value = (1 << exponent - 1 | mantissa) if exponent else 0
            value = -value if sign else value
            require(-128 <= value <= 127, "lossless: integer")
            codes.append(value + 128 if spec.dtype == dtypes.UINT8 else value & 0xFF)
        return dtypes.write(spec.dtype, codes)
    bits = dtypes.MANTISSA_BITS[spec.dtype]
    require(planes >> bits == 0, "lossless: planes")
    codes = []
    for row in rows:
        for first in range(0, channels, LANES):
            lanes = min(LANES, channels - first)
            mantissas = [0] * lanes
            for b in range(bits):
                if planes >> b & 1:
                    word = reader.number("H")
                    require(word >> lanes == 0, "lossless: bits of lanes without a channel")
                    for lane in range(lanes):
                        mantissas[lane] |= (word >> lane & 1) << b
            for lane, mantissa in enumerate(mantissas):
                sign, exponent, _ = row[first + lane]
                codes.append(sign << 8 * dtypes.BYTES[spec.dtype] - 1 | exponent << bits | mantissa)
    return dtypes.write(spec.dtype, codes)
