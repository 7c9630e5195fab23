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
    """One level on one text. kl: [tokens] float64. same_top: [tokens] bool, the likeliest token is the same."""

    level: str
    text: str
    group: str
    bits_per_component: float
    kl: np.ndarray
    same_top: np.ndarray


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


def of_groups(outcomes: Sequence[Outcome]) -> list[Figures]:
    """A row for each level and group, and for each level a last one, "worst".

    Errors: KvtrieError when a KL is not a number: the model's output on restored KV is none.
    """
    rows = []
    for level in dict.fromkeys(outcome.level for outcome in outcomes):
        of_level = [outcome for outcome in outcomes if outcome.level == level]
        groups = []
        for group in dict.fromkeys(outcome.group for outcome in of_level):
            texts = [outcome for outcome in of_level if outcome.group == group]
            kl = np.concatenate([outcome.kl for outcome in texts])
            if not np.isfinite(kl).all():
                raise KvtrieError(f"level {level}: the model's output on restored KV of group {group} is not a number")
            groups.append(Figures(level, group, len(texts),
                                  float(np.mean([outcome.bits_per_component for outcome in texts])),
                                  max(0.0, float(kl.mean())), max(0.0, float(np.quantile(kl, 0.99))),
                                  float(np.concatenate([outcome.same_top for outcome in texts]).mean())))
        rows += groups
        rows.append(Figures(level, "worst", len(of_level),
                            float(np.mean([outcome.bits_per_component for outcome in of_level])),
                            max(row.mean_kl for row in groups), max(row.kl_p99 for row in groups),
                            min(row.same_top for row in groups)))
    return rows


def worst(rows: Sequence[Figures]) -> dict[str, Figures]:
    """The row "worst" of each level."""
    return {row.level: row for row in rows if row.group == "worst"}


def measured_json(body_digest: str, rows: Sequence[Figures], about: dict) -> dict:
    """What `kvtrie profile seal --measured` reads; `about` is for people.

    A level claims what its worst group had.
    """
    return {
        "body_digest": body_digest,
        "levels": [{"quality": level, "bits_per_component": row.bits_per_component, "mean_kl": row.mean_kl,
                    "kl_p99": row.kl_p99} for level, row in worst(rows).items()],
        "groups": [dataclasses.asdict(row) for row in rows if row.group != "worst"],
        "about": about,
    }
