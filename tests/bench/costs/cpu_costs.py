"""What an operation of each kind costs this CPU, fitted to some shapes and held against others.

A step of the codec takes the operations of its kinds times what one of each costs; a direction takes its steps,
and what lies between them. Rows are those of codec_costs_bench, seconds are CPU seconds of one thread per token.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

# What one of two cores has of the last cache that they share. What a batch records of its steps is written by all
# planes before the first of it is read again.
_CACHE_BYTES = 16 << 20
_RECORD_BYTES = 4
# Values of 16 tokens lie a row apart: with rows of a whole page, all 16 go to one set of the first cache, of 8 ways.
_PAGE_BYTES = 4096

# Step -> what its time follows. *_bytes are those of a matrix that a batch reads once, per token.
_STEPS = {
    "predict": ("predict_macs", "input_codes", "predict_products", "weight_bytes"),
    "add_values": ("add_macs", "nonzero_values", "components", "basis_bytes"),
    "codes": ("components",),
    "scatter": ("coded_values", "components", "values_in_one_set"),
    "write": ("components", "rope_components"),
    "decode_symbols": ("entropy_steps",),
    "read": ("components", "rope_components"),
    "importance": ("importance_macs", "importance_scores", "importance_features", "components"),
    "analyze": ("analyze_macs", "components", "basis_bytes"),
    "targets": ("coded_values", "components", "values_in_one_set"),
    "encode_symbols": ("entropy_steps",),
    "rans": ("entropy_steps", "steps_beyond_cache"),
}
DECODE = ("predict", "decode_symbols", "scatter", "add_values", "codes", "write")
ENCODE = ("read", "importance", "predict", "analyze", "targets", "encode_symbols", "rans", "scatter", "add_values",
          "codes")
# Beside prediction and RoPE, all of these go with components.
_EXACT = ("components", "predict_macs", "predict_products", "weight_bytes")

Costs = Mapping[str, Mapping[str, float]]  # step -> kind of operation -> seconds


def features(row: Mapping) -> dict[str, float]:
    of_token = dict(row["operations"])
    of_token["weight_bytes"] = of_token["predict_macs"] / row["batch_tokens"]
    of_token["basis_bytes"] = 4 * of_token["analyze_macs"] / row["batch_tokens"]
    records = of_token["entropy_steps"] * row["batch_tokens"] * _RECORD_BYTES
    of_token["steps_beyond_cache"] = of_token["entropy_steps"] * max(0.0, 1 - _CACHE_BYTES / records)
    in_one_set = row["kv_heads"] * row["k_head_dim"] * 4 % _PAGE_BYTES == 0
    of_token["values_in_one_set"] = of_token["coded_values"] if in_one_set else 0.0
    return of_token


def not_negative_fit(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The coefficients, none below 0, whose products with [row][column] are nearest to `wanted`.

    Each row counts by its relative error. Of few columns: all choices of those above 0 are tried.
    """
    columns = columns / wanted[:, None]
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), size)):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part / np.linalg.norm(part, axis=0), np.ones(len(wanted)), rcond=None)[0]
            found = found / np.linalg.norm(part, axis=0)
            error = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(columns.shape[1]), error
                best[chosen] = found
    return best


def _fit(samples: Sequence[tuple[Mapping[str, float], float]], kinds: Sequence[str]) -> dict[str, float]:
    columns = np.array([[of.get(kind, 0.0) for kind in kinds] for of, _ in samples])
    used = columns.any(axis=0)
    found = np.zeros(len(kinds))
    found[used] = not_negative_fit(columns[:, used], np.array([seconds for _, seconds in samples]))
    return dict(zip(kinds, map(float, found)))


def fit(rows: Sequence[Mapping]) -> Costs:
    """Costs of each step; "decode_rest" and "encode_rest", what is between steps; and "decode_exact", as a whole."""
    costs = {}
    for step, kinds in _STEPS.items():
        samples = [(features(row), row[direction][step]) for row in rows
                   for direction in ("encode_steps", "decode_steps") if step in row[direction]]
        costs[step] = _fit(samples, kinds)
    for direction in ("decode", "encode"):
        rests = [(features(row), max(row["seconds"][direction] - sum(row[f"{direction}_steps"].values()),
                                     0.001 * row["seconds"][direction])) for row in rows]
        # A rest is small, and has the errors of all steps: one rate for all shapes.
        total = sum(rest for _, rest in rests)
        costs[f"{direction}_rest"] = {"components": total / sum(of["components"] for of, _ in rests)}
    costs["decode_exact"] = _fit([(features(row), row["seconds"]["decode_exact"]) for row in rows], _EXACT)
    return costs


def predict_step(costs: Costs, step: str, row: Mapping) -> float:
    of_token = features(row)
    return sum(cost * of_token.get(kind, 0.0) for kind, cost in costs[step].items())


def predict(costs: Costs, direction: str, row: Mapping) -> float:
    """Seconds per token of "decode", "encode" or "decode_exact"."""
    if direction == "decode_exact":
        return predict_step(costs, direction, row)
    steps = DECODE if direction == "decode" else ENCODE
    return sum(predict_step(costs, step, row) for step in (*steps, f"{direction}_rest"))


def step_errors(costs: Costs, row: Mapping) -> dict[str, float]:
    """Relative error of what is predicted of each step, by "direction step"."""
    found = {}
    for direction in ("decode", "encode"):
        for step, seconds in row[f"{direction}_steps"].items():
            found[f"{direction} {step}"] = predict_step(costs, step, row) / seconds - 1
    return found
