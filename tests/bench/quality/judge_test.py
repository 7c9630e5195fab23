"""KL, NLL and agreement against a slow and plain computation; caches in and out."""

import math

import numpy as np
import pytest

import judge
import smollm2
import smollm2_weights


def _softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    return [w / math.fsum(weights) for w in weights]


@pytest.fixture(name="logits")
def _logits() -> tuple[np.ndarray, np.ndarray]:
    """Of 150 positions, more than are compared at a time."""
    rng = np.random.default_rng(3)
    x = (4 * rng.standard_normal((150, 50)) + 20).astype(np.float32)
    return x, x + (0.3 * rng.standard_normal(x.shape)).astype(np.float32)


def test_divergence_is_the_plain_formulas(logits):
    x, y = logits
    token_ids = list(np.random.default_rng(4).integers(0, 50, 150))
    found = judge.diverge(judge.Distributions.of(x), judge.Distributions.of(y), token_ids)
    assert len(found.kl) == len(found.same_top) == 150 and len(found.nll_change) == 149
    for i in range(150):
        p, q = _softmax(x[i].tolist()), _softmax(y[i].tolist())
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q))
        assert found.kl[i] == pytest.approx(kl, abs=1e-6)
        assert found.same_top[i] == (p.index(max(p)) == q.index(max(q)))
        if i < 149:
            change = math.log(p[token_ids[i + 1]]) - math.log(q[token_ids[i + 1]])
            assert found.nll_change[i] == pytest.approx(change, abs=1e-5)
    assert 0.5 < found.same_top.mean() < 1 and found.kl.min() > 0


def test_equal_distributions_diverge_by_nothing(logits):
    x, _ = logits
    found = judge.diverge(judge.Distributions.of(x), judge.Distributions.of(x), [0] * len(x))
    assert not found.kl.any() and not found.nll_change.any() and found.same_top.all()


def test_a_constant_on_all_logits_changes_nothing(logits):
    x, _ = logits
    found = judge.diverge(judge.Distributions.of(x), judge.Distributions.of(x + 8), [0] * len(x))
    assert np.abs(found.kl).max() < 1e-6 and np.abs(found.nll_change).max() < 1e-5


def test_small_divergences_of_a_large_vocabulary_are_resolved():
    """KL of a small change d of the logits is half the variance of d under p."""
    rng = np.random.default_rng(5)
    x = (3 * rng.standard_normal((4, 49152))).astype(np.float32)
    y = x + (2e-3 * rng.standard_normal(x.shape)).astype(np.float32)
    found = judge.diverge(judge.Distributions.of(x), judge.Distributions.of(y), [0] * 4)
    exact_x, change = x.astype(np.float64), y.astype(np.float64) - x
    p = np.exp(exact_x - exact_x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    mean = (p * change).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.kl, (p * (change - mean)**2).sum(axis=1) / 2, atol=2e-7)


def test_head_is_the_divergence_of_the_first_positions(logits):
    x, y = (judge.Distributions.of(z) for z in logits)
    whole = judge.diverge(x, y, [1] * 150).head(16)
    first = judge.diverge(x.part(0, 16), y.part(0, 16), [1] * 16)
    np.testing.assert_array_equal(whole.kl, first.kl)
    np.testing.assert_array_equal(whole.nll_change, first.nll_change)
    np.testing.assert_array_equal(whole.same_top, first.same_top)


def test_kv_goes_into_a_cache_and_comes_out():
    config = smollm2_weights.load_config()
    kv = np.random.default_rng(6).standard_normal(
        (config.layer_count, 2, 80, config.kv_head_count, config.head_dim)).astype(np.float32)
    cache = smollm2.KvCache(config, 100)
    judge.set_cache(cache, kv)
    assert cache.length == 80
    assert cache.k[7, 2, 33, 5] == kv[7, 0, 33, 2, 5]
    assert cache.v[7, 2, 33, 5] == kv[7, 1, 33, 2, 5]
    np.testing.assert_array_equal(judge.get_kv(cache, 48), kv[:, :, 48:])
    with pytest.raises(ValueError, match="80 tokens in a cache for 64"):
        judge.set_cache(smollm2.KvCache(config, 64), kv)
