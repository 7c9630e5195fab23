"""What it does to a real model when KV of a document is taken from behind another prefix.

Pairs of sessions hold the same document (pairs.py). The first is put into a kvtrie-server, the second looked up
with text reuse allowed; the C++ client fetches the runs and turns K to its new positions (text_reuse_tool). The model
computes what is left, in order: the prefix, the first tokens of each run ("recomputed"), what lies between runs. Then
the 224 tokens behind the document are judged against the same on the exact cache. "saved" is the share of the prompt's
tokens, prefix and document, that is not computed; "prefix matters" is the same figure for the exact cache of the first
session: what it costs to read the document behind the wrong prefix altogether.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "model"))
# pylint: disable=wrong-import-position
import numpy as np

import codec_tool
import judge
import kv_blocks
import kv_files
import pairs
import references
import server_process
import smollm2
import smollm2_tokenizer
import smollm2_weights
import workers

_TOOL = pathlib.Path(__file__).resolve().parents[3] / "build/release/tests/bench/text_reuse_tool"
RECOMPUTED = (0, 8, 16, 32)
PREFIX_MATTERS = "prefix matters"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """name: of the row. saved: share of the prompt's tokens that were reused."""

    name: str
    kind: str
    saved: float
    divergence: judge.Divergence


def row_name(recomputed: int) -> str:
    return f"{recomputed} recomputed"


def fetch(server: str, jobs: list[dict], folder: pathlib.Path, profile: pathlib.Path | None = None) -> list[dict]:
    """What text_reuse_tool says of each job."""
    if not _TOOL.is_file():
        raise codec_tool.CodecToolMissing(f"no {_TOOL}: build target text_reuse_tool")
    (folder / "spec.json").write_text(codec_tool._spec())  # pylint: disable=protected-access
    (folder / "jobs.json").write_text(json.dumps(jobs))
    more = [] if profile is None else ["--profile", str(profile)]
    done = subprocess.run([str(_TOOL), "--spec", str(folder / "spec.json"), "--block-tokens", str(codec_tool.BLOCK_TOKENS),
                           "--server", server, "--jobs", str(folder / "jobs.json"), *more],
                          stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise codec_tool.CodecToolError(f"text_reuse_tool: exit code {done.returncode}")
    return json.loads(done.stdout)


def fill(model: smollm2.SmolLM2, token_ids: Sequence[int], reused: Sequence[Sequence[int]], kv: np.ndarray,
         room: int) -> smollm2.KvCache:
    """A cache of these tokens: what lies in `reused` is taken from `kv`, the rest computed on what stands before it.

    reused: [begin, end) ascending. kv: [layers, 2, tokens, KV heads, head_dim]. room: for more tokens behind.
    """
    cache = model.new_cache(len(token_ids) + room)
    for begin, end in (*reused, (len(token_ids), len(token_ids))):
        if begin > cache.length:
            model.extend(cache, token_ids[cache.length:begin], logits="none")
        if end > begin:
            cache.k[:, :, begin:end] = kv[:, 0, begin:end].swapaxes(1, 2)
            cache.v[:, :, begin:end] = kv[:, 1, begin:end].swapaxes(1, 2)
            cache.length = end
    return cache


def judge_reused(folder: pathlib.Path, pair: pairs.Pair, restored: pathlib.Path, said: dict) -> judge.Divergence:
    """A task."""
    session = pair.second
    blocks = -(-len(session.stored) // codec_tool.BLOCK_TOKENS)
    kv = kv_blocks.unpack_block(smollm2_weights.load_config(), restored.read_bytes(), blocks * codec_tool.BLOCK_TOKENS)
    cache = fill(workers.model(), session.stored, said["reused"], kv, len(session.continuation))
    candidate = judge.Distributions.of(workers.model().extend(cache, session.continuation, logits="all"))
    return judge.diverge(_exact(folder, session, session.continuation), candidate, session.continuation)


def judge_other_prefix(folder: pathlib.Path, pair: pairs.Pair) -> judge.Divergence:
    """A task."""
    next_ids = pair.second.continuation
    return judge.diverge(_exact(folder, pair.second, next_ids), _exact(folder, pair.first, next_ids), next_ids)


@functools.lru_cache(maxsize=64)
def _exact(folder: pathlib.Path, session: pairs.Session, next_ids: tuple[int, ...]) -> judge.Distributions:
    kv = kv_blocks.unpack_block(smollm2_weights.load_config(), (folder / f"{session.name}.kv").read_bytes(),
                                len(session.stored))
    return judge.continuation(workers.model(), kv, next_ids)


def document_first(pair: pairs.Pair) -> pairs.Pair:
    """The pair without the prefix of its first session."""
    begin, end = pair.first.document
    first = pairs.Session(f"{pair.first.name}-alone", pair.first.token_ids[begin:], (0, end - begin))
    return dataclasses.replace(pair, first=first)


def measure(of: Sequence[pairs.Pair], kv: pathlib.Path, server: str, level: str, folder: pathlib.Path,
            pool: workers.Pool, profile: pathlib.Path | None = None) -> list[Outcome]:
    tasks = [(judge_other_prefix, (kv, pair)) for pair in of]
    outcomes = [Outcome(PREFIX_MATTERS, pair.kind, 0.0, divergence)
                for pair, divergence in zip(of, pool.run(PREFIX_MATTERS, tasks))]
    for recomputed in RECOMPUTED:
        jobs = [{"first": str(kv / pair.first.name), "second": str(kv / pair.second.name), "salt": pair.name,
                 "skip": recomputed, "level": level, "out": str(folder / f"{index}.kv")}
                for index, pair in enumerate(of)]
        said = fetch(server, jobs, folder, profile)
        tasks = [(judge_reused, (kv, pair, folder / f"{index}.kv", said[index])) for index, pair in enumerate(of)]
        for pair, result, divergence in zip(of, said, pool.run(row_name(recomputed), tasks)):
            count = sum(end - begin for begin, end in result["reused"])
            outcomes.append(Outcome(row_name(recomputed), pair.kind, count / len(pair.second.stored), divergence))
    return outcomes


def rows(outcomes: Sequence[Outcome]) -> list[dict]:
    found = []
    for kind in pairs.KINDS:
        for name in dict.fromkeys(outcome.name for outcome in outcomes):
            own = [outcome for outcome in outcomes if outcome.kind == kind and outcome.name == name]
            if not own:
                continue
            found.append({
                "kind": kind, "name": name, "pairs": len(own), "saved": float(np.mean([o.saved for o in own])),
                "kl_first16": float(np.mean([o.divergence.kl[:16].mean() for o in own])),
                **judge.summary([o.divergence for o in own]),
            })
    return found


def table(all_rows: Sequence[dict]) -> str:
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in all_rows):
        own = [row for row in all_rows if row["kind"] == kind]
        lines += ["", f"{kind}; pairs: {own[0]['pairs']}",
                  f"{'':20}{'saved':>8}{'KL':>10}{'first 16':>10}{'p99 KL':>9}{'worst pair':>12}{'NLL':>9}{'top-1':>8}"]
        for row in own:
            lines.append(f"{row['name']:20}{row['saved']:8.3f}{row['kl']:10.5f}{row['kl_first16']:10.4f}"
                         f"{row['kl_p99']:9.4f}{row['kl_worst_pair']:12.5f}{row['dnll']:+9.4f}{row['top1']:8.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there, one per line")
    parser.add_argument("--level", default="exact", help="of the stored session (default: exact)")
    parser.add_argument("--profile", type=pathlib.Path, help="a whole profile, for levels below exact")
    parser.add_argument("--quick", action="store_true", help="few pairs: does it all run?")
    parser.add_argument("--document-first", action="store_true", help="documents that begin their first session")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args()
    start = time.monotonic()
    every = pairs.test_pairs(smollm2_tokenizer.SmolLM2Tokenizer())
    of = every[::7] if options.quick else every
    if options.document_first:
        of = every = [document_first(pair) for pair in every if pair.kind == pairs.UNRELATED][::2]
    with workers.Pool(options.jobs) as pool, tempfile.TemporaryDirectory(prefix="kvtrie-text-reuse-") as name:
        folder = pathlib.Path(name)
        kv = references.prepare("pairs-alone" if options.document_first else "pairs-test", every, pool)
        with server_process.ServerProcess(server_process.server_binary(), folder,
                                          ("--noprefault_memory", "--text_reuse=all")) as server:
            outcomes = measure(of, kv, server.start().listen, options.level, folder, pool, options.profile)
    found = rows(outcomes)
    print(table(found))
    print(f"{time.monotonic() - start:.0f} s on {options.jobs} processes")
    if options.json:
        kv_files.write_atomically(options.json, "".join(json.dumps(row) + "\n" for row in found).encode())
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
