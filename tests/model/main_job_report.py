"""What the main job shows a person: a table and a picture of its numbers."""

import pathlib

_GREY, _GREEN = "#9aa3ad", "#1f8a5b"


def table(numbers: dict) -> str:
    """The numbers as aligned lines."""
    sessions = [r for r in numbers["per_session"] if r["greedy_equal"] is not None]
    rows = [
        ("chat sessions, prompts", f"{numbers['sessions']}, {numbers['prompts']}"),
        ("tokens of all prompts", f"{numbers['tokens']:,}"),
        ("  of them restored, not computed", f"{numbers['tokens_reused']:,} "
         f"({numbers['tokens_reused'] / numbers['tokens']:.0%})"),
        ("KV of all sessions, raw", _megabytes(numbers["bytes_raw"])),
        ("KV stored", f"{_megabytes(numbers['bytes_stored'])} "
         f"(shared {numbers['sharing']:.1f} times)"),
        ("on disk, all files", _megabytes(numbers["bytes_disk"])),
        ("time to first token, median of sessions", ""),
        ("  recomputed", f"{numbers['ttft_recompute_s']:.3f} s"),
        ("  restored", f"{numbers['ttft_restore_s']:.3f} s "
         f"({numbers['ttft_speedup']:.1f} times sooner)"),
        (f"a stored prefix of {numbers['prefix_tokens']:,} tokens", ""),
        ("  recomputed", f"{numbers['prefix_recompute_s']:.3f} s"),
        ("  restored", f"{numbers['prefix_restore_s']:.3f} s "
         f"({numbers['prefix_speedup']:.1f} times sooner)"),
        ("after kill -9", f"{numbers['lost_after_kill']} of "
         f"{numbers['acknowledged_before_kill']:,} acknowledged blocks lost; "
         f"served again after {numbers['restart_s']:.2f} s"),
        ("fetched bytes equal those that were put", _yes(numbers["cache_bit_equal"])),
        ("logits equal those without the store", f"{_yes(numbers['logits_bit_equal'])}, every bit"),
        ("greedy answers equal those without it", f"{_yes(numbers['greedy_equal'])} "
         f"({len(sessions)} sessions of at most 1,000 tokens)"),
        ("faults found by verify", f"{numbers['verify_findings']}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows)


def draw(numbers: dict, path: pathlib.Path) -> None:
    """Time to first token per session, and bytes raw and stored per group of sessions."""
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("agg")
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel

    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(2.4, 1))
    sessions = sorted(numbers["per_session"], key=lambda session: session["tokens"])
    places = range(len(sessions))
    times.bar([x - 0.2 for x in places], [s["recompute_s"] for s in sessions], 0.4, color=_GREY,
              label="recomputed")
    times.bar([x + 0.2 for x in places], [s["restore_s"] for s in sessions], 0.4, color=_GREEN,
              label="restored from the store")
    times.set_xticks(places, [f"{s['tokens']:,}" for s in sessions], rotation=60)
    times.set_xlabel("session, by tokens of its prompt")
    times.set_ylabel("seconds to the first token")
    times.set_title(f"Time to first token: median {numbers['ttft_speedup']:.1f} times sooner")
    times.legend(frameon=False)

    groups = range(len(numbers["bytes_raw_by_group"]))
    for offset, name, color, label in ((-0.2, "bytes_raw_by_group", _GREY, "raw, each by itself"),
                                       (0.2, "bytes_stored_by_group", _GREEN, "stored, shared")):
        bars = sizes.bar([x + offset for x in groups], [n / 1e6 for n in numbers[name]], 0.4,
                         color=color, label=label)
        sizes.bar_label(bars, fmt="%.0f", fontsize=8)
    sizes.set_xticks(groups, [f"group {x + 1}" for x in groups])
    sizes.set_ylabel("MB of KV cache")
    sizes.set_title(f"Bytes of all sessions: {numbers['sharing']:.1f} times fewer")
    sizes.legend(frameon=False)
    for axes in (times, sizes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
