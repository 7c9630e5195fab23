"""Writes record.bin: two pages, a segment header and a record, from storage/payload/SEGMENTS.md alone."""

import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from crc32c import crc32c  # pylint: disable=wrong-import-position

PAGE_BYTES = 4096
STORE_ID = 0x0123456789ABCDEF
SEGMENT = 7
OFFSET_PAGES = 1
DESCRIPTOR = b"golden descriptor"
PAYLOAD = bytes((i * 7 + 3) % 256 for i in range(1000))


def padded(data, unit):
    return data + bytes(-len(data) % unit)


def sealed(magic, covered):
    return magic + struct.pack("<I", crc32c(covered)) + covered


def segment_header():
    covered = struct.pack("<H6xQI36x", 1, STORE_ID, SEGMENT)
    return padded(sealed(b"KVSG", covered), PAGE_BYTES)


def record():
    fields = struct.pack("<H2xIQIIII24x", 1, crc32c(PAYLOAD), STORE_ID, SEGMENT, OFFSET_PAGES,
                         len(DESCRIPTOR), len(PAYLOAD))
    covered = padded(bytes(8) + fields + DESCRIPTOR, 64)[8:]
    return padded(sealed(b"KVPR", covered) + PAYLOAD, PAGE_BYTES)


if __name__ == "__main__":
    pathlib.Path(__file__).with_name("record.bin").write_bytes(segment_header() + record())
