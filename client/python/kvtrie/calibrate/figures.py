"""What was measured of a profile on held-out texts. Needs no torch.

KL is that of next-token distributions on restored KV from those on the KV as it was, in nat, after each
token of a continuation.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvtrie.errors import KvtrieError


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One level on one text. kl: [tokens] float64. same_top: [tokens] bool, the likeliest token is the same.

    against: the level of the same text behind another prefix that it was coded against; None: it was coded alone.
    Bits are of the blocks behind that prefix then, and alone_bits what these take alone.
    """

    level: str
    text: str
    group: str
    bits_per_component: float
    kl: np.ndarray
    same_top: np.ndarray
    against: str | None = None
    alone_bits: float | None = None


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of a level on some texts. p99 is over all their tokens."""

    level: str
    group: str  # "worst": each figure is that of the group where it is worst; bits are the mean of all texts
    texts: int
    bits_per_component: float
    mean_kl: float
    kl_p99: float
    same_top: float  # share
    against: str | None = None  # as in Outcome
    of_alone: float | None = None  # bits, as a share of what the same blocks take alone


def of_groups(outcomes: Sequence[Outcome]) -> list[Figures]:
    """A row for each level and group, and for each level a last one, "worst"; alone and against others apart.

    Errors: KvtrieError when a KL is not a number: the model's output on restored KV is none.
    """
    rows = []
    for level, against in dict.fromkeys((outcome.level, outcome.against) for outcome in outcomes):
        of_level = [outcome for outcome in outcomes if (outcome.level, outcome.against) == (level, against)]
        groups = [_of_group(group, [outcome for outcome in of_level if outcome.group == group])
                  for group in dict.fromkeys(outcome.group for outcome in of_level)]
        bits, of_alone = _bits(of_level)
        rows += [*groups, Figures(level, "worst", len(of_level), bits, max(row.mean_kl for row in groups),
                                  max(row.kl_p99 for row in groups), min(row.same_top for row in groups), against,
                                  of_alone)]
    return rows


def worst(rows: Sequence[Figures]) -> dict[str, Figures]:
    """The row "worst" of each level, coded alone."""
    return {row.level: row for row in rows if row.group == "worst" and row.against is None}


def worst_against(rows: Sequence[Figures]) -> dict[str, Figures]:
    """The row "worst" of each level that was coded against another."""
    return {row.level: row for row in rows if row.group == "worst" and row.against is not None}


def claims(rows: Sequence[Figures]) -> dict[str, Figures]:
    """What each level may claim: its worst group, coded alone or against others. Bits are those alone."""
    again = worst_against(rows)
    return {level: row if level not in again else dataclasses.replace(
        row, mean_kl=max(row.mean_kl, again[level].mean_kl), kl_p99=max(row.kl_p99, again[level].kl_p99),
        same_top=min(row.same_top, again[level].same_top)) for level, row in worst(rows).items()}


def measured_json(body_digest: str, rows: Sequence[Figures], about: dict) -> dict:
    """What `kvtrie profile seal --measured` reads; `about` is for people.

    A level claims what its worst group had, coded alone or against others.
    """
    return {
        "body_digest": body_digest,
        "levels": [{"quality": level, "bits_per_component": row.bits_per_component, "mean_kl": row.mean_kl,
                    "kl_p99": row.kl_p99} for level, row in claims(rows).items()],
        "groups": [dataclasses.asdict(row) for row in rows if row.group != "worst"],
        "about": about,
    }


def _of_group(group: str, texts: Sequence[Outcome]) -> Figures:
    kl = np.concatenate([outcome.kl for outcome in texts])
    if not np.isfinite(kl).all():
        raise KvtrieError(f"level {texts[0].level}: the model's output on restored KV of group {group} is not a number")
    bits, of_alone = _bits(texts)
    return Figures(texts[0].level, group, len(texts), bits, max(0.0, float(kl.mean())),
                   max(0.0, float(np.quantile(kl, 0.99))),
                   float(np.concatenate([outcome.same_top for outcome in texts]).mean()), texts[0].against, of_alone)


def _bits(texts: Sequence[Outcome]) -> tuple[float, float | None]:
    bits = float(np.mean([outcome.bits_per_component for outcome in texts]))
    alone = [outcome.alone_bits for outcome in texts if outcome.alone_bits is not None]
    return bits, bits / float(np.mean(alone)) if alone else None
