"""Writes record.bin, a segment header and a group of two records behind each other, and the damaged records of
version 2 in ../corrupt, from storage/payload/SEGMENTS.md alone."""

import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from crc32c import crc32c  # pylint: disable=wrong-import-position

PAGE_BYTES = 4096
UNIT_BYTES = 512
STORE_ID = 0x0123456789ABCDEF
SEGMENT = 7
FIRST = (b"golden descriptor", bytes((i * 7 + 3) % 256 for i in range(1000)))
SECOND = (b"second", bytes((i * 5 + 1) % 256 for i in range(3000)))


def padded(data, unit):
    return data + bytes(-len(data) % unit)


def sealed(magic, covered):
    return magic + struct.pack("<I", crc32c(covered)) + covered


def segment_header():
    covered = struct.pack("<H6xQI36x", 2, STORE_ID, SEGMENT)
    return padded(sealed(b"KVSG", covered), PAGE_BYTES)


def record(offset_units, descriptor, payload, version=2):
    fields = struct.pack("<H2xIQIIII24x", version, crc32c(payload), STORE_ID, SEGMENT, offset_units,
                         len(descriptor), len(payload))
    covered = padded(bytes(8) + fields + descriptor, 64)[8:]
    return padded(sealed(b"KVPR", covered) + payload, UNIT_BYTES)


def segment():
    content = segment_header()
    for descriptor, payload in (FIRST, SECOND):
        content += record(len(content) // UNIT_BYTES, descriptor, payload)
    return padded(content, PAGE_BYTES)


if __name__ == "__main__":
    here = pathlib.Path(__file__).parent
    here.joinpath("record.bin").write_bytes(segment())
    here.joinpath("../corrupt/record_version_3.bin").write_bytes(record(8, *FIRST, version=3))
    here.joinpath("../corrupt/record_in_first_page.bin").write_bytes(record(7, *FIRST))
    here.joinpath("../corrupt/record_place_over_limit.bin").write_bytes(record(1 << 29, *FIRST, version=1))
