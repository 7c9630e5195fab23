"""Chooses each level's base step so that it keeps its promise on every group. Needs no torch.

The mean KL grows about as a power of the step: as its square while errors are small, somewhat less where
most of what is coded is zero. So a few fits find the step.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence

MEAN_KL_MAX = {"near-exact": 0.001, "high": 0.01, "small": 0.05}  # nat, finest first, as storage/kv/quality.h has them
# As SmolLM2-135M takes them where a language that was not fitted is held out: finer than those of `kvtrie profile fit`.
FIRST_STEPS = {"near-exact": 0.0002, "high": 0.0008, "small": 0.0018}

_POWER = 1.9  # of the step, where nothing is known yet
_POWER_RANGE = (0.8, 2.5)
_CHANGE_MAX = 4  # of a step at once
_SMALL_CHANGE = 1.05
_AIM = 0.95  # of the target: the next measurement differs by a little
_FACTORS_MAX = 3  # of the steps of differences, each half of the one before
_WASTEFUL = 0.85  # of the target: a level that is so much better than it must be takes too many bits


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a level with this step gave: the mean KL of its worst group, in nat."""

    step: float
    worst_kl: float


def target(level: str, margin: float) -> float:
    """What the worst group may have: the level's bound less a share of it."""
    return MEAN_KL_MAX[level] * (1 - margin)


def holds(level: str, trial: Trial, margin: float) -> bool:
    return trial.worst_kl <= target(level, margin)


def is_good(level: str, trial: Trial, margin: float) -> bool:
    """Keeps its promise, and wastes no bits."""
    return _WASTEFUL * target(level, margin) <= trial.worst_kl <= target(level, margin)


def reference_level(level: str, levels: Collection[str]) -> str | None:
    """The next finer one of these levels: what stores code a block of this level against. None: there is none."""
    finest_first = list(MEAN_KL_MAX)
    finer = finest_first[:finest_first.index(level)]
    return next((other for other in reversed(finer) if other in levels), None)


def next_step(level: str, trials: Sequence[Trial], margin: float) -> float:
    """The step to try after these, in the order in which they were made. REQUIRES: at least one.

    Stays between the steps that are known to hold and not to hold.
    """
    last = trials[-1]
    aim = _AIM * target(level, margin)
    if not math.isfinite(last.worst_kl):
        factor = 1 / _CHANGE_MAX
    elif last.worst_kl <= 0:
        factor = float(_CHANGE_MAX)
    else:
        factor = (aim / last.worst_kl) ** (1 / _power(trials))
    step = last.step * min(max(factor, 1 / _CHANGE_MAX), _CHANGE_MAX)
    low = max((trial.step for trial in trials if holds(level, trial, margin)), default=0.0)
    high = min((trial.step for trial in trials if not holds(level, trial, margin)), default=math.inf)
    if low < high and not low < step < high:
        if high == math.inf:
            return _SMALL_CHANGE * low
        return math.sqrt(low * high) if low > 0 else high / _SMALL_CHANGE
    return step


def next_factor(trials: Sequence[tuple[float, bool]]) -> float | None:
    """By what to multiply steps of differences after these factors, each with whether all levels held; None: enough.

    Halved, twice at most, until they hold; then once more between the last that did not and the one that does, because
    what differences cost and take changes fast there. REQUIRES: at least one.
    """
    factor, held = trials[-1]
    if not held and not any(held for _, held in trials):
        return factor / 2 if len(trials) < _FACTORS_MAX else None
    if held and len(trials) > 1 and not trials[-2][1]:
        return math.sqrt(factor * trials[-2][0])
    return None


def _power(trials: Sequence[Trial]) -> float:
    """Exponent of the step, from the last two trials that tell."""
    if len(trials) >= 2:
        a, b = trials[-2:]
        if a.step != b.step and min(a.worst_kl, b.worst_kl) > 0 and math.isfinite(a.worst_kl * b.worst_kl):
            power = math.log(b.worst_kl / a.worst_kl) / math.log(b.step / a.step)
            return min(max(power, _POWER_RANGE[0]), _POWER_RANGE[1])
    return _POWER
