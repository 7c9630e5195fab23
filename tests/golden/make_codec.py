"""Writes the codecs' files of tests/golden/v1 and the corpora of their fuzz targets, from the descriptions alone: the
comment at the top of storage/codec/rans.h. It shares no code with the C++ writers. Files that are released are not
written anew.
"""

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
