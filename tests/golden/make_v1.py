"""Writes tests/golden/v1, v2 and corrupt, from the descriptions of the formats alone:
storage/codec/FORMAT.md and the comments at the top of model_spec.cc and node_row.cc. It shares no code with
the C++ writers, so that the two settle what the text means. Files that are released are not written anew.
"""

import hashlib
import hmac
import pathlib
import struct

from crc32c import crc32c

HERE = pathlib.Path(__file__).parent


assert crc32c(b"123456789") == 0xE3069283


def seal(body: bytes, version: int = 1) -> bytes:
    sealed = bytes([version]) + body
    return sealed + struct.pack("<I", crc32c(sealed))


def field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def model_spec(name, revision, tokenizer, dtype, groups, rope, rank, size, adapter, block_tokens, layout_tag):
    kv_groups = b"".join(
        struct.pack("<II", window, len(runs)) + b"".join(struct.pack("<IIII", *run) for run in runs)
        for window, runs in groups)
    pairing, theta, rotary_dims, scaling = rope
    return seal(
        field(1, name) + field(2, revision) + field(3, tokenizer) + field(4, bytes([dtype])) + field(5, kv_groups) +
        field(6, struct.pack("<BdI", pairing, theta, rotary_dims) + scaling) + field(7, u32(rank)) +
        field(8, u32(size)) + field(9, adapter) + field(10, u32(block_tokens)) + field(11, layout_tag))


def model_id(spec: bytes) -> bytes:
    return hashlib.sha256(spec).digest()[:16]


def codec_key(*fields):
    name, revision, tokenizer, _, groups, rope, rank, size, adapter, _, _ = fields
    spec = model_spec(name, revision, tokenizer, 1, groups, rope, rank, size, adapter, 1, b"")
    return hashlib.sha256(b"kvtrie codec key 1" + spec).digest()[:16]


# A plain model, and one that uses every field: sliding windows, MLA, an adapter, half of two ranks.
PLAIN_FIELDS = (b"smollm2-135m", b"main", b"\x01\x02\x03", 3, [(0, [(30, 3, 64, 64)])],
                (2, 10000.0, 0, b""), 0, 1, b"", 16, b"")
RICH_FIELDS = (b"rich", b"r2", bytes(range(32)), 2,
               [(0, [(2, 1, 576, 0)]), (4096, [(3, 8, 128, 128), (1, 4, 64, 32)])],
               (3, 500000.0, 64, b"yarn:factor=4"), 1, 2, b"lora-7@3", 32, b"paged-v2")
PLAIN = model_spec(*PLAIN_FIELDS)
RICH = model_spec(*RICH_FIELDS)

MODEL = bytes(range(0x10, 0x20))
PARENT = bytes(range(0x30, 0x40))
NODE = bytes(range(0x50, 0x60))


def node_row(provenance, priority, depth, parent, path_hash, surprisal, created, expires, salt, extra_key, tokens, rungs,
             version=1):
    return seal(
        struct.pack("<BBBI", provenance, priority, len(rungs), depth) + MODEL + parent +
        struct.pack("<QfqqHHH", path_hash, surprisal, created, expires, len(salt), len(extra_key), len(tokens)) +
        salt + extra_key + struct.pack(f"<{len(tokens)}I", *tokens) +
        b"".join(struct.pack("<BBIII", *rung[:5]) + (struct.pack("<H", rung[5]) + rung[6] if version == 2 else b"")
                 for rung in rungs), version)


FIRST = node_row(1, 0, 1, bytes(16), 0x0123456789ABCDEF, 12.5, 1700000000, 0, b"salt", b"", range(16), [])
DEEP_FIELDS = (2, 15, 7, PARENT, 1, 0.0, 1700000001, 1800000000, b"", b"image digest", [0, 1, 0xFFFFFFFF])
DEEP = node_row(*DEEP_FIELDS, [(2, 2, 9, 8, 7), (3, 3, 0xFFFFFFFF, 0, 1)])
# The same row as it is written now: places count units of 512 bytes, not pages of 4096.
DEEP_IN_UNITS = node_row(*DEEP_FIELDS, [(2, 2, 9, 64, 7, 3, bytes(16)), (3, 3, 0xFFFFFFFF, 0, 1, 1, bytes(16))],
                         version=2)


PROFILE = bytes(range(0x70, 0x80))
# Version 2: rungs with a codec and a profile, and places in units.
CODED = node_row(1, 3, 2, PARENT, 0xFEDCBA9876543210, 0.5, 1700000002, 0, b"", b"", [7, 8, 9],
                 [(2, 4, 3, 2, 1, 3, PROFILE), (3, 3, 6, 5, 4, 2, bytes(16))], version=2)


def node_descriptor(row):
    return seal(struct.pack("<I", 1) + NODE + bytes([3, 3]) + row)


def coded_descriptor(row, codec=3, profile=PROFILE):
    return seal(struct.pack("<I", 1) + NODE + bytes([2, 1]) + struct.pack("<H", codec) + profile + row, 2)


def profile(key, levels, body):
    head = b"KVP1" + struct.pack("<HH", 1, 44 + 16 * len(levels)) + key + struct.pack("<QI", len(body), len(levels))
    head += b"".join(struct.pack("<B3xfff", *level) for level in levels) + u32(crc32c(body))
    return head + u32(crc32c(head)) + body


PROFILE_FILE = profile(bytes(range(0xA0, 0xB0)),
                       [(2, 3.5, 2.0**-10, 2.0**-7), (1, 2.25, 2.0**-7, 2.0**-4), (4, 1.5, 2.0**-5, 0.5)],
                       bytes(i * 3 & 0xFF for i in range(1024 - 44 - 48)))


def frame(model, sections, codec=1, rung=3, quality=3, version=1, raw_bytes=None, body_bytes=None, header_bytes=None,
          section_count=None, reserved1=0, reserved2=0, padding=0, crc_flip=0):
    body = b"".join(sections)
    used = 60 + 8 * len(sections)
    total = -(-used // 64) * 64
    head = b"KVF1" + struct.pack(
        "<HHBBHIIIQQ", version, codec, rung, quality, reserved1,
        len(sections) if section_count is None else section_count,
        total if header_bytes is None else header_bytes, reserved2,
        len(body) if raw_bytes is None else raw_bytes,
        len(body) if body_bytes is None else body_bytes) + model
    head += b"".join(struct.pack("<II", len(section), crc32c(section)) for section in sections)
    head += u32(crc32c(head) ^ crc_flip)
    return head + bytes([padding]) * (total - used) + body


# Two layers of 96 and 32 bytes.
SECTIONS = [bytes(i * 7 & 0xFF for i in range(96)), bytes(255 - i for i in range(32))]

V1 = {
    "model_spec_plain.bin": PLAIN,
    "model_spec_rich.bin": RICH,
    "node_row_first.bin": FIRST,
    "node_row_deep.bin": DEEP,
    "node_descriptor.bin": node_descriptor(FIRST),
    "pin_row.bin": seal(NODE + struct.pack("<q", 1900000000)),
    "store_config.bin": seal(struct.pack("<IQ", 1, 0xFEDCBA9876543210) + bytes(range(32))),
    "frame_raw.bin": frame(MODEL, SECTIONS),
    "profile.bin": PROFILE_FILE,
}

V2 = {
    "node_row_deep.bin": DEEP_IN_UNITS,
    "node_row_coded.bin": CODED,
    "node_descriptor_coded.bin": coded_descriptor(FIRST),
}

GOOD = frame(MODEL, SECTIONS)
CORRUPT = {
    "frame_bad_body.bin": GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
    "frame_bad_header_checksum.bin": frame(MODEL, SECTIONS, crc_flip=1),
    "frame_bytes_behind.bin": GOOD + b"\0",
    "frame_codec_0.bin": frame(MODEL, SECTIONS, codec=0),
    "frame_cut_header.bin": GOOD[:100],
    "frame_header_bytes.bin": frame(MODEL, SECTIONS, header_bytes=192),
    "frame_no_model.bin": frame(bytes(16), SECTIONS),
    "frame_no_section.bin": frame(MODEL, []) + bytes(64),
    "frame_padding.bin": frame(MODEL, SECTIONS, padding=1),
    "frame_quality_0.bin": frame(MODEL, SECTIONS, quality=0),
    "frame_quality_high_but_exact.bin": frame(MODEL, SECTIONS, quality=1),
    "frame_raw_but_coded.bin": frame(MODEL, SECTIONS, rung=2),
    "frame_raw_bytes.bin": frame(MODEL, SECTIONS, raw_bytes=127),
    "frame_raw_bytes_over_limit.bin": frame(MODEL, SECTIONS, raw_bytes=(64 << 20) + 1),
    "frame_reserved.bin": frame(MODEL, SECTIONS, reserved1=1),
    "frame_reserved_2.bin": frame(MODEL, SECTIONS, reserved2=1),
    "frame_rung_0.bin": frame(MODEL, SECTIONS, rung=0),
    "frame_rung_tokens.bin": frame(MODEL, SECTIONS, rung=1),
    "frame_section_count_huge.bin": frame(MODEL, SECTIONS, section_count=0xFFFFFFFF),
    "frame_section_empty.bin": frame(MODEL, [SECTIONS[0], b""]),
    "frame_sections_short_of_body.bin": frame(MODEL, SECTIONS, body_bytes=129, raw_bytes=129) + b"\0",
    "frame_version_0.bin": frame(MODEL, SECTIONS, version=0),
    "frame_zeros.bin": bytes(4096),
    "model_spec_no_name.bin": model_spec(b"", b"main", b"\x01", 3, [(0, [(1, 1, 1, 1)])], (1, 0.0, 0, b""), 0, 1, b"", 16,
                                         b""),
    "model_spec_rank.bin": model_spec(b"a", b"main", b"\x01", 3, [(0, [(1, 1, 1, 1)])], (1, 0.0, 0, b""), 1, 1, b"", 16,
                                      b""),
    "model_spec_too_large.bin": model_spec(b"a", b"main", b"\x01", 1, [(0, [(1024, 1024, 4096, 4096)])],
                                           (1, 0.0, 0, b""), 0, 1, b"", 1024, b""),
    "node_row_depth_0.bin": node_row(1, 0, 0, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], []),
    "node_row_minus_zero.bin": node_row(1, 0, 1, bytes(16), 1, -0.0, 1, 0, b"", b"", [1], []),
    "node_row_no_parent.bin": node_row(1, 0, 2, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], []),
    "node_row_no_tokens.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [], []),
    "node_row_provenance_0.bin": node_row(0, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], []),
    "node_row_rung_order.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], [(3, 3, 1, 1, 1), (2, 2, 1, 1, 1)]),
    "node_row_rung_twice.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], [(3, 3, 1, 1, 1), (3, 3, 1, 1, 1)]),
    "node_row_salt_below_root.bin": node_row(1, 0, 2, PARENT, 1, 1.0, 1, 0, b"s", b"", [1], []),
    "node_row_zeros.bin": bytes(100),
    "node_row_codec_0.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], [(2, 1, 1, 1, 1, 0, PROFILE)],
                                     version=2),
    "node_row_codec_of_another_rung.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1],
                                                   [(3, 3, 1, 1, 1, 3, PROFILE)], version=2),
    "node_row_coded_but_exact.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1],
                                             [(2, 3, 1, 1, 1, 3, PROFILE)], version=2),
    "node_row_raw_with_profile.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1],
                                              [(3, 3, 1, 1, 1, 1, PROFILE)], version=2),
    "node_row_version_2_without_need.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], [], version=2),
    "node_row_place_over_limit.bin": node_row(1, 0, 1, bytes(16), 1, 1.0, 1, 0, b"", b"", [1], [(3, 3, 1, 1 << 29, 1)]),
    "node_row_too_deep.bin": node_row(1, 0, (1 << 20) + 1, PARENT, 1, 1.0, 1, 0, b"", b"", [1], []),
    "node_descriptor_version_2_without_need.bin": coded_descriptor(FIRST, 3, bytes(16)),
    "store_config_zeros.bin": bytes(49),
    "store_config_secret_short.bin": seal(struct.pack("<IQ", 1, 7) + bytes(31)),
    "node_descriptor_with_rungs.bin": node_descriptor(DEEP),
    "pin_row_no_node.bin": seal(bytes(16) + struct.pack("<q", 1)),
}


def name_node(secret, model, parent, provenance, salt, extra_key, tokens):
    message = (bytes([1]) + model + parent + bytes([provenance]) + u32(len(salt)) + salt + u32(len(extra_key)) + extra_key +
               u32(len(tokens)) + b"".join(u32(token) for token in tokens))
    return hmac.new(secret, message, "sha256").digest()[:16]


def main():
    for folder, files in (("v1", V1), ("v2", V2), ("corrupt", CORRUPT)):
        (HERE / folder).mkdir(exist_ok=True)
        for name, content in files.items():
            path = HERE / folder / name
            if not path.exists():
                path.write_bytes(content)
            elif path.read_bytes() != content:
                print(f"{path} differs from what would be written")

    # Constants of the tests.
    print("model id plain", model_id(PLAIN).hex())
    print("model id rich ", model_id(RICH).hex())
    secret = bytes(range(32))
    first = name_node(secret, MODEL, bytes(16), 1, b"salt", b"", range(16))
    print("codec key plain", codec_key(*PLAIN_FIELDS).hex())
    print("codec key rich ", codec_key(*RICH_FIELDS).hex())
    print("first node    ", first.hex())
    print("second node   ", name_node(secret, MODEL, first, 2, b"", b"image", [0xFFFFFFFF]).hex())
    print("no tokens     ", name_node(secret, MODEL, PARENT, 1, b"", b"", []).hex())


if __name__ == "__main__":
    main()
