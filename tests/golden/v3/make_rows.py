"""Writes the stored row of version 3 that node_row_test.cc describes, from the layout in storage/meta/node_row.cc alone."""

import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from crc32c import crc32c  # pylint: disable=wrong-import-position


def sealed(version, fields):
    covered = bytes([version]) + fields
    return covered + struct.pack("<I", crc32c(covered))


def counting(first):
    return bytes((first + i) % 256 for i in range(16))


def references(*entries):
    return bytes([len(entries)]) + b"".join(node + bytes([rung]) for node, rung in entries)


def rung(kind, quality, codec, profile, segment, offset_units, record_bytes, its_references):
    return (struct.pack("<BBIIIH", kind, quality, segment, offset_units, record_bytes, codec) + profile
            + references(*its_references))


def row(version, rungs, *, parent, depth, surprisal_bits, created, priority, path_hash, salt, tokens):
    fields = struct.pack("<BBBI", 1, priority, len(rungs), depth)
    fields += counting(0x10) + parent + struct.pack("<QfqqHHH", path_hash, surprisal_bits, created, 0, len(salt), 0,
                                                    len(tokens))
    fields += salt + struct.pack(f"<{len(tokens)}I", *tokens) + b"".join(rungs)
    return sealed(version, fields)


CODED, EXACT = 2, 3
SMALL, BIT_FOR_BIT = 4, 3
LOSSLESS, REFERENCED = 2, 5

if __name__ == "__main__":
    here = pathlib.Path(__file__).parent
    here.joinpath("node_row_referenced.bin").write_bytes(
        row(3, [rung(CODED, SMALL, REFERENCED, counting(0x70), 3, 2, 1,
                     [(counting(0x90), CODED), (counting(0xB0), EXACT)]),
                rung(EXACT, BIT_FOR_BIT, LOSSLESS, bytes(16), 6, 5, 4, [])],
            parent=counting(0x30), depth=2, surprisal_bits=0.5, created=1_700_000_002, priority=3,
            path_hash=0xFEDCBA9876543210, salt=b"", tokens=[7, 8, 9]))
