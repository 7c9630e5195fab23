"""Profiles: their head (storage/codec/FORMAT.md) and their body (PROFILE.md)."""

import dataclasses
import hashlib
import math

import rans
from damage import Damage, NewerFormat, Reader, crc32c, require

QUALITIES = (1, 2, 4)
MEAN_KL_MAX = {1: 0.01, 2: 0.001, 4: 0.05}
NOT_CODED = 255
LAYER_BELOW, TWO_BELOW, LAYER_0, SAME_K = 1, 2, 3, 4


@dataclasses.dataclass
class Plane:
    """What a plane is, and how it is predicted and coded. Fields as in PROFILE.md."""
    layer: int
    is_v: bool
    heads: int
    head_dim: int
    block_count: int = 0
    input_planes: list = dataclasses.field(default_factory=list)  # indexes, in the order of `inputs`
    bias: list = None
    input_scales: list = None
    weights: list = None  # of component c: of the inputs' components of its block
    weight_scales: list = None
    basis: list = None  # of value v: of the components of its block
    basis_scales: list = None
    cell_exponents: list = None
    cell_scales: list = None
    exponent_table: int = 0
    scales: list = None  # per level

    @property
    def components(self) -> int:
        return self.heads * self.head_dim


@dataclasses.dataclass
class Level:
    quality: int
    step: float


@dataclasses.dataclass
class Profile:
    id: bytes
    codec_key: bytes
    planes: list
    group_count: int
    levels: list
    class_tables: list
    exponent_tables: list
    expected: list
    offsets: list
    carried: list
    prior: int
    table_rows: dict  # token: codes of K, then V, of layer 0
    first_token: int | None
    first_rows: list  # per plane
    query_heads: int
    differences: "Profile | None" = None


def parse(data: bytes) -> Profile:
    require(1024 <= len(data) <= 256 << 20, "profile: size")
    reader = Reader(data, "profile head")
    require(reader.bytes(4) == b"KVP1", "profile: magic")
    version, header_bytes = reader.array("H", 2)
    require(version != 0, "profile: version 0")
    if version > 1:
        raise NewerFormat(f"profile: version {version}")
    codec_key = reader.bytes(16)
    body_bytes = reader.number("Q")
    level_count = reader.number("I")
    require(1 <= level_count <= 8 and header_bytes == 44 + 16 * level_count, "profile: level_count")
    qualities = []
    measured = []
    for _ in range(level_count):
        qualities.append(reader.number("B"))
        require(reader.bytes(3) == bytes(3), "profile: padding of a level")
        measured.append(reader.array("f", 3))
    body_crc = reader.number("I")
    require(reader.number("I") == crc32c(data[:header_bytes - 4]), "profile: header_crc32c")
    require(any(codec_key), "profile: no codec_key")
    require(len(set(qualities)) == level_count, "profile: two levels of a quality")
    for quality, (bits, mean_kl, kl_p99) in zip(qualities, measured):
        require(quality in QUALITIES, "profile: quality")
        require(0 < bits <= 32, "profile: bits per component")
        require(0 <= mean_kl <= MEAN_KL_MAX[quality], "profile: mean KL")
        require(math.isfinite(kl_p99) and kl_p99 >= 0, "profile: 99th percentile of KL")
    require(reader.left() == body_bytes, "profile: body_bytes")
    body = data[header_bytes:]
    require(crc32c(body) == body_crc, "profile: body_crc32c")
    profile = _parse_body(Reader(body, "profile body"))
    profile.id = hashlib.sha256(data).digest()[:16]
    profile.codec_key = codec_key
    require([level.quality for level in profile.levels] == qualities, "profile: levels of head and body")
    return profile


def _floats(reader, count: int) -> list:
    values = reader.array("f", count)
    require(all(map(math.isfinite, values)), "profile: a number is not finite")
    return values


def _tables(reader, count: int, symbols: int) -> list:
    tables = []
    for _ in range(count):
        frequencies = reader.array("H", symbols)
        require(sum(frequencies) == 4096, "profile: frequencies do not sum up to 4096")
        tables.append(rans.Table(frequencies))
    return tables


def _parse_body(reader, whole=None) -> Profile:
    """whole: what was read of the profile that these are the differences of."""
    plane_count = reader.number("I")
    require(1 <= plane_count <= 2048, "profile: plane_count")
    planes = []
    for _ in range(plane_count):
        layer, is_v = reader.number("I"), reader.number("B")
        heads, head_dim = reader.array("I", 2)
        require(is_v <= 1 and layer < 1024 and 1 <= heads <= 1024 and 1 <= head_dim <= 4096 and heads * head_dim <= 65536,
                "profile: plane")
        before = planes[-1] if planes else None
        if is_v:
            require(before is not None and not before.is_v and before.layer == layer and before.heads == heads,
                    "profile: V without its K")
        else:
            require(layer == (before.layer + 1 if before else 0), "profile: layers in order")
        planes.append(Plane(layer, bool(is_v), heads, head_dim))
    require(sum(plane.components for plane in planes) <= 64 << 20, "profile: components")
    group_count = reader.number("I")
    require(group_count <= 64, "profile: group_count")
    level_count = reader.number("I")
    require(1 <= level_count <= 8, "profile: level_count")
    levels = []
    for _ in range(level_count):
        quality = reader.number("B")
        step, _, _ = _floats(reader, 3)
        require(quality in QUALITIES and step > 0, "profile: level")
        levels.append(Level(quality, step))
    class_tables = _tables(reader, 48, 128)
    exponent_table_count = reader.number("I")
    require(exponent_table_count <= 208, "profile: exponent_table_count")
    exponent_tables = _tables(reader, exponent_table_count, 33)
    expected = reader.array("H", 160)
    offsets = _floats(reader, 48 * 3)
    carried = reader.array("H", 49)
    prior = reader.number("H")
    require(min(carried) >= 1 and prior >= 1, "profile: carried or prior is 0")

    for index, plane in enumerate(planes):
        _parse_plane(reader, planes, index, level_count)
        require(group_count in (0, 1, plane.block_count), "profile: group_count")
        require(group_count == 0 or plane.exponent_table < exponent_table_count, "profile: exponent_table")

    table_count = reader.number("I")
    require(table_count <= 1 << 20, "profile: table_count")
    tokens = reader.array("I", table_count)
    require(all(a < b for a, b in zip(tokens, tokens[1:])), "profile: table_tokens")
    width = sum(plane.components for plane in planes if plane.layer == 0)
    table_rows = {token: reader.array("b", width) for token in tokens}

    has_first_token = reader.number("B")
    require(has_first_token <= 1, "profile: has_first_token")
    first_token = reader.number("I")
    first_rows = [_floats(reader, plane.components) for plane in planes] if has_first_token else []

    query_heads, rank = reader.array("I", 2)
    require(query_heads <= 1024 and all(query_heads % plane.heads == 0 for plane in planes), "profile: query_heads")
    k_dims = [plane.head_dim for plane in planes if not plane.is_v]
    require(all(rank <= dim for dim in k_dims), "profile: covariance_rank")
    heads_max = max(plane.heads for plane in planes)
    if query_heads > 0:
        _floats(reader, query_heads * sum(k_dims))
        _floats(reader, query_heads * rank * sum(k_dims))
        _floats(reader, len(k_dims) * 5 * query_heads)
        _floats(reader, plane_count * group_count * (22 * (1 + heads_max) + 3))
    profile = Profile(b"", b"", planes, group_count, levels, class_tables, exponent_tables, expected, offsets, carried,
                      prior, table_rows, first_token if has_first_token else None, first_rows, query_heads)
    if whole is not None:
        require([_shape(plane) for plane in planes] == [_shape(plane) for plane in whole.planes], "differences: planes")
        require([level.quality for level in levels] == [level.quality for level in whole.levels], "differences: levels")
        require(group_count in (0, whole.group_count), "differences: group_count")
        require(table_count == 0 and has_first_token == 0 and query_heads == 0, "differences: parts that they have not")
    elif reader.left() > 0:
        require(reader.number("B") == 1, "profile: has_differences")
        profile.differences = _parse_body(reader, profile)
    reader.end()
    return profile


def _shape(plane) -> tuple:
    return plane.layer, plane.is_v, plane.heads, plane.head_dim


def _parse_plane(reader, planes, index, level_count) -> None:
    plane = planes[index]
    c = plane.components
    plane.block_count = reader.number("I")
    require(plane.block_count in (1, plane.heads), "profile: block_count")
    size = c // plane.block_count
    input_count = reader.number("I")
    require(input_count <= 8, "profile: input_count")
    inputs = reader.array("B", input_count)
    plane.input_planes = [i for code in inputs for i in _planes_of_input(planes, index, code)]
    require(all(planes[i].components % plane.block_count == 0 for i in plane.input_planes), "profile: blocks of an input")
    m = sum(planes[i].components // plane.block_count for i in plane.input_planes)
    require(m * plane.block_count <= 131072, "profile: components of inputs")
    plane.bias = _floats(reader, c)
    plane.input_scales = _floats(reader, c)
    require(all(scale > 0 for scale in plane.input_scales), "profile: input_scales")
    plane.weights = [reader.array("b", m) for _ in range(c)]
    require(all(-63 <= w <= 63 for row in plane.weights for w in row), "profile: weights")
    plane.weight_scales = _floats(reader, c)
    plane.basis = [reader.array("b", size) for _ in range(c)]
    plane.basis_scales = _floats(reader, c)
    require(all(scale > 0 for scale in plane.basis_scales), "profile: basis_scales")
    plane.cell_exponents = reader.array("b", c)
    plane.cell_scales = reader.array("B", c)
    require(all(scale <= 159 for scale in plane.cell_scales), "profile: cell_scales")
    plane.exponent_table = reader.number("I")
    require(reader.number("I") == level_count, "profile: level_count of a plane")
    plane.scales = [reader.array("B", c) for _ in range(level_count)]
    require(all(s <= 159 or s == NOT_CODED for scales in plane.scales for s in scales), "profile: scales")


def _planes_of_input(planes, index, code) -> list:
    plane = planes[index]
    layer = {LAYER_BELOW: plane.layer - 1, TWO_BELOW: plane.layer - 2, LAYER_0: 0, SAME_K: plane.layer}.get(code)
    if layer is None:
        raise Damage("profile: input")
    if code == LAYER_0 and plane.layer == 0:
        return []
    if code == SAME_K:
        return [index - 1] if plane.is_v else []
    return [i for i in range(index) if planes[i].layer == layer]
