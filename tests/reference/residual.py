"""The residual body, lossy and exact: storage/codec/RESIDUAL.md, with the profile of PROFILE.md. And the referenced
body: REFERENCED.md.
"""

import dataclasses
import hashlib
import math
import struct

import dtypes
import frame as frames
import rans
from damage import Damage, Reader, WrongQuestion, crc32c, require
from dtypes import float32, float32_bits
from model import K, V
from profile import NOT_CODED
from rope import Rope

ENERGY_MAX = (1 << 24) - 1
ROOTS = [float32(x) for x in (1, 1.189207115, 1.414213562, 1.681792831)]  # 2^(b/4)


def clamp(x, low, high):
    return min(max(x, low), high)


@dataclasses.dataclass
class Reference:
    """A block that others are coded against, as it is restored."""
    node: bytes
    first_position: int
    tokens: tuple
    raw: bytes


class Token:
    """What is kept of a token from plane to plane, and its restored rows.

    profile: that codes it, which is the differences' for a token with a reference: (block, index in it).
    """

    def __init__(self, lane: int, token_id: int, profile, reference=None):
        self.lane = lane
        self.profile = profile
        self.reference = reference
        group_count = profile.group_count
        self.id = token_id
        self.exponents = [0] * group_count
        self.shift = 0
        self.seen = self.expected_sum = 0  # of the plane
        self.codes = []  # per plane: what later planes read

    def start_plane(self, profile) -> None:
        self.seen = profile.carried[self.shift + 24]
        self.expected_sum = profile.prior

    def update_shift(self) -> None:
        self.shift = clamp((float32_bits(self.seen) >> 20) - (float32_bits(self.expected_sum) >> 20), -24, 24)


class Body:
    """What stands in front of the symbols."""

    def __init__(self, frame, spec, profile, tokens, sections=None, references=()):
        if frame.profile != profile.id:
            raise WrongQuestion("residual: the frame names another profile")
        if frame.tokens_crc32c != crc32c(struct.pack(f"<{len(tokens)}I", *tokens)):
            raise WrongQuestion("residual: the frame is one of other tokens")
        present = len(frame.section_bytes) if sections is None else sections
        reader = Reader(frame.body[:sum(frame.section_bytes[:present])], "residual")
        head = Reader(reader.data[:frame.section_bytes[0]], "residual: first section")
        head.bytes(24)
        flags, zero = head.array("B", 2)
        exact_count, section_count = head.array("H", 2)
        require(flags <= 1 and zero == 0, "residual: flags")
        require(exact_count <= spec.block_tokens, "residual: exact_count")
        require(section_count == len(frame.section_bytes), "residual: section_count")
        self.layers = head.array("H", section_count)
        require(all(a <= b for a, b in zip(self.layers, self.layers[1:])) and self.layers[-1] == len(spec.layers),
                "residual: layers")
        self.raw_crcs = head.array("I", len(spec.layers)) if frame.codec == frames.LOSSLESS else []
        named, runs = [], []
        if frame.codec == frames.REFERENCED:
            named, runs = parse_references(head, spec.block_tokens)
            require(profile.differences is not None, "referenced: a profile without differences")
        self.exact_tokens = head.array("H", exact_count)
        require(all(a < b for a, b in zip(self.exact_tokens, self.exact_tokens[1:])) and
                all(t < spec.block_tokens for t in self.exact_tokens), "residual: exact_tokens")
        token_bytes = spec.raw_bytes() // spec.block_tokens
        self.exact_rows = [head.bytes(token_bytes) for _ in range(exact_count)]
        self.first_token = flags == 1
        if self.first_token:
            require(frame.codec != frames.LOSSLESS, "residual: first token in an exact frame")
            require(frame.first_position == 0 and profile.first_token is not None and tokens[0] == profile.first_token and
                    0 not in self.exact_tokens, "residual: first token")
        self.references = {}  # token: (block, index in it)
        for first, count, _, _ in runs:
            for t in range(first, first + count):
                require(t not in self.exact_tokens and not (t == 0 and self.first_token), "referenced: token of a run")
        blocks = [find_reference(of, references) for of in named]
        for first, count, reference, offset in runs:
            for i in range(count):
                block = blocks[reference]
                if block.tokens[offset + i] != tokens[first + i]:
                    raise WrongQuestion("referenced: a reference of other tokens")
                self.references[first + i] = block, offset + i
        self.is_whole = present == section_count
        self.layer_count = self.layers[present - 1]
        reader.bytes(head.at)
        self.decoder = rans.Decoder(reader.bytes(reader.left()), "residual: symbols")


def parse_references(reader, block_tokens: int):
    """([(node, digest, first_position)], [(first_token, token_count, reference, offset)])"""
    reference_count, run_count = reader.array("H", 2)
    require(1 <= reference_count <= 16, "referenced: reference_count")
    require(1 <= run_count <= block_tokens, "referenced: run_count")
    named = [(reader.bytes(16), reader.bytes(16), reader.number("I")) for _ in range(reference_count)]
    runs = [tuple(reader.array("H", 4)) for _ in range(run_count)]
    end = 0
    for first, count, reference, offset in runs:
        require(count > 0 and first >= end and reference < reference_count, "referenced: run")
        end = first + count
        require(end <= block_tokens and offset + count <= block_tokens, "referenced: run leaves a block")
    require({run[2] for run in runs} == set(range(reference_count)), "referenced: a reference without a run")
    require(len({node for node, _, _ in named}) == reference_count, "referenced: a node twice")
    return named, runs


def find_reference(named, references):
    node, digest, first_position = named
    block = next((block for block in references if block.node == node), None)
    if block is None:
        raise WrongQuestion(f"referenced: needs block {node.hex()}")
    if block.first_position != first_position or hashlib.sha256(block.raw).digest()[:16] != digest:
        raise WrongQuestion("referenced: a reference at another position or with other KV")
    return block


def reference_row(spec, plane, reference) -> list:
    """K before RoPE, or V."""
    block, index = reference
    kind = V if plane.is_v else K
    row_bytes = spec.kind_bytes(plane.layer, kind) // spec.block_tokens
    begin = sum(spec.layer_bytes()[:plane.layer])
    if kind == V:
        begin += spec.kind_bytes(plane.layer, K)
    row = block.raw[begin + index * row_bytes:begin + (index + 1) * row_bytes]
    values = [dtypes.number(spec.dtype, code) for code in dtypes.read(spec.dtype, row)]
    return Rope(spec, plane.layer, block.first_position + index).turn_back(values) if kind == K else values


def decode(frame, spec, profile, tokens, sections=None, references=()) -> bytes:
    """Raw KV, of the layers that the first `sections` sections hold. Sets `frame.values` to the q of each coded value:
    [plane][token], a list per value. references: of a referenced frame, each a Reference.
    """
    if profile.codec_key != spec.codec_key:
        raise WrongQuestion("residual: a profile of another model")
    check_planes(spec, profile)
    body = Body(frame, spec, profile, tokens, sections, references)
    is_exact = frame.codec == frames.LOSSLESS
    if is_exact and spec.dtype not in (dtypes.FLOAT16, dtypes.BFLOAT16, dtypes.FLOAT8_E4M3, dtypes.FLOAT8_E5M2):
        raise Damage("residual: exact frames of this dtype")
    level = None
    if not is_exact:
        level = next((i for i, l in enumerate(profile.levels) if l.quality == frame.quality), None)
        require(level is not None, "residual: a level that the profile has not")

    coded = []
    for t in range(spec.block_tokens):
        reference = body.references.get(t)
        coded.append(Token(t % rans.LANES, tokens[t], profile.differences if reference else profile, reference))
    for t, token in enumerate(coded):
        if t in body.exact_tokens or t == 0 and body.first_token:
            coded[t] = None
    ways = [profile] if profile.differences is None else [profile, profile.differences]
    groups = [[token for token in coded[first:first + rans.LANES] if token is not None and token.profile is way]
              for first in range(0, spec.block_tokens, rans.LANES) for way in ways]
    frame.values = []
    raw = []
    exact_at = 0
    for index, plane in enumerate(profile.planes):
        if plane.layer >= body.layer_count:
            break
        kind = V if plane.is_v else K
        ropes = [Rope(spec, plane.layer, frame.first_position + t) for t in range(spec.block_tokens)]
        for token in coded:
            if token is not None:
                token.rope = ropes[coded.index(token)] if kind == K else None
                token.p = predict(token.profile, index, token)
                token.q = []
        for group in groups:
            if not group:
                continue
            of = group[0].profile
            of_plane = of.planes[index]
            for token in group:
                token.start_plane(of)
            if is_exact:
                decode_numbers(body.decoder, of, of_plane, group, spec.dtype)
            else:
                decode_exponents(body.decoder, of, of_plane, group)
                decode_rows(body.decoder, of, of_plane, group, level)
            for token in group:
                token.update_shift()
                token.codes.append(codes_of(of_plane, token.x))
        frame.values.append([token.q if token is not None else None for token in coded])

        row_bytes = spec.kind_bytes(plane.layer, kind) // spec.block_tokens
        for t, token in enumerate(coded):
            if t in body.exact_tokens:
                raw.append(body.exact_rows[body.exact_tokens.index(t)][exact_at:exact_at + row_bytes])
            elif token is not None and is_exact:
                raw.append(dtypes.write(spec.dtype, token.numbers))
            else:
                x = token.x if token is not None else profile.first_rows[index]
                if token is not None and token.reference:
                    x = [float32(r + d) for r, d in zip(reference_row(spec, plane, token.reference), x)]
                if kind == K:
                    x = ropes[t].turn(x)
                raw.append(dtypes.write(spec.dtype, [dtypes.code(spec.dtype, value) for value in x]))
        exact_at += row_bytes
        if is_exact and (index + 1 == len(profile.planes) or profile.planes[index + 1].layer != plane.layer):
            of_layer = b"".join(raw)[-spec.layer_bytes()[plane.layer]:]
            require(crc32c(of_layer) == body.raw_crcs[plane.layer], "residual: raw_crcs")
    if body.is_whole:
        body.decoder.end()
    return b"".join(raw)


def check_planes(spec, profile) -> None:
    planes = [(layer, kind == V, heads, dims[kind]) for layer, (heads, *dims) in enumerate(spec.layers) for kind in (K, V)
              if dims[kind] > 0]
    if planes != [(plane.layer, plane.is_v, plane.heads, plane.head_dim) for plane in profile.planes]:
        raise WrongQuestion("residual: a profile with other planes than the model")


def block_of(plane, c: int):
    size = plane.components // plane.block_count
    return c // size, size


def predict(profile, index: int, token) -> list:
    plane = profile.planes[index]
    p = []
    table_row = None
    if plane.layer == 0 and token.id in profile.table_rows:
        before = sum(profile.planes[i].components for i in range(index))
        table_row = profile.table_rows[token.id][before:before + plane.components]
    for c in range(plane.components):
        block, _ = block_of(plane, c)
        value = plane.bias[c]
        if plane.weights[c]:
            codes = []
            for i in plane.input_planes:
                size = profile.planes[i].components // plane.block_count
                codes += token.codes[i][block * size:(block + 1) * size]
            weights, scale = plane.weights[c], plane.weight_scales[c]
            offset = float32(value - float32(scale * float32(128 * sum(weights))))
            value = float32(offset + float32(scale * float32(sum(w * u for w, u in zip(weights, codes)))))
        if table_row is not None:
            value = float32(value + float32(plane.input_scales[c] * table_row[c]))
        p.append(value)
    return p


def codes_of(plane, x) -> list:
    codes = []
    for value, bias, scale in zip(x, plane.bias, plane.input_scales):
        scaled = float32(float32(value - bias) * float32(1 / scale))
        scaled = -127.0 if math.isnan(scaled) else clamp(scaled, -127.0, 127.0)
        codes.append(round(float32(scaled + 128)))
    return codes


def decode_exponents(decoder, profile, plane, group) -> None:
    for j in range(profile.group_count):
        table = profile.exponent_tables[plane.exponent_table]
        symbols = decoder.symbols({token.lane: table for token in group})
        for token in group:
            token.exponents[j] = clamp(token.exponents[j] + symbols[token.lane] - 16, -8, 8)


def decode_value(decoder, profile, group, indexes) -> dict:
    """One value of each token of the group, given its scale index: q, number of low bits and class, by lane."""
    contexts = {}
    for token in group:
        token.update_shift()
        a = clamp(indexes[token.lane] + token.shift, 0, 159) // 2
        low = 0 if a < 48 else (a - 48) // 4 + 1
        contexts[token.lane] = low, a - 4 * low
    symbols = decoder.symbols({lane: profile.class_tables[cls] for lane, (_, cls) in contexts.items()})
    low_bits = decoder.bits({lane: low for lane, (low, _) in contexts.items() if symbols[lane] < 127 and low > 0})
    escaped = [lane for lane, symbol in symbols.items() if symbol == 127]
    negative = decoder.bits({lane: 1 for lane in escaped})
    middle = decoder.bits({lane: 12 for lane in escaped})
    high = decoder.bits({lane: 12 for lane in escaped})
    result = {}
    for token in group:
        lane = token.lane
        low, cls = contexts[lane]
        if lane in negative:
            q = 4096 * high[lane] + middle[lane]
            q = -q if negative[lane] else q
        else:
            q = ((symbols[lane] - 63) << low) + low_bits.get(lane, 0)
        token.seen = min(token.seen + 16 * min(abs(q), 255), ENERGY_MAX)
        token.expected_sum = min(token.expected_sum + profile.expected[indexes[lane]], ENERGY_MAX)
        token.q.append(q)
        result[lane] = q, low, cls
    return result


def decode_rows(decoder, profile, plane, group, level: int) -> None:
    """Sets x of each token of the group."""
    scales = plane.scales[level]
    step = profile.levels[level].step
    for token in group:
        token.x = list(token.p)
    for v in range(plane.components):
        if scales[v] == NOT_CODED:
            continue
        block, size = block_of(plane, v)
        exponents = {}
        for token in group:
            exponents[token.lane] = token.exponents[block if len(token.exponents) > 1 else 0] if token.exponents else 0
        indexes = {lane: clamp(scales[v] + 2 * e, 0, 159) for lane, e in exponents.items()}
        decoded = decode_value(decoder, profile, group, indexes)
        for token in group:
            y = restored(profile, *decoded[token.lane], exponents[token.lane], step)
            if y == 0:
                continue
            for c in range(size):
                product = float32(y * float32(plane.basis_scales[v] * plane.basis[v][c]))
                token.x[block * size + c] = float32(token.x[block * size + c] + product)


def restored(profile, q: int, low: int, cls: int, e: int, step: float) -> float:
    if q == 0:
        return 0.0
    r = float(abs(q))
    if low == 0:
        r = float32(r + profile.offsets[3 * cls + min(abs(q), 3) - 1])
    factor = math.ldexp(ROOTS[-e % 4], -e // 4)
    y = float32(float32(r * factor) * step)
    return -y if q < 0 else y


def decode_numbers(decoder, profile, plane, group, dtype: int) -> None:
    """Sets `numbers` of each token of the group, the codes of its raw row, and x, their values before RoPE."""
    bits = dtypes.MANTISSA_BITS[dtype]
    bias = dtypes.bias(dtype)
    sign_bit = 8 * dtypes.BYTES[dtype] - 1
    for token in group:
        token.numbers = []
        token.turned_p = token.rope.turn(token.p) if token.rope else token.p
    for c in range(plane.components):
        d0 = clamp(plane.cell_exponents[c], 1 - bias, bias - 1)
        cells, indexes = {}, {}
        for token in group:
            p = token.turned_p[c]
            d = max(d0, (float32_bits(p) >> 23 & 255) - 127 - bits)
            near = math.floor(clamp(float32(math.ldexp(p, -d)), -2.0**22, 2.0**22))
            cells[token.lane] = d, near
            indexes[token.lane] = clamp(plane.cell_scales[c] - 8 * (d - d0), 0, 159)
        decoded = decode_value(decoder, profile, group, indexes)
        sizes, signs = {}, {}
        for token in group:
            cell = cells[token.lane][1] + decoded[token.lane][0]
            signs[token.lane] = int(cell < 0)
            sizes[token.lane] = -1 - cell if cell < 0 else cell
            require(sizes[token.lane] <= ENERGY_MAX, "residual: cell")
        octaves = {lane: n.bit_length() - 1 for lane, n in sizes.items()}  # -1 for n = 0
        counts = {lane: max(bits - k, 0) if k >= 0 else bits for lane, k in octaves.items()}
        rest = decoder.bits({lane: count for lane, count in counts.items() if count > 0})
        below = decoder.bits({lane: 3 for lane, n in sizes.items() if n == 0})
        below |= decoder.bits({lane: 8 for lane, g in below.items() if g == 7})
        for token in group:
            lane = token.lane
            first_field = max(cells[lane][0] + bias, 1)
            n, k, r = sizes[lane], octaves[lane], rest.get(lane, 0)
            if n > 0:
                field = first_field + k
                mantissa = (n - (1 << k) << bits - k) + r if k <= bits else n - (1 << k) >> k - bits
            else:
                field = max(first_field - 1 - below[lane], 0)
                mantissa = r
            number = field << bits | mantissa
            require(number <= dtypes.LARGEST[dtype], "residual: a number out of range")
            token.numbers.append(signs[lane] << sign_bit | number)
    for token in group:
        values = [dtypes.number(dtype, number) for number in token.numbers]
        token.x = token.rope.turn_back(values) if token.rope else values
