"""From outcomes to rows, a table and a picture.

A row: name, family, domain, texts (how many), bits (per component), kl and kl_p99 (nats; the mean, and the
99th percentile over all positions), dnll (mean change of the negative log likelihood, nats per token),
dnll_ci (its 95 % confidence interval, Student's t over texts, each paired with itself; None for one
text), top1 (share of positions whose most probable token stays the same), bits_ratio (bits over those
that the family compared_with takes for the same mean KL on the same texts; None where it has no such
KL). Domain ALL is the mean over the English domains, which have equally many texts. Rows of sessions have the domain SESSION, and what was
measured as `measure`.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

import corpus
import judge
import schemes

ALL = "all"
SESSION = "session"

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; more are taken as 30.
_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
                2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                2.060, 2.056, 2.052, 2.048, 2.045, 2.042)

_BIT_TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One scheme on one text. measure: of a session, else empty."""

    scheme: str
    text: str
    domain: str
    bits: float
    divergence: judge.Divergence
    measure: str = ""


def rows(chosen: Sequence[schemes.Scheme], outcomes: Iterable[Outcome]) -> list[dict]:
    """A row per scheme and domain, ALL, and each measure of sessions, where there are outcomes."""
    outcomes = list(outcomes)
    found = []
    for scheme in chosen:
        own = [outcome for outcome in outcomes if outcome.scheme == scheme.name]
        at_once = [outcome for outcome in own if not outcome.measure]
        english = [outcome for outcome in at_once if outcome.domain in corpus.ENGLISH_DOMAINS]
        groups = [(ALL, "", english)]
        groups += [(domain, "", [outcome for outcome in at_once if outcome.domain == domain])
                   for domain in corpus.DOMAINS]
        measures = dict.fromkeys(outcome.measure for outcome in own if outcome.measure)
        groups += [(SESSION, measure, [outcome for outcome in own if outcome.measure == measure])
                   for measure in measures]
        reference = {other.name for other in chosen if other.family == scheme.compared_with}
        others = [o for o in outcomes if o.scheme in reference and not o.measure]
        found += [_row(scheme, domain, measure, group, others)
                  for domain, measure, group in groups if group]
    return found


def bits_at_kl(curve: Iterable[tuple[float, float]], kl: float) -> float | None:
    """The bits at which a curve of (bits, KL) has this KL, straight in logarithms; up to twice beyond its
    ends. None: further away, or fewer than two points."""
    points = sorted((k, bits) for bits, k in curve if k > 0)
    if len(points) < 2 or not points[0][0] / 2 <= kl <= points[-1][0] * 2:
        return None
    x = np.log([k for k, _ in points])
    y = np.log([bits for _, bits in points])
    i = int(np.clip(np.searchsorted(x, math.log(kl)), 1, len(points) - 1))
    slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
    return float(np.exp(y[i - 1] + slope * (math.log(kl) - x[i - 1])))


def _curve(outcomes: Iterable[Outcome]) -> list[tuple[float, float]]:
    """(bits, KL) of each scheme, means over its texts."""
    found = {}
    for outcome in outcomes:
        found.setdefault(outcome.scheme, []).append((outcome.bits, outcome.divergence.kl.mean()))
    return [tuple(map(float, np.mean(points, axis=0))) for points in found.values()]


def _row(scheme: schemes.Scheme, domain: str, measure: str, group: list[Outcome],
         others: list[Outcome]) -> dict:
    kl = np.concatenate([outcome.divergence.kl for outcome in group])
    changes = [float(outcome.divergence.nll_change.mean()) for outcome in group]
    row = {
        "name": scheme.name,
        "family": scheme.family,
        "domain": domain,
        "texts": len(group),
        "bits": float(np.mean([outcome.bits for outcome in group])),
        "kl": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "dnll": float(np.mean(changes)),
        "dnll_ci": confidence_interval(changes),
        "top1": float(np.concatenate([outcome.divergence.same_top for outcome in group]).mean()),
    }
    if measure:
        return row | {"measure": measure}
    texts = {outcome.text for outcome in group}
    expected = bits_at_kl(_curve(o for o in others if o.text in texts), row["kl"])
    return row | {"bits_ratio": None if expected is None else row["bits"] / expected}


def confidence_interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval [low, high] of the mean, by Student's t."""
    if len(values) < 2:
        return None
    quantile = _T_QUANTILES[min(len(values) - 1, len(_T_QUANTILES)) - 1]
    half_width = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return [float(np.mean(values)) - half_width, float(np.mean(values)) + half_width]


def table(all_rows: Sequence[dict]) -> str:
    """What a person reads: English, German, then sessions."""
    parts = []
    ablations = {scheme.name for scheme in schemes.SCHEMES if scheme.ablation}
    english = "English, mean over " + ", ".join(corpus.ENGLISH_DOMAINS)
    for domain, title, among_ablations in (
            (ALL, english, False), (corpus.GERMAN.domain, corpus.GERMAN.domain, False),
            (ALL, f"Ablations, {english}", True),
            (corpus.CODE.domain, f"Ablations, {corpus.CODE.domain}", True),
            (corpus.GERMAN.domain, f"Ablations, {corpus.GERMAN.domain}", True)):
        own = [row for row in all_rows
               if row["domain"] == domain and (row["name"] in ablations) == among_ablations]
        if own:
            parts.append(_domain_table(f"{title}; texts: {own[0]['texts']}", own))
    own = [row for row in all_rows if row["domain"] == SESSION]
    if own:
        parts.append(_session_table(own))
    return "\n\n".join(parts)


def _domain_table(title: str, own: Sequence[dict]) -> str:
    lines = [title, f"{'':30}{'bits':>7}{'KL':>10}{'p99 KL':>9}   "
             f"{'change of NLL, 95 %':21}{'top-1':>7}   bits at equal KL"]
    for row in own:
        ci = row["dnll_ci"]
        spread = "" if ci is None else f" ± {(ci[1] - ci[0]) / 2:.4f}"
        change = f"{row['dnll']:+.4f}{spread}"
        ratio = "" if row["bits_ratio"] is None else f"{row['bits_ratio']:10.2f} x"
        lines.append(f"{row['name']:30}{row['bits']:7.3f}{row['kl']:10.5f}{row['kl_p99']:9.4f}   "
                     f"{change:21}{row['top1']:7.3f}{ratio}".rstrip())
    return "\n".join(lines)


def _session_table(own: Sequence[dict]) -> str:
    """Mean KL by measure; a measure that a row lacks is empty."""
    measures = list(dict.fromkeys(row["measure"] for row in own))
    lines = ["Sessions, mean KL", f"{'':30}{'bits':>7}" + "".join(f"{m:>14}" for m in measures)]
    for name in dict.fromkeys(row["name"] for row in own):
        named = {row["measure"]: row for row in own if row["name"] == name}
        cells = [f"{named[m]['kl']:14.5f}" if m in named else f"{'':14}" for m in measures]
        lines.append(f"{name:30}{next(iter(named.values()))['bits']:7.3f}{''.join(cells)}")
    return "\n".join(lines)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (bits, KL) that no other has both fewer bits and less KL than, by bits."""
    best, kept = math.inf, []
    for bits, kl in sorted(points):
        if kl < best:
            best = kl
            kept.append((bits, kl))
    return kept


def draw(all_rows: Sequence[dict], path: pathlib.Path) -> None:
    """Bits against KL over the English domains, the frontier of each family as a line."""
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("agg")
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel

    ablations = {scheme.name for scheme in schemes.SCHEMES if scheme.ablation}
    own = [row for row in all_rows
           if row["domain"] == ALL and row["kl"] > 0 and row["name"] not in ablations]
    figure, axes = pyplot.subplots(figsize=(10, 7))
    for index, family in enumerate(dict.fromkeys(row["family"] for row in own)):
        members = [row for row in own if row["family"] == family]
        line, = axes.plot(*zip(*frontier((row["bits"], row["kl"]) for row in members)),
                          linewidth=1.2)
        axes.scatter([row["bits"] for row in members], [row["kl"] for row in members], s=22,
                     color=line.get_color(), label=family)
        for row in members:
            # Of two neighbouring families, one has its names above its points and one below.
            axes.annotate(row["name"], (row["bits"], row["kl"]), xytext=(4, (4, -10)[index % 2]),
                          textcoords="offset points", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    limits = axes.get_xlim()
    axes.set_xticks([bits for bits in _BIT_TICKS if limits[0] < bits < limits[1]])
    axes.set_xlim(limits)
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("bits per component of K and V, every byte counted")
    axes.set_ylabel("mean KL to the exact cache, nats")
    axes.set_title("A restored prefix of 768 tokens, judged on the next 256 (English)")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
