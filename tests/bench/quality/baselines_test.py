"""The baselines' bits, bounds of their errors, and values that are known."""

import math

import numpy as np
import pytest

import baselines
import schemes
import smollm2

_SHAPE = (2, 2, 64, 3, 64)


@pytest.fixture(name="kv")
def _kv() -> np.ndarray:
    """Gaussian bfloat16 values, K with one channel that is ten times as large, as real K has."""
    kv = np.random.default_rng(1).standard_normal(_SHAPE).astype(np.float32)
    kv[:, 0, :, :, 5] *= 10
    return smollm2.round_to_bf16(kv)


@pytest.mark.parametrize("code,bits", [
    (baselines.bf16, 16),
    (baselines.fp8_e4m3, 8),
    (baselines.q8_0, 8.5),
    (baselines.q4_0, 4.5),
    (baselines.kivi_like(4), 5),
    (baselines.kivi_like(2), 3),
    (baselines.turboquant(4, 4), 4.25),
    (baselines.turboquant(4, 3), 3.75),
    (baselines.first_exact(baselines.turboquant(2, 2)), 2.25 * 63 / 64 + 16 / 64),
])
def test_every_bit_is_counted(kv, code, bits):
    restored, counted = code(kv)
    assert counted == bits * kv.size
    assert restored.shape == kv.shape and restored.dtype == np.float32


def test_a_group_of_few_tokens_has_a_whole_scale_and_zero_point(kv):
    _, counted = baselines.kivi_like(2)(kv[:, :, :40])
    k_groups = 2 * 2 * 3 * 64  # two along the tokens, for each layer, head and channel
    v_groups = 2 * 40 * 3 * 2
    assert counted == 2 * kv[:, :, :40].size + 32 * (k_groups + v_groups)


@pytest.mark.parametrize("scheme",
                         [s for s in schemes.SCHEMES if isinstance(s, schemes.Baseline)],
                         ids=lambda scheme: scheme.name)
def test_baselines_restore_bf16_and_count_bytes(kv, scheme):
    restored = scheme.restore(range(64), kv)
    np.testing.assert_array_equal(smollm2.round_to_bf16(restored.kv), restored.kv)
    rest = scheme.restore(range(64), kv, 32)
    assert rest.kv.shape == (2, 2, 32, 3, 64)
    if scheme.first_exact:
        np.testing.assert_array_equal(restored.kv[:, :, 0], kv[:, :, 0])
        first_token_bits = 16 * kv[:, :, 0].size
        part = scheme.restore(range(64), kv[:, :, :32]).byte_count - first_token_bits // 8
        assert part * 32 == rest.byte_count * 31
    else:
        assert 2 * rest.byte_count == restored.byte_count
        np.testing.assert_array_equal(rest.kv, restored.kv[:, :, 32:])


def _e4m3(code: int) -> float:
    """The value of a code without sign, from the format's definition; 127 is NaN."""
    exponent, fraction = code >> 3, code & 7
    if exponent == 0:
        return fraction / 8 * 2.0**-6
    return (1 + fraction / 8) * 2.0**(exponent - 7)


def test_fp8_is_the_nearest_code_for_every_bf16_up_to_its_largest():
    bits = np.arange(0x7F80, dtype=np.uint32)  # finite, positive
    values = (bits << 16).view(np.float32)
    codes = [_e4m3(code) for code in range(127)]
    assert codes[-1] == 448
    book = np.array(codes)
    upper = np.minimum(np.searchsorted(book, values), 126)
    lower = np.maximum(upper - 1, 0)
    below, above = values - book[lower], book[upper] - values
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    expected = np.where(values >= 448, 448, book[np.where(take_lower, lower, upper)])
    np.testing.assert_array_equal(baselines.fp8_e4m3(values)[0], expected)
    np.testing.assert_array_equal(baselines.fp8_e4m3(-values)[0], -expected)


def test_q8_0_keeps_integers_up_to_127():
    block = np.arange(32, dtype=np.float32) - 16
    block[3] = -127
    np.testing.assert_array_equal(baselines.q8_0(block)[0], block)


def test_q8_0_errs_by_at_most_half_a_step(kv):
    restored, _ = baselines.q8_0(kv)
    step = np.abs(kv.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    error = np.abs(restored - kv).reshape(-1, 32)
    # 127 codes of a scale that fp16 rounds by 2^-11 of itself.
    assert (error <= step * (0.5 + 127 * 2.0**-11)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_q4_0_gives_its_longest_side_the_code_minus_eight(sign):
    block = sign * np.tile(np.arange(-8, 8, dtype=np.float32), 2)
    np.testing.assert_array_equal(baselines.q4_0(block)[0], block)
    block[0] = -block[0] - sign / 2  # 7.5 of 8 on the other side, which has codes up to 7 only
    restored, _ = baselines.q4_0(block)
    assert restored[0] == sign * 7


def test_q4_0_errs_by_at_most_a_step(kv):
    restored, _ = baselines.q4_0(kv)
    step = np.abs(kv.reshape(-1, 32)).max(axis=1, keepdims=True) / 8
    assert (np.abs(restored - kv).reshape(-1, 32) <= step * (1 + 8 * 2.0**-11)).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kivi_like_errs_by_at_most_half_a_step_of_its_group(kv, bits):
    restored, _ = baselines.kivi_like(bits)(kv)
    steps = 2**bits - 1
    k, v = kv[:, 0], kv[:, 1]
    k = k.reshape(2, 2, 32, 3, 64)  # two groups of tokens
    spread = (k.max(axis=2, keepdims=True) - k.min(axis=2, keepdims=True)) / steps
    error = np.abs(restored[:, 0].reshape(k.shape) - k)
    # fp16 rounds the zero point by 2^-11 of it, and the scale, which is counted up to `steps` times.
    slack = (np.abs(k).max(axis=2, keepdims=True) + spread * steps) * 2.0**-10
    assert (error <= spread / 2 + slack).all()
    v = v.reshape(-1, 32)
    spread = (v.max(axis=1, keepdims=True) - v.min(axis=1, keepdims=True)) / steps
    error = np.abs(restored[:, 1].reshape(-1, 32) - v)
    slack = (np.abs(v).max(axis=1, keepdims=True) + spread * steps) * 2.0**-10
    assert (error <= spread / 2 + slack).all()


def test_kivi_like_groups_k_by_channel_and_v_by_token(kv):
    loud = kv.copy()
    loud[:, 0, 7, :, 9] = 1000
    loud[:, 1, 7, :, 9] = 1000
    before, after = (baselines.kivi_like(4)(x)[0] for x in (kv, loud))
    changed = np.argwhere(before != after)
    k, v = changed[changed[:, 1] == 0], changed[changed[:, 1] == 1]
    assert set(k[:, 4]) == {9} and k[:, 2].max() < 32 and len(set(k[:, 2])) == 32
    assert set(v[:, 2]) == {7} and v[:, 4].max() < 32 and len(set(v[:, 4])) == 32


def test_one_bit_codebook_is_the_mean_size_of_a_coordinate():
    for dimension in (16, 64, 128):
        size = math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2))
        size /= math.sqrt(math.pi)
        np.testing.assert_allclose(baselines.codebook(dimension, 1), [-size, size], rtol=1e-4)


@pytest.mark.parametrize("bits,distortion",
                         [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turboquant_has_the_distortion_of_lloyd_max(bits, distortion):
    """Max's mean square errors for a Gaussian (1960, table I), which a coordinate of a unit vector is
    in the limit; in 64 dimensions its tails are a little shorter."""
    kv = np.random.default_rng(2).standard_normal((4, 2, 256, 3, 64)).astype(np.float32)
    restored, _ = baselines.turboquant(bits, bits)(kv)
    error = np.mean((restored - kv)**2) / np.mean(kv**2)
    assert 0.95 * distortion < error < distortion


def test_turboquant_scales_with_its_vectors(kv):
    restored, _ = baselines.turboquant(3, 3)(kv)
    doubled, _ = baselines.turboquant(3, 3)(2 * kv)
    np.testing.assert_array_equal(doubled, 2 * restored)


@pytest.mark.parametrize("code", [baselines.fp8_e4m3, baselines.q8_0, baselines.q4_0,
                                  baselines.kivi_like(2), baselines.turboquant(2, 2)])
def test_zeros_stay_zeros(code):
    zeros = np.zeros(_SHAPE, np.float32)
    np.testing.assert_array_equal(code(zeros)[0], zeros)
