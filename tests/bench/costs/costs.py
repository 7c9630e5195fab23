"""What coding KV costs beside computing it again: on paper, and held against this CPU.

COSTS.md (storage/codec) says what the tables mean; they are printed here, and a test holds one against the other.

  costs.py                  the tables, from measured.json
  costs.py --check          what the fit of CPU costs predicts of shapes that it has not seen
  costs.py --measure        measures anew with codec_costs_bench, real KV included, and writes measured.json
  costs.py --write          puts the tables, and the picture, into the folder of COSTS.md
  costs.py --json FILE --png FILE
"""

import argparse
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import cpu_costs
import model_shapes
from model_shapes import PUBLIC, Shape, Shares

_HERE = pathlib.Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
BENCH = _ROOT / "build/release/tests/bench/codec_costs_bench"
MEASURED = _HERE / "measured.json"
DOCUMENT = _ROOT / "storage/codec/COSTS.md"
PICTURE = DOCUMENT.with_name("costs.png")

RAW_BITS = 16  # bfloat16
# Of SmolLM2-135M-Instruct (QUALITY.md, English). No other model's were measured; all are taken as equal.
STORED_BITS = {"raw": RAW_BITS, "exact": 8.633, "high": 0.502}
# A plane's matrices are read once for so many tokens that are coded together.
CPU_BATCH = 256
CONTEXTS = (8192, 65536)

# Steps of the entropy coder per component of an exact frame: symbol, low bits, bits within the cell.
_EXACT_STEPS = 3
# Integer operations of one lane for a value, counted by hand in residual_kernels.h and rans_lanes.h: expected
# scale and class 22, symbol and state 17, escape and low bits 8, energy 9, restored value 10.
_DECODE_VALUE_OPS = 66
# Quantizing takes 14 more, and what is recorded is coded in a second pass with a division.
_ENCODE_VALUE_OPS = 110


@dataclasses.dataclass(frozen=True)
class Device:
    """On paper. Peaks are dense; `reached` is the share of any of them that is taken for what is reached."""

    name: str
    bf16_flops: float
    int8_ops: float
    float32_flops: float
    int32_ops: float
    bytes_per_second: float
    clock_hertz: float
    reached: float = 0.5

    def seconds(self, operations: float, peak: float, byte_count: float) -> float:
        """A step is as slow as the slower of its sides."""
        return max(operations / peak, byte_count / self.bytes_per_second) / self.reached

    def side(self, operations: float, peak: float, byte_count: float) -> str:
        return "operations" if operations / peak > byte_count / self.bytes_per_second else "bytes"


# NVIDIA H200 SXM data sheet: 1,979 TFLOP/s bf16 and 3,958 TOP/s int8 with sparsity, so half of it dense; 67 TFLOP/s
# float32; 4.8 TB/s. NVIDIA H100 architecture white paper (same chip): 132 SMs of 64 int32 lanes; the clock is what 67
# TFLOP/s of 132 SMs with 128 lanes of two operations come from.
H200 = Device("H200", 989.5e12, 1979e12, 67e12, 132 * 64 * 1.98e9, 4.8e12, 1.98e9)
# Assumed, not measured: the values of a token are decoded one after the other, each in so many cycles.
_CYCLES_PER_VALUE = 200


@dataclasses.dataclass(frozen=True)
class Step:
    """Of n tokens on a device, per component: operations of one kind, and bytes that it has to move."""

    name: str
    peak: str  # a field of Device
    operations: float
    byte_count: float

    @property
    def intensity(self) -> float:
        return self.operations / self.byte_count


def device_steps(shape: Shape, shares: Shares, tokens: int, bits: float, exact: bool = False) -> dict[str, list[Step]]:
    """Steps of "decode" and "encode" as kernels that each read and write the device's memory once."""
    of = model_shapes.operations(shape, shares)
    matrices = {name: size / tokens for name, size in model_shapes.matrix_bytes(shape).items()}
    c = of["components"]
    turned = 3 * of["rope_components"]

    def step(name: str, peak: str, operations: float, byte_count: float) -> Step:
        return Step(name, peak, operations / c, byte_count / c)

    predict = step("predict", "int8_ops", 2 * of["predict_macs"], of["input_codes"] + matrices["weights"] + 4 * c)
    codes = step("codes", "float32_flops", 6 * c, 4 * c + c)
    write = step("RoPE, dtype", "float32_flops", turned + 4 * c, 4 * c + 2 * c)
    if exact:
        symbols = step("symbols", "int32_ops", _DECODE_VALUE_OPS * _EXACT_STEPS * c, bits / 8 * c + 4 * c + 2 * c)
        return {"decode": [predict, symbols, codes, write], "encode": []}
    add = step("add values", "float32_flops", 2 * of["add_macs"], 4 * of["coded_values"] + matrices["basis"] + 8 * c)
    symbols = step("symbols", "int32_ops", _DECODE_VALUE_OPS * of["entropy_steps"],
                   bits / 8 * c + 4 * of["coded_values"])
    read = step("RoPE, dtype", "float32_flops", turned + 4 * c, 2 * c + 4 * c)
    analyze = step("analyze", "float32_flops", 2 * of["analyze_macs"] + c, 12 * c + matrices["analysis"])
    importance = step("importance", "float32_flops",
                      2 * of["importance_macs"] + 20 * of["importance_scores"] + 2 * of["importance_features"] + 2 * c,
                      4 * c + 4 * of["importance_features"] + 4 * of["importance_macs"] / tokens)
    coded = step("symbols", "int32_ops", _ENCODE_VALUE_OPS * of["entropy_steps"],
                 8 * of["coded_values"] + 8 * of["entropy_steps"] + bits / 8 * c)
    return {"decode": [predict, symbols, add, codes, write],
            "encode": [read, importance, predict, analyze, coded, add, codes]}


def device_decode_seconds(device: Device, shape: Shape, shares: Shares, tokens: int, level: str) -> float:
    """Of all tokens. The symbols of a token take their time one after the other, however many tokens there are."""
    if level == "raw":
        return 0
    exact = level == "exact"
    total = 0.0
    for step in device_steps(shape, shares, tokens, STORED_BITS[level], exact)["decode"]:
        count = shape.components * tokens
        seconds = device.seconds(step.operations * count, getattr(device, step.peak), step.byte_count * count)
        if step.name == "symbols":
            values = shape.components * (_EXACT_STEPS if exact else shares.coded)
            seconds = max(seconds, values * _CYCLES_PER_VALUE / device.clock_hertz)
        total += seconds
    return total


def recompute_flops(shape: Shape, tokens: int) -> float:
    """Of a prefix of so many tokens, each of which sees those before it: half of them on average."""
    return tokens * shape.forward_flops(tokens / 2)


def stored_bytes(shape: Shape, tokens: int, level: str) -> float:
    return tokens * shape.components * STORED_BITS[level] / 8


def break_even(byte_count: float, decode_seconds: float, recompute_seconds: float) -> float | None:
    """Bytes per second from which on fetching and decoding takes less than computing; None: it never does."""
    left = recompute_seconds - decode_seconds
    return byte_count / left if left > 0 else None


class Measured:
    """Rows of codec_costs_bench on one machine."""

    def __init__(self, data: dict):
        self.machine: str = data["machine"]
        self.rows: list[dict] = data["rows"]
        self.costs = cpu_costs.fit([row for row in self.rows if row["fit"]])

    @property
    def real(self) -> dict:
        return next(row for row in self.rows if row["fitted"])

    @property
    def shares(self) -> Shares:
        """Of real KV at level high."""
        of = self.real["operations"]
        return Shares(of["coded_values"] / of["components"], of["nonzero_values"] / of["components"],
                      of["entropy_steps"] / of["coded_values"])

    @property
    def gemm_flops(self) -> float:
        """Float32, of one thread."""
        return 2 * max(row["alone"]["gemm_macs_per_second"] for row in self.rows)

    def row_of(self, shape: Shape) -> dict:
        return next(row for row in self.rows if row["name"] == shape.name)

    def decode_seconds(self, shape: Shape, level: str) -> float:
        """Per token, on one thread."""
        if level == "raw":
            return 0
        return self.row_of(shape)["seconds"]["decode" if level == "high" else "decode_exact"]


def _made(name: str, layers: int, kv_heads: int, dim: int, query_heads: int, per_head: bool = False,
          v_head_dim: int | None = None, inputs: int = 4) -> Shape:
    v_head_dim = dim if v_head_dim is None else v_head_dim
    return Shape(name, layers, kv_heads, dim, v_head_dim, query_heads, v_head_dim > 0, 0, 0, 0, per_head, inputs)


# What is predicted is fitted to these, chosen so that kinds of operations differ in share. Names say layers x KV heads
# x head dimension.
FITTED = (
    (_made("16x2x64", 16, 2, 64, 8), Shares(0.97, 0.11, 1)),
    (_made("24x4x64 per head", 24, 4, 64, 16, True), Shares(0.97, 0.11, 1)),
    (_made("12x8x128 per head", 12, 8, 128, 32, True), Shares(0.9, 0.2, 1)),
    (_made("20x1x256", 20, 1, 256, 8), Shares(0.97, 0.05, 1)),
    (_made("24x3x64 one layer", 24, 3, 64, 9, inputs=1), Shares(0.6, 0.05, 1)),
    (_made("12x6x64", 12, 6, 64, 24), Shares(0.97, 0.2, 1)),
    (_made("16 latent 384", 16, 1, 384, 16, v_head_dim=0), Shares(0.97, 0.11, 1)),
    (_made("10x8x64", 10, 8, 64, 32), Shares(0.8, 0.02, 1)),
    (_made("36x6x128 per head", 36, 6, 128, 24, True), Shares(0.97, 0.11, 1)),
)
# Held against what is predicted, beside the public shapes: those of Qwen2.5-0.5B and Llama-3.2-1B.
OTHERS = (_made("24x2x64", 24, 2, 64, 14), _made("16x8x64 per head", 16, 8, 64, 32, True))
REAL_NAME = "SmolLM2-135M, real KV"


def _bench(arguments: list[str], rounds: int) -> dict:
    output = subprocess.run([BENCH, *arguments, "--rounds", str(rounds)], check=True, capture_output=True, text=True)
    return json.loads(output.stdout)


def bench_arguments(shape: Shape, shares: Shares) -> list[str]:
    values = {"layers": shape.layers, "heads": shape.kv_heads, "head-dim": shape.k_head_dim,
              "v-head-dim": shape.v_head_dim, "query-heads": shape.query_heads, "per-head": int(shape.per_head),
              "inputs": shape.inputs, "coded-share": shares.coded, "nonzero-share": shares.nonzero}
    return [argument for name, value in values.items() for argument in (f"--{name}", str(value))]


def _least(one: object, other: object) -> object:
    """Of two runs of one shape: seconds as little, and rates as high, as either had."""
    if isinstance(one, dict):
        return {key: max(one[key], other[key]) if key.endswith("_per_second") else _least(one[key], other[key])
                for key in one}
    return min(one, other) if isinstance(one, float) else one


def measure(passes: int, rounds: int) -> dict:
    import real_kv  # pylint: disable=import-outside-toplevel
    real_arguments = real_kv.arguments()
    shares = Shares(0.97, 0.11, 1)  # about those of real KV, as synthetic ones are asked for
    plan = [(shape.name, True, bench_arguments(shape, of)) for shape, of in FITTED]
    plan += [(shape.name, False, bench_arguments(shape, shares)) for shape in (*PUBLIC, *OTHERS)]
    plan.append((REAL_NAME, False, real_arguments))
    rows: dict[str, dict] = {}
    # Pass by pass, so that a while in which the machine is slow spoils no shape.
    for number in range(passes):
        for name, is_fit, arguments in plan:
            print(f"pass {number + 1} of {passes}: {name}", file=sys.stderr, flush=True)
            row = {"name": name, "fit": is_fit, **_bench(arguments, rounds)}
            rows[name] = _least(rows[name], row) if name in rows else row
    processor = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    kernels = next(iter(rows.values()))["kernels"]
    name = processor[1] if processor else "unknown"
    return {"machine": f"{name}, {kernels}, one thread", "rows": list(rows.values())}


# --- tables


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)) + "\n"


def _short(value: float, digits: int = 3) -> str:
    """So many digits, without an exponent."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e" in text or abs(value) >= 1000 else text


def shapes_table() -> str:
    return _table(["shape", "config.json of", "layers", "KV heads x dim", "query heads", "matrices", "components",
                   "weights, 10^9"],
                  [[s.name, s.source, str(s.layers), f"{s.kv_heads} x {s.k_head_dim}", str(s.query_heads),
                    "per head" if s.per_head else "whole plane", f"{s.components:,}", f"{s.active_weights / 1e9:.3g}"]
                   for s in PUBLIC])


def shares_table(measured: Measured) -> str:
    of, real = measured.shares, measured.real
    return _table(["values coded", "not zero", "steps per coded value", "bits per component of this batch"],
                  [[f"{of.coded:.1%}", f"{of.nonzero:.1%}", f"{of.steps:.3f}", f"{real['bits_per_component']:.3f}"]])


def operations_table(shares: Shares) -> str:
    rows = []
    for shape in PUBLIC:
        of = model_shapes.operations(shape, shares)
        c = of["components"]
        recompute = [shape.forward_flops(tokens / 2) / c for tokens in (0, *CONTEXTS)]
        rows.append([shape.name, *(_short(of[kind] / c) for kind in (
            "predict_macs", "analyze_macs", "add_macs", "entropy_steps", "importance_macs")),
                     *(f"{value:,.0f}" for value in recompute)])
    return _table(["shape", "predict, int8", "analyze, f32", "add values, f32", "symbols", "importance, f32",
                   "recompute, FLOP", *(f"of {n // 1024}k tokens" for n in CONTEXTS)], rows)


def batch_bytes(shape: Shape, shares: Shares) -> dict[str, float]:
    """What the CPU's loops read and write for a component, matrices aside: most of it in caches."""
    of = model_shapes.operations(shape, shares)
    c, coded, steps = of["components"], of["coded_values"], of["entropy_steps"]
    rope = 8 * of["rope_components"]  # in place
    # Codes are gathered; products are int32, and rows float32.
    predict = 3 * of["input_codes"] + 8 * of["predict_products"] + 4 * c
    add, codes, scatter = 4 * c + 8 * c, 4 * c + c, 4 * c + 8 * coded
    decode = predict + 8 * coded + scatter + add + codes + rope + 4 * c + 2 * c
    read = 2 * c + 4 * c + rope + 2 * c
    importance = 4 * c + 8 * 9 * of["importance_scores"] + 8 * of["importance_features"]
    analyze = 12 * c + 24 * c  # residuals, and copies of blocks on both sides of the product
    targets = 12 * coded
    symbols = 8 * coded + 4 * steps + 12 * steps
    encode = read + importance + predict + analyze + targets + symbols + scatter + add + codes
    return {"decode": decode / c, "encode": encode / c}


def bytes_table(shares: Shares) -> str:
    rows = []
    for shape in PUBLIC:
        of, matrices = model_shapes.operations(shape, shares), model_shapes.matrix_bytes(shape)
        c, loops = of["components"], batch_bytes(shape, shares)
        rows.append([shape.name, *(f"{loops[direction]:.0f}" for direction in ("decode", "encode")),
                     _short(of["input_codes"] / c), *(_short(size / CPU_BATCH / c) for size in matrices.values()),
                     *(f"{matrices[name] / 1e6:,.0f}" for name in ("weights", "basis"))])
    return _table(["shape", "loops of decode", "of encode", "of that codes of inputs", f"weights / {CPU_BATCH}",
                   f"basis / {CPU_BATCH}", f"analysis / {CPU_BATCH}", "weights, MB", "basis, MB"], rows)


def roofline_table(shares: Shares) -> str:
    rows = []
    batches = (CPU_BATCH, CONTEXTS[0])
    shapes = (PUBLIC[0], PUBLIC[1], PUBLIC[4])
    first = device_steps(PUBLIC[0], shares, 1, STORED_BITS["high"])
    for direction in ("decode", "encode"):
        for place, step in enumerate(first[direction]):
            peak = getattr(H200, step.peak)
            row = [f"{direction}: {step.name}", _short(peak / H200.bytes_per_second)]
            for shape in shapes:
                for batch in batches:
                    of = device_steps(shape, shares, batch, STORED_BITS["high"])[direction][place]
                    side = H200.side(of.operations, peak, of.byte_count)
                    row.append(_short(of.intensity) + (" **ops**" if side == "operations" else ""))
            rows.append(row)
    middle = H200.bf16_flops / H200.bytes_per_second
    row = ["computing again, bf16 weights", _short(middle)]
    for shape in shapes:
        for batch in batches:
            # Each weight is read once; with so many tokens, each expert has some.
            intensity = batch * shape.active_weights / shape.all_weights
            row.append(_short(intensity) + (" **ops**" if intensity > middle else ""))
    rows.append(row)
    return _table(["step", "H200", *(f"{shape.name}, {batch}" for shape in shapes for batch in batches)], rows)


def break_evens(measured: Measured) -> list[dict]:
    """A row for each shape, context and level; bytes per second."""
    rows = []
    for shape in PUBLIC:
        for tokens in CONTEXTS:
            for level in STORED_BITS:
                byte_count, flops = stored_bytes(shape, tokens, level), recompute_flops(shape, tokens)
                cpu = (tokens * measured.decode_seconds(shape, level), flops / measured.gemm_flops)
                gpu = (device_decode_seconds(H200, shape, measured.shares, tokens, level),
                       flops / (H200.bf16_flops * H200.reached))
                rows.append({"shape": shape.name, "tokens": tokens, "level": level, "stored_bytes": byte_count,
                             "cpu_decode_seconds": cpu[0], "cpu_recompute_seconds": cpu[1],
                             "cpu_break_even": break_even(byte_count, *cpu),
                             "h200_decode_seconds": gpu[0], "h200_recompute_seconds": gpu[1],
                             "h200_break_even": break_even(byte_count, *gpu)})
    return rows


def _speed(value: float | None, unit: float) -> str:
    return "never" if value is None else _short(value / unit, 2)


_UNITS = {"cpu": ("core", "MB/s", 1e6), "h200": ("H200", "GB/s", 1e9)}


def break_even_table(measured: Measured) -> str:
    rows, found = [], break_evens(measured)
    for shape in PUBLIC:
        for tokens in CONTEXTS:
            of = {row["level"]: row for row in found if row["shape"] == shape.name and row["tokens"] == tokens}
            rows.append([shape.name, f"{tokens // 1024}k",
                         *(_speed(of[level][f"{device}_break_even"], unit)
                           for device, (_, _, unit) in _UNITS.items() for level in STORED_BITS)])
    return _table(["shape", "tokens", *(f"{name}: {level}, {text}" for name, text, _ in _UNITS.values()
                                        for level in STORED_BITS)], rows)


def seconds_table(measured: Measured) -> str:
    """Of a prefix of the shorter context at level high: what is behind the break-even speeds."""
    rows = []
    for row in break_evens(measured):
        if row["tokens"] != CONTEXTS[0] or row["level"] != "high":
            continue
        saved = row["stored_bytes"] * (RAW_BITS / STORED_BITS["high"] - 1)
        line = [row["shape"]]
        for device, (_, _, unit) in _UNITS.items():
            recompute, decode = row[f"{device}_recompute_seconds"], row[f"{device}_decode_seconds"]
            scale = 1 if device == "cpu" else 1e3
            line += [_short(scale * recompute), _short(scale * decode), f"{recompute / decode:,.0f}",
                     _speed(saved / decode, unit)]
        rows.append([*line, _short(row["cpu_decode_seconds"] / row["h200_recompute_seconds"], 2)])
    return _table(["shape", "core: recompute, s", "decode, s", "times", "faster than raw below, MB/s",
                   "H200: recompute, ms", "decode, ms", "times", "faster than raw below, GB/s",
                   "cores that decode as fast as an H200 computes"], rows)


def cpu_costs_table(measured: Measured) -> str:
    """Per operation, and its share of decode and encode of the first public shape."""
    row = measured.row_of(PUBLIC[0])
    of = cpu_costs.features(row)
    rows = []
    for step, kinds in measured.costs.items():
        for kind, cost in kinds.items():
            if cost == 0 or step == "decode_exact":
                continue
            shares = [cost * of.get(kind, 0) / cpu_costs.predict(measured.costs, direction, row)
                      if step in (*steps, f"{direction}_rest") else None
                      for direction, steps in (("decode", cpu_costs.DECODE), ("encode", cpu_costs.ENCODE))]
            rows.append([step.replace("_", " "), kind.replace("_", " "), f"{1e9 * cost:.2g}",
                         *("" if share is None else f"{share:.0%}" for share in shares)])
    return _table(["step", "for each of", "ns", "of decode", "of encode"], rows)


def machine_table(measured: Measured) -> str:
    """Products by themselves, with their matrices in the cache: the best that any shape reached."""
    def best(name: str) -> str:
        return f"{max(row['alone'][name] for row in measured.rows) / 1e9:.0f}"
    return _table(["machine", "int8 product, 10^9 multiply-adds/s", "float32 product of a basis",
                   "float32, 2048 x 2048"],
                  [[measured.machine, best("integer_macs_per_second"), best("float_macs_per_second"),
                    best("gemm_macs_per_second")]])


def check_table(measured: Measured) -> str:
    rows = []
    for row in measured.rows:
        if row["fit"]:
            continue
        line = [row["name"]]
        for direction in ("decode", "encode", "decode_exact"):
            seconds = row["seconds"][direction]
            line += [_short(1e6 * seconds), f"{cpu_costs.predict(measured.costs, direction, row) / seconds - 1:+.0%}"]
        rows.append(line)
    for name, counted in (("largest error", True), ("the same, zeros as in real KV", False)):
        rows.append([name, *(text for error in worst_errors(measured, is_fit=False, counted=counted).values()
                             for text in ("", f"{error:+.0%}"))])
    return _table(["not fitted to", "decode, us per token", "error", "encode", "error", "decode of exact",
                   "error"], rows)


def worst_errors(measured: Measured, is_fit: bool, counted: bool = True) -> dict[str, float]:
    """The largest relative error by direction, of shapes that were fitted to or were not.

    counted: with the operations that were counted; else with those of formulas, and shares of real KV.
    """
    shapes = {shape.name: shape for shape in (*PUBLIC, *OTHERS)} | {REAL_NAME: PUBLIC[0]}

    def error(row: dict, direction: str) -> float:
        if not counted:
            row = row | {"operations": model_shapes.operations(shapes[row["name"]], measured.shares)}
        return cpu_costs.predict(measured.costs, direction, row) / row["seconds"][direction] - 1

    return {direction: max((error(row, direction) for row in measured.rows if row["fit"] == is_fit), key=abs)
            for direction in ("decode", "encode", "decode_exact")}


def tables(measured: Measured) -> dict[str, str]:
    return {"shapes": shapes_table(), "shares": shares_table(measured), "machine": machine_table(measured),
            "operations": operations_table(measured.shares), "bytes": bytes_table(measured.shares),
            "roofline": roofline_table(measured.shares), "cpu": cpu_costs_table(measured),
            "check": check_table(measured), "seconds": seconds_table(measured),
            "break-even": break_even_table(measured)}


def with_tables(document: str, found: dict[str, str]) -> str:
    """The document with each table between its marks, `<!-- costs.py: NAME -->` and `<!-- end -->`."""
    for name, table in found.items():
        pattern = re.compile(rf"(<!-- costs\.py: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(pattern.findall(document)) != 1:
            raise ValueError(f"there must be one place for table {name}")
        document = pattern.sub(lambda match, table=table: match[1] + table + match[2], document)
    return document


def draw(measured: Measured, path: pathlib.Path) -> None:
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("agg")
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel
    found = [row for row in break_evens(measured) if row["tokens"] == CONTEXTS[0]]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    marks = {"raw": ("s", "tab:gray"), "exact": ("D", "tab:blue"), "high": ("o", "tab:green")}
    titles = ("one core of a CPU, measured", "H200, on paper")
    for axes, (device, (_, unit_name, unit)), title in zip(panels, _UNITS.items(), titles):
        for level, (mark, color) in marks.items():
            of_level = [row for row in found if row["level"] == level and row[f"{device}_break_even"] is not None]
            axes.scatter([row[f"{device}_break_even"] / unit for row in of_level],
                         [[s.name for s in PUBLIC].index(row["shape"]) for row in of_level],
                         marker=mark, color=color, label=f"{level}, {STORED_BITS[level]:g} bit")
        axes.set_xscale("log")
        axes.set_yticks(range(len(PUBLIC)), [shape.name for shape in PUBLIC])
        axes.set_xlabel(f"{unit_name} of link from which restoring 8k tokens wins")
        axes.set_title(title)
        axes.grid(True, axis="x", which="both", alpha=0.3)
    panels[0].invert_yaxis()
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=len(marks))
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--measured", type=pathlib.Path, default=MEASURED, help="in place of measured.json")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--png", type=pathlib.Path)
    options = parser.parse_args()
    if options.measure:
        if not BENCH.is_file():
            print(f"no {BENCH}: build target codec_costs_bench")
            return 1
        rows = measure(options.passes, options.rounds)
        options.measured.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    measured = Measured(json.loads(options.measured.read_text(encoding="utf-8")))
    found = tables(measured)
    if options.json:
        options.json.write_text(json.dumps(
            {"machine": measured.machine, "operations": {
                shape.name: model_shapes.operations(shape, measured.shares) for shape in PUBLIC},
             "cpu_costs": measured.costs, "break_even": break_evens(measured)}, indent=1) + "\n", encoding="utf-8")
    if options.png:
        draw(measured, options.png)
    if options.write:
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8"), found), encoding="utf-8")
        draw(measured, PICTURE)
    if options.check:
        print(found["check"])
        for row in measured.rows:
            errors = cpu_costs.step_errors(measured.costs, row)
            print(f"{row['name']}{' (fitted to)' if row['fit'] else ''}: "
                  + ", ".join(f"{step} {error:+.0%}" for step, error in errors.items()))
        for is_fit, of in ((True, "fitted to"), (False, "not fitted to")):
            print(f"worst of shapes {of}: "
                  + ", ".join(f"{name} {error:+.0%}" for name, error in worst_errors(measured, is_fit).items()))
    elif not options.write:
        print(f"{measured.machine}, {measured.gemm_flops / 1e9:.0f} GFLOP/s float32\n")
        for name, table in found.items():
            print(f"{name}\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
