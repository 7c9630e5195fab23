"""Rows: median over rounds, and the table."""

import statistics

NAMES = ("peer", "op", "block_bytes", "clients", "batch")
FIGURES = ("gb_per_s", "cpu_s_per_gb", "keys_per_s", "p50_us", "p99_us")
FIELDS = (*NAMES, *FIGURES, "reason")
DECIMALS = {"gb_per_s": 3, "cpu_s_per_gb": 3, "keys_per_s": 0, "p50_us": 1, "p99_us": 1}


def median_rows(rows):
    """One row per name: the median of each figure over the rounds that have it.

    A reason stands beside no figures: it makes a row of its own.
    """
    groups = {}
    for row in rows:
        key = (*(row.get(name) for name in NAMES), row.get("reason"))
        groups.setdefault(key, []).append(row)
    result = []
    for key, group in groups.items():
        row = dict(zip((*NAMES, "reason"), key))
        for figure in FIGURES:
            values = [some[figure] for some in group if some.get(figure) is not None]
            row[figure] = round(statistics.median(values), DECIMALS[figure]) if values else None
        result.append({field: row[field] for field in FIELDS})
    return result


def table(rows, peer_order):
    """The rows as text, peers in their order and the sizes and operations of a peer together."""
    def place(row):
        return (peer_order.index(row["peer"]), row["block_bytes"] or 0, row["op"] or "",
                row["clients"] or 0, row["batch"] or 0)

    lines = [FIELDS] + [tuple(cell(field, row[field]) for field in FIELDS)
                        for row in sorted(rows, key=place)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(FIELDS) - 1)]
    text = []
    for line in lines:
        left = [line[i].ljust(widths[i]) for i in (0, 1)]
        right = [line[i].rjust(widths[i]) for i in range(2, len(widths))]
        text.append("  ".join([*left, *right, line[-1]]).rstrip())
    return "\n".join(text)


def cell(field, value):
    if value is None:
        return "" if field == "reason" else "-"
    if field in DECIMALS:
        return f"{value:.{DECIMALS[field]}f}"
    return str(value)
