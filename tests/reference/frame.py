"""Frames and their binding: storage/codec/FORMAT.md."""

import dataclasses
import struct

from damage import NewerFormat, Reader, crc32c, require

RAW, LOSSLESS, RESIDUAL, ROTATED, REFERENCED = 1, 2, 3, 4, 5
CODED, EXACT = 2, 3  # rungs
HIGH, NEAR_EXACT, EXACT_QUALITY, SMALL, UNRATED = 1, 2, 3, 4, 5
RUNG_AND_QUALITIES = {RAW: (EXACT, {EXACT_QUALITY}), LOSSLESS: (EXACT, {EXACT_QUALITY}),
                      RESIDUAL: (CODED, {HIGH, NEAR_EXACT, SMALL}), ROTATED: (CODED, {UNRATED}),
                      REFERENCED: (CODED, {HIGH, NEAR_EXACT, SMALL})}
BYTES_MAX = 64 << 20
SECTION_BYTES_MAX = 1 << 20
NO_PROFILE = bytes(16)


@dataclasses.dataclass
class Frame:
    codec: int
    quality: int
    model: bytes
    raw_bytes: int
    section_bytes: list
    body: bytes
    # The binding; None in raw frames.
    first_position: int | None = None
    tokens_crc32c: int | None = None
    profile: bytes | None = None


def parse(data: bytes) -> Frame:
    """A whole frame; all that FORMAT.md tells a reader to check, in its order."""
    reader = Reader(data, "frame")
    require(reader.bytes(4) == b"KVF1", "frame: magic")
    version = reader.number("H")
    require(version != 0, "frame: version 0")
    if version > 1:
        raise NewerFormat(f"frame: version {version}")
    codec, rung, quality, reserved, section_count, header_bytes, reserved_2 = struct.unpack("<HBBHIII", reader.bytes(18))
    require(1 <= section_count <= 8184, "frame: section_count")
    used = 60 + 8 * section_count
    require(header_bytes == -(-used // 64) * 64 and header_bytes <= len(data), "frame: header_bytes")
    raw_bytes, body_bytes = reader.array("Q", 2)
    model = reader.bytes(16)
    sections = [tuple(reader.array("I", 2)) for _ in range(section_count)]
    require(reader.number("I") == crc32c(data[:used - 4]), "frame: header_crc32c")
    require(not any(reader.bytes(header_bytes - used)), "frame: padding")
    require(reserved == 0 and reserved_2 == 0, "frame: reserved fields")
    require(codec != 0, "frame: codec 0")
    if codec not in RUNG_AND_QUALITIES:
        raise NewerFormat(f"frame: codec {codec}")
    require(rung == RUNG_AND_QUALITIES[codec][0] and quality in RUNG_AND_QUALITIES[codec][1], "frame: rung or quality")
    require(any(model), "frame: no model")
    require(1 <= raw_bytes <= BYTES_MAX and 1 <= body_bytes <= BYTES_MAX, "frame: raw_bytes or body_bytes")
    require(all(1 <= size <= SECTION_BYTES_MAX for size, _ in sections), "frame: section bytes")
    require(sum(size for size, _ in sections) == body_bytes, "frame: sections are not the body")
    if codec == RAW:
        require(raw_bytes == body_bytes, "frame: raw_bytes of a raw frame")
    else:
        require(body_bytes > 24, "frame: body without a binding")
    require(reader.left() == body_bytes, "frame: bytes behind or missing")
    body = data[header_bytes:]
    frame = Frame(codec, quality, model, raw_bytes, [size for size, _ in sections], body)
    if codec != RAW:
        frame.first_position, frame.tokens_crc32c = struct.unpack("<II", body[:8])
        frame.profile = body[8:24]
        if codec in (RESIDUAL, REFERENCED):
            require(frame.profile != NO_PROFILE, "frame: residual without a profile")
        if codec == ROTATED:
            require(frame.profile == NO_PROFILE, "frame: rotated with a profile")
    at = 0
    for index, (size, crc) in enumerate(sections):
        require(crc32c(body[at:at + size]) == crc, f"frame: crc32c of section {index}")
        at += size
    return frame


def raw_section_bytes(layer_bytes) -> list:
    """How a raw frame is cut, given the bytes of each layer."""
    sizes = []
    for left in layer_bytes:
        while left > 0:
            sizes.append(min(left, SECTION_BYTES_MAX))
            left -= sizes[-1]
    return sizes
