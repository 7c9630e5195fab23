"""The numbers of raw KV, and float32.

Each float32 operation of the formats is done in double precision and rounded by float32(): for sums, products and
quotients that gives what float32's own operation gives.
"""

import ctypes
import math

FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, INT8, UINT8 = range(1, 8)
BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, FLOAT8_E4M3: 1, FLOAT8_E5M2: 1, INT8: 1, UINT8: 1}
EXPONENT_BITS = {FLOAT32: 8, FLOAT16: 5, BFLOAT16: 8, FLOAT8_E4M3: 4, FLOAT8_E5M2: 5}
MANTISSA_BITS = {FLOAT32: 23, FLOAT16: 10, BFLOAT16: 7, FLOAT8_E4M3: 3, FLOAT8_E5M2: 2}
LARGEST = {FLOAT32: 0x7F7FFFFF, FLOAT16: 0x7BFF, BFLOAT16: 0x7F7F, FLOAT8_E4M3: 0x7E, FLOAT8_E5M2: 0x7B}
NAN = {FLOAT32: 0x7FC00000, FLOAT16: 0x7E00, BFLOAT16: 0x7FC0, FLOAT8_E4M3: 0x7F, FLOAT8_E5M2: 0x7E}
INTEGER_RANGE = {INT8: (-128, 127), UINT8: (0, 255)}


def float32(x: float) -> float:
    return ctypes.c_float(x).value


def float32_bits(x: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(x)).value


def bias(dtype: int) -> int:
    return (1 << EXPONENT_BITS[dtype] - 1) - 1


def number(dtype: int, code: int) -> float:
    """What a code of the dtype stands for."""
    if dtype == INT8:
        return float(code - 256 if code > 127 else code)
    if dtype == UINT8:
        return float(code)
    bits = MANTISSA_BITS[dtype]
    size = 8 * BYTES[dtype]
    sign = -1.0 if code >> size - 1 else 1.0
    magnitude = code & (1 << size - 1) - 1
    field, mantissa = magnitude >> bits, magnitude & (1 << bits) - 1
    if magnitude > LARGEST[dtype]:
        infinite = mantissa == 0 and dtype != FLOAT8_E4M3
        return sign * math.inf if infinite else math.nan
    if field == 0:
        return sign * math.ldexp(mantissa, 1 - bias(dtype) - bits)
    return sign * math.ldexp((1 << bits) + mantissa, field - bias(dtype) - bits)


def is_finite(dtype: int, code: int) -> bool:
    return math.isfinite(number(dtype, code))


def code(dtype: int, x: float) -> int:
    """The code nearest to a float32, halves to even; beyond the largest number that, infinity where there is one."""
    if dtype in INTEGER_RANGE:
        low, high = INTEGER_RANGE[dtype]
        if math.isnan(x):
            return 0
        return round(min(max(x, low), high)) & 0xFF
    bits = MANTISSA_BITS[dtype]
    sign = int(math.copysign(1, x) < 0) << 8 * BYTES[dtype] - 1
    if math.isnan(x):
        return sign | NAN[dtype]
    if math.isinf(x):
        return sign | LARGEST[dtype] + (dtype != FLOAT8_E4M3)
    exponent = max(math.frexp(x)[1] - 1, 1 - bias(dtype)) if x != 0 else 1 - bias(dtype)
    units = round(math.ldexp(abs(x), bits - exponent))
    return sign | min((exponent + bias(dtype) - 1 << bits) + units, LARGEST[dtype])


def read(dtype: int, data: bytes) -> list:
    size = BYTES[dtype]
    return [int.from_bytes(data[at:at + size], "little") for at in range(0, len(data), size)]


def write(dtype: int, codes) -> bytes:
    return b"".join(c.to_bytes(BYTES[dtype], "little") for c in codes)
