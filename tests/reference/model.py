"""What of a model's spec a decoder needs. Its stored form is at the top of storage/kv/model_spec.cc, the order of raw KV
in FORMAT.md: [layer][K, V][token][KV head][dim].
"""

import dataclasses
import hashlib
import struct

from damage import Reader, crc32c, require

K, V = 0, 1
NO_ROPE, HALF_SPLIT, INTERLEAVED = 1, 2, 3


@dataclasses.dataclass
class Spec:
    id: bytes
    codec_key: bytes
    dtype: int
    layers: list  # (KV heads, dim of K, dim of V)
    pairing: int
    theta: float
    rotary_dims: int
    scaling: bytes
    block_tokens: int
    dtype_bytes: int
    layout_tag: bytes = b""

    def components(self, layer: int, kind: int) -> int:
        return self.layers[layer][0] * self.layers[layer][1 + kind]

    def kind_bytes(self, layer: int, kind: int) -> int:
        return self.components(layer, kind) * self.block_tokens * self.dtype_bytes

    def layer_bytes(self) -> list:
        return [self.kind_bytes(layer, K) + self.kind_bytes(layer, V) for layer in range(len(self.layers))]

    def raw_bytes(self) -> int:
        return sum(self.layer_bytes())


def parse(data: bytes) -> Spec:
    require(len(data) > 5 and data[0] == 1, "spec: version")
    require(crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"), "spec: crc32c")
    reader = Reader(data[1:-4], "spec")
    fields = []
    for tag in range(1, 12):
        require(reader.number("B") == tag, "spec: tag")
        fields.append(reader.bytes(reader.number("I")))
    reader.end()
    layers = []
    groups = Reader(fields[4], "spec: kv_groups")
    while groups.left() > 0:
        _, runs = groups.array("I", 2)
        for _ in range(runs):
            count, *shape = groups.array("I", 4)
            layers += [tuple(shape)] * count
    pairing, theta, rotary_dims = struct.unpack("<BdI", fields[5][:13])
    dtype = fields[3][0]
    return Spec(id=hashlib.sha256(data).digest()[:16], codec_key=_codec_key(fields), dtype=dtype, layers=layers,
                pairing=pairing, theta=theta, rotary_dims=rotary_dims, scaling=fields[5][13:],
                block_tokens=int.from_bytes(fields[9], "little"), dtype_bytes=(4, 2, 2, 1, 1, 1, 1)[dtype - 1],
                layout_tag=fields[10])


def _codec_key(fields) -> bytes:
    """Of the same spec with what does not matter to a profile set to one value: model_spec.h, CodecKey."""
    fields = list(fields)
    fields[3], fields[9], fields[10] = b"\x01", struct.pack("<I", 1), b""
    body = b"\x01" + b"".join(struct.pack("<BI", tag, len(value)) + value for tag, value in enumerate(fields, 1))
    return hashlib.sha256(b"kvtrie codec key 1" + body + struct.pack("<I", crc32c(body))).digest()[:16]
