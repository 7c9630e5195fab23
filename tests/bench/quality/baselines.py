"""What others do to a KV cache, in numpy, each with every bit counted.

A code takes K and V of some consecutive tokens, float32 [layers, 2 (K, V), tokens, KV heads, head_dim] of
bfloat16 values, K after RoPE as engines hold it, and returns what is restored, float32 of that shape, and
how many bits were stored.
"""

import functools
from collections.abc import Callable

import numpy as np

Coded = tuple[np.ndarray, int]
Code = Callable[[np.ndarray], Coded]

_GROUP = 32  # values of one scale in q8_0, q4_0 and the KIVI-like codes
_HALF_BITS = 16


def bf16(kv: np.ndarray) -> Coded:
    return kv, 16 * kv.size


def fp8_e4m3(kv: np.ndarray) -> Coded:
    """1 sign, 4 exponent, 3 fraction bits; to the nearest, halves to even, saturating at 448; no scale."""
    x = np.clip(kv, -448, 448)
    _, exponent = np.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    quantum = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3)
    return np.rint(x / quantum) * quantum, 8 * kv.size


def q8_0(kv: np.ndarray) -> Coded:
    """ggml's: blocks of 32 values, an fp16 scale of max|x| / 127, halves away from zero."""
    blocks = kv.reshape(-1, _GROUP)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    x = blocks * _inverse(scale)
    codes = np.trunc(x + np.copysign(np.float32(0.5), x))
    return (codes * _half(scale)).reshape(kv.shape), 8 * kv.size + _HALF_BITS * len(blocks)


def q4_0(kv: np.ndarray) -> Coded:
    """ggml's: blocks of 32 values; the value of largest size gets code -8 of -8 to 7; an fp16 scale."""
    blocks = kv.reshape(-1, _GROUP)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    codes = np.minimum(np.trunc(blocks * _inverse(scale) + np.float32(8.5)), 15) - 8
    return (codes * _half(scale)).reshape(kv.shape), 4 * kv.size + _HALF_BITS * len(blocks)


def kivi_like(bits: int) -> Code:
    """KIVI's grouping (arXiv:2402.02750): K per channel over 32 tokens, V per token over 32 channels.

    Each group has an fp16 scale and an fp16 zero point. A last group of fewer tokens has both too.
    KIVI keeps its newest tokens unquantized; here nothing is kept.
    """

    def code(kv: np.ndarray) -> Coded:
        restored = np.empty_like(kv)
        groups = 0
        for first in range(0, kv.shape[2], _GROUP):
            k = kv[:, 0, first:first + _GROUP]
            restored[:, 0, first:first + _GROUP] = _asymmetric(k, bits, axis=1)
            groups += k.size // k.shape[1]
        v = kv[:, 1].reshape(-1, _GROUP)
        restored[:, 1] = _asymmetric(v, bits, axis=1).reshape(kv[:, 1].shape)
        groups += len(v)
        return restored, bits * kv.size + 2 * _HALF_BITS * groups

    return code


def turboquant(k_bits: int, v_bits: int) -> Code:
    """TurboQuant (arXiv:2504.19874, algorithm 1): a random rotation of each head's vector, then the
    Lloyd-Max codebook for a coordinate of a random unit vector. An fp16 norm per vector.
    """

    def code(kv: np.ndarray) -> Coded:
        head_dim = kv.shape[-1]
        rotation = _rotation(head_dim)
        restored, bits = np.empty_like(kv), 0
        for kind, code_bits in enumerate((k_bits, v_bits)):
            x = kv[:, kind]
            norm = np.linalg.norm(x, axis=-1, keepdims=True)
            book = codebook(head_dim, code_bits)
            codes = np.searchsorted((book[1:] + book[:-1]) / 2, x * _inverse(norm) @ rotation)
            restored[:, kind] = book[codes] @ rotation.T * _half(norm)
            bits += code_bits * x.size + _HALF_BITS * norm.size
        return restored, bits

    return code


def first_exact(code: Code) -> Code:
    """Keeps the first token in 16 bits. REQUIRES: what is coded begins with the sequence's first token."""

    def with_first_exact(kv: np.ndarray) -> Coded:
        restored, bits = code(kv[:, :, 1:])
        first = kv[:, :, :1]
        return np.concatenate([first, restored], axis=2), bits + 16 * first.size

    return with_first_exact


@functools.cache
def codebook(dimension: int, bits: int) -> np.ndarray:
    """Lloyd-Max codewords, ascending, for a coordinate of a random unit vector.

    The density of the coordinate is proportional to (1 - x^2)^((dimension - 3) / 2).
    """
    x = np.linspace(-1, 1, 400_001)
    density = (1 - x * x)**((dimension - 3) / 2)
    mass = np.concatenate([[0], np.cumsum(density)])
    moment = np.concatenate([[0], np.cumsum(density * x)])
    ranks = (np.arange(2**bits) + 0.5) / 2**bits
    words = x[np.searchsorted(mass[1:], ranks * mass[-1])]
    for _ in range(5000):
        edges = np.concatenate([[0], np.searchsorted(x, (words[1:] + words[:-1]) / 2), [len(x)]])
        better = np.diff(moment[edges]) / np.diff(mass[edges])
        if np.array_equal(better, words):
            break
        words = better
    return words.astype(np.float32)


@functools.cache
def _rotation(dimension: int) -> np.ndarray:
    """A random orthogonal matrix, always the same."""
    gaussian = np.random.default_rng(1).standard_normal((dimension, dimension))
    q, r = np.linalg.qr(gaussian)
    return (q * np.sign(np.diag(r))).astype(np.float32)


def _asymmetric(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """x through codes of 0 to 2^bits - 1 from its least to its largest value along an axis."""
    zero = _half(x.min(axis=axis, keepdims=True))
    scale = _half((x.max(axis=axis, keepdims=True) - zero) / np.float32(2**bits - 1))
    codes = np.clip(np.rint((x - zero) * _inverse(scale)), 0, 2**bits - 1)
    return codes * scale + zero


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def _inverse(x: np.ndarray) -> np.ndarray:
    """1 / x, and 0 for 0."""
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)
