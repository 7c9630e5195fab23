"""Fits and savings of predictors whose answers are known."""

import numpy as np
import pytest

import predictors


def _matrix(rank: int) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.normal(size=(6, rank)) @ random.normal(size=(rank, 6))


def _sums(seed: int, noise: float, rank: int = 6) -> np.ndarray:
    """Of 20,000 rows: a constant, six features, and six targets that are a mean, _matrix(rank) of them,
    and noise."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(20_000, 6)) + 3
    targets = features @ _matrix(rank) + 5 + noise * random.normal(size=(20_000, 6))
    rows = np.concatenate([np.ones((20_000, 1)), features, targets], axis=1)
    return rows.T @ rows


_FEATURES, _TARGETS = np.arange(7), np.arange(7, 13)


def test_what_is_saved_is_the_logarithm_of_signal_and_noise_over_noise():
    weights = predictors.fit(_sums(2, 0.25), _FEATURES, _TARGETS)
    saved = predictors.saved_bits(_sums(3, 0.25), weights, _FEATURES, _TARGETS)
    signals = np.linalg.svd(_matrix(6), compute_uv=False)**2
    assert saved == pytest.approx(np.mean(np.log2(1 + signals / 0.25**2)) / 2, abs=0.02)


def test_the_constant_alone_saves_nothing():
    weights = predictors.fit(_sums(2, 0.5), np.arange(1), _TARGETS)
    assert predictors.saved_bits(_sums(2, 0.5), weights, np.arange(1), _TARGETS) == pytest.approx(0)


def test_a_rank_is_enough_where_the_truth_has_no_more():
    sums = _sums(2, 0.5, rank=2)
    full = predictors.fit(sums, _FEATURES, _TARGETS)
    two = predictors.fit(sums, _FEATURES, _TARGETS, rank=2)
    one = predictors.fit(sums, _FEATURES, _TARGETS, rank=1)
    assert np.linalg.matrix_rank(two[1:], tol=1e-6) == 2
    saved = [predictors.saved_bits(sums, weights, _FEATURES, _TARGETS) for weights in (full, two, one)]
    assert saved[1] == pytest.approx(saved[0], abs=0.01)
    assert saved[2] < saved[1] - 0.1


def test_columns_of_parts_follow_each_other():
    layout = predictors.Layout(3)
    parts = range(7)
    assert [layout.columns(part).start for part in parts] == [0, 1, 7, 13, 19, 25, 28]
    assert layout.total == 31
    assert list(layout.select((5,))) == [0, 25, 26, 27]
