"""How fast the residual codec is on one core, and what restoring KV costs beside computing it.

Real KV of SmolLM2-135M-Instruct with the profiles of "kvtrie high" and "fast" (schemes.py), and synthetic
KV of an 8B model's shape (32 layers, 8 KV heads of 128, matrices per head). MB/s of raw bfloat16 KV by
the CPU time of one thread, with the best instruction set of the machine.
"""

import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "model"))
# pylint: disable=wrong-import-position
import codec_tool
import corpus
import kv_files
import run
import schemes
import smollm2_weights
import workers

_BENCH = pathlib.Path(__file__).resolve().parents[3] / "build/release/tests/bench/residual_bench"
_LINE = re.compile(r"(?P<bits>[\d.]+) bit +encode +(?P<encode>\d+) MB/s +decode +(?P<decode>\d+) MB/s"
                   r" +entropy decoding alone +(?P<symbols>\d+) MB/s")
_EIGHT_B = ("--layers", 32, "--heads", 8, "--head-dim", 128, "--per-head", 1)


def measure(*arguments: object) -> dict[str, float]:
    """bits, and MB/s of encode, decode and symbols, with the last instruction set that is listed."""
    output = subprocess.run([_BENCH, *map(str, arguments)], check=True, capture_output=True,
                            text=True).stdout
    return {key: float(value) for key, value in _LINE.search(output.splitlines()[-1]).groupdict()
            .items()}


def compute_seconds(token_ids: tuple[int, ...]) -> float:
    """CPU seconds of the model's prefill, the faster of two."""
    model, best = workers.model(), float("inf")
    for _ in range(2):
        start = time.thread_time()
        model.extend(model.new_cache(len(token_ids)), token_ids, logits="none")
        best = min(best, time.thread_time() - start)
    return best


def main() -> int:
    if not _BENCH.is_file():
        print("no build/release/tests/bench/residual_bench: build target residual_bench")
        return 1
    with workers.Pool(1) as pool:
        texts, _ = run.test_texts(quick=True)
        folder = kv_files.prepare("test", texts, with_queries=False, pool=pool)
        calibration = run.calibration_folder(pool)
    text = next(t for t in texts if t.domain == corpus.PROSE.domain)
    config = smollm2_weights.load_config()
    token_bytes = 4 * config.layer_count * config.kv_head_count * config.head_dim

    rows = {}
    for name in ("kvtrie high", "fast"):
        scheme = next(s for s in schemes.SCHEMES if s.name == name)
        profile = scheme.fitted(calibration).profile
        rows[name] = measure("--profile", profile, "--tokens", folder / f"{text.name}.tokens",
                             "--kv", folder / f"{text.name}.kv")
    rows["8B shape, synthetic"] = measure(*_EIGHT_B)
    print(f"{'':24}{'bits':>8}{'encode':>8}{'decode':>8}{'entropy decoding':>18}  MB/s")
    for name, row in rows.items():
        print(f"{name:24}{row['bits']:8.3f}{row['encode']:8.0f}{row['decode']:8.0f}"
              f"{row['symbols']:18.0f}")
    token_ids = text.token_ids[:1000]
    computed = compute_seconds(token_ids)
    restored = len(token_ids) * token_bytes / 1e6 / rows["kvtrie high"]["decode"]
    print(f"{len(token_ids)} tokens: computed in {computed:.3f} s of one core, "
          f"decoded in {restored:.3f} s: {computed / restored:.1f} times sooner")
    return 0


if __name__ == "__main__":
    sys.exit(main())
