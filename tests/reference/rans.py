"""The entropy coder's decoder, 16 lanes: RESIDUAL.md, Symbols; LOSSLESS.md, rANS."""

from damage import Reader, require

LANES = 16
LOW = 1 << 16


class Table:
    """Symbols by slot, from frequencies that sum up to 4096."""

    def __init__(self, frequencies):
        self.frequencies = frequencies
        self.firsts = []
        self.symbol_of_slot = []
        for symbol, frequency in enumerate(frequencies):
            self.firsts.append(len(self.symbol_of_slot))
            self.symbol_of_slot += [symbol] * frequency
        assert len(self.symbol_of_slot) == 4096


class Decoder:

    def __init__(self, data: bytes, what: str):
        self.words = Reader(data, what)
        self.states = self.words.array("I", LANES)
        self.what = what
        require(all(x >= LOW for x in self.states), f"{what}: a state is too small")

    def symbols(self, tables: dict) -> dict:
        """One step: the symbol of each lane, given its Table. No lanes: no step."""
        result = {}
        for lane, table in tables.items():
            slot = self.states[lane] % 4096
            symbol = result[lane] = table.symbol_of_slot[slot]
            self.states[lane] = (table.frequencies[symbol] * (self.states[lane] >> 12) + slot - table.firsts[symbol])
        self._take_words(tables)
        return result

    def bits(self, counts: dict) -> dict:
        """One step: so many bits of each lane, 0 to 12."""
        result = {}
        for lane, count in counts.items():
            slot = self.states[lane] % 4096
            result[lane] = slot >> 12 - count
            self.states[lane] = (self.states[lane] >> 12 << 12 - count) + slot % (1 << 12 - count)
        self._take_words(counts)
        return result

    def _take_words(self, lanes) -> None:
        for lane in sorted(lanes):
            if self.states[lane] < LOW:
                self.states[lane] = self.states[lane] << 16 | self.words.number("H")

    def end(self) -> None:
        require(all(x == LOW for x in self.states), f"{self.what}: a state is not the first one at the end")
        self.words.end()
