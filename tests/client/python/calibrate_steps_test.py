"""The choice of base steps, on models of how KL follows from a step."""

import math

import pytest

from kvtrie.calibrate import steps

_MARGIN = 0.1


def _search(level: str, first: float, kl, fits: int) -> list[steps.Trial]:
    trials = [steps.Trial(first, kl(first))]
    while len(trials) < fits and not steps.is_good(level, trials[-1], _MARGIN):
        step = steps.next_step(level, trials, _MARGIN)
        trials.append(steps.Trial(step, kl(step)))
    return trials


@pytest.mark.parametrize("level", list(steps.MEAN_KL_MAX))
@pytest.mark.parametrize("power", [1.2, 1.6, 1.9, 2.0, 2.3])
@pytest.mark.parametrize("off", [0.2, 0.6, 1, 1.7, 5])
def test_a_few_fits_find_a_good_step(level, power, off):
    def kl(step):
        return steps.MEAN_KL_MAX[level] * (step / steps.FIRST_STEPS[level]) ** power
    trials = _search(level, off * steps.FIRST_STEPS[level], kl, 4)
    assert steps.is_good(level, trials[-1], _MARGIN)


def test_a_step_that_is_good_is_left_alone():
    trials = _search("high", 0.0026, lambda step: 0.0088, 4)
    assert len(trials) == 1


def test_a_jump_is_bracketed():
    """Where KL leaps, the search ends below the leap, at a step that holds."""
    def kl(step):
        return 0.002 if step < 0.003 else 0.02
    trials = _search("high", 0.0026, kl, 12)
    held = [trial.step for trial in trials if steps.holds("high", trial, _MARGIN)]
    assert 0.0028 < max(held) < 0.003
    assert all(trial.step < 0.012 for trial in trials)


def test_nothing_measured_is_no_reason_to_stop():
    assert steps.next_step("high", [steps.Trial(1.0, math.inf)], _MARGIN) == 0.25
    assert steps.next_step("high", [steps.Trial(1.0, math.nan)], _MARGIN) == 0.25
    assert steps.next_step("high", [steps.Trial(1.0, 0.0)], _MARGIN) == 4


def test_the_margin_is_kept_free():
    assert steps.target("small", 0.1) == pytest.approx(0.045)
    assert not steps.holds("small", steps.Trial(1, 0.046), 0.1)
    assert steps.holds("small", steps.Trial(1, 0.046), 0.05)
    assert not steps.is_good("small", steps.Trial(1, 0.01), 0.1)


@pytest.mark.parametrize("levels, expected", [
    (["near-exact", "high", "small"], {"near-exact": None, "high": "near-exact", "small": "high"}),
    (["small", "near-exact"], {"near-exact": None, "small": "near-exact"}),
    (["small"], {"small": None})])
def test_a_level_is_coded_against_the_next_finer_one(levels, expected):
    assert {level: steps.reference_level(level, levels) for level in levels} == expected


@pytest.mark.parametrize("holds_up_to, expected", [
    (9, [4]), (3, [4, 2, math.sqrt(8)]), (2, [4, 2, math.sqrt(8)]), (1, [4, 2, 1, math.sqrt(2)]), (0.5, [4, 2, 1])])
def test_steps_of_differences_are_halved_and_then_raised_once(holds_up_to, expected):
    trials, factor = [], 4.0
    while factor is not None:
        trials.append((factor, factor <= holds_up_to))
        factor = steps.next_factor(trials)
    assert [factor for factor, _ in trials] == pytest.approx(expected)
