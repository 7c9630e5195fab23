"""Tables and the picture of a calibration. Needs no torch; the picture needs matplotlib."""

import pathlib
from collections.abc import Sequence

from kvtrie.calibrate import steps
from kvtrie.calibrate.figures import Figures
from kvtrie.errors import KvtrieError


def table(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Columns as wide as their widest cell, two blanks apart. The first row is the titles."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(right))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if is_right else cell.ljust(width)
                 for cell, width, is_right in zip(row, widths, right)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def figures_table(rows: Sequence[Figures], level_steps: dict[str, float]) -> str:
    cells = [("LEVEL", "STEP", "CODED", "GROUP", "TEXTS", "BITS", "OF ALONE", "MEAN KL", "KL P99", "SAME TOKEN",
              "PROMISE")]
    for row in rows:
        bound = steps.MEAN_KL_MAX[row.level]
        cells.append((row.level, f"{level_steps[row.level]:.3g}",
                      "alone" if row.against is None else f"against {row.against}", row.group, str(row.texts),
                      f"{row.bits_per_component:.3f}", "" if row.of_alone is None else f"{100 * row.of_alone:.0f} %",
                      f"{row.mean_kl:.5f}", f"{row.kl_p99:.4f}", f"{100 * row.same_top:.1f} %",
                      f"{'kept' if row.mean_kl <= bound else 'BROKEN'}, {bound:g}"))
    return table(cells, [False, True, False, False, True, True, True, True, True, True, False])


def draw(rows: Sequence[Figures], path: pathlib.Path, title: str) -> None:
    """Bits per component against mean KL, a line for each group.

    Broken lines: text that was coded against the same text behind another prefix. Errors: KvtrieError.
    """
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker
    except ImportError as error:
        raise KvtrieError("--png needs matplotlib: pip install './client/python[calibrate]'") from error
    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    colors = {}
    for group, is_alone in dict.fromkeys((row.group, row.against is None) for row in rows):
        of_group = sorted((row for row in rows if (row.group, row.against is None) == (group, is_alone)),
                          key=lambda row: row.bits_per_component)
        label = "the worst" if group == "worst" else group
        if not is_alone:
            label = "the worst, against finer" if group == "worst" else None
        line, = axes.plot([row.bits_per_component for row in of_group],
                          [max(row.mean_kl, 1e-7) for row in of_group], marker="o" if is_alone else "s",
                          linestyle="-" if is_alone else "--", linewidth=2.5 if group == "worst" else 1,
                          color="black" if group == "worst" else colors.get(group), label=label)
        colors[group] = line.get_color()
    for level, bound in steps.MEAN_KL_MAX.items():
        axes.axhline(bound, color="gray", linestyle=":", linewidth=1)
        axes.annotate(level, (1, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="gray")
    axes.set(xscale="log", yscale="log", xlabel="bits per component", ylabel="mean KL, nat", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(ticker.LogLocator(subs=(2, 3, 5)))
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise KvtrieError(f"--png {path}: cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
