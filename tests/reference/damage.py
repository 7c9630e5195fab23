"""What a reader says of bytes that it does not take, and the ways to look at bytes."""

import struct


class Damage(Exception):
    """The bytes are not what a writer made."""


class NewerFormat(Exception):
    """Intact, and of a version or codec that came later."""


class WrongQuestion(Exception):
    """Intact, and not what was asked for: another model, profile, position or other tokens."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Damage(what)


def _crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Reader:
    """Takes fields from the front of bytes; asks for no memory that the bytes do not cover."""

    def __init__(self, data: bytes, what: str):
        self.data = data
        self.at = 0
        self.what = what

    def left(self) -> int:
        return len(self.data) - self.at

    def bytes(self, count: int) -> bytes:
        require(count <= self.left(), f"{self.what}: ends early")
        self.at += count
        return self.data[self.at - count:self.at]

    def array(self, code: str, count: int) -> list:
        """`count` little-endian numbers of the struct code."""
        return list(struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(f"<{code}"))))

    def number(self, code: str):
        return self.array(code, 1)[0]

    def end(self) -> None:
        require(self.left() == 0, f"{self.what}: bytes behind its end")
