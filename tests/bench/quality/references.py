"""What a document costs that is stored again behind another prefix, and what that does to a real model.

Pairs of sessions hold the same document (pairs.py). The first is stored at a level, the second is coded against
what a reader of the first gets: "against". "alone" codes it by itself, "reuse" takes the first's KV of the
document as it is. What follows the document is computed on the second session as it is restored, all of it at
level high, and compared with the same on the exact cache. Bits count every byte of the blocks of 16 tokens
that hold some of the document; "of alone" is their share of what "alone" takes.
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
import corpus
import judge
import kv_blocks
import kv_files
import pairs
import run
import schemes
import smollm2_tokenizer
import smollm2_weights
import workers

_TOOL = pathlib.Path(__file__).resolve().parents[3] / "build/release/tests/bench/reference_tool"
_ALL = "all"
LEVEL = "high"


@dataclasses.dataclass(frozen=True)
class Way:
    """How the second session is coded. reference: the level of the first. fit: flags of the fit of differences."""

    name: str
    way: str
    reference: str = LEVEL
    fit: tuple[tuple[str, object], ...] = ()
    level: str = LEVEL


def _against(reference: str, **fit: object) -> Way:
    flags = tuple((key.replace("_", "-"), value) for key, value in fit.items())
    said = "".join(f", {key} {value}" for key, value in flags)
    return Way(f"against {reference}{said}", "against", reference, flags)


WAYS = (
    Way("alone", "alone"),
    _against("near-exact"),
    Way("reuse of near-exact", "reuse", "near-exact"),
    _against("exact"),
    _against("high"),
    *(_against("near-exact", step_factor=factor) for factor in (2, 3, 6)),
    *(Way(f"reuse of {reference}", "reuse", reference) for reference in ("exact", "high")),
    Way("near-exact: alone", "alone", level="near-exact"),
    Way("near-exact: against exact", "against", "exact", level="near-exact"),
    Way("small: alone", "alone", level="small"),
    Way("small: against near-exact", "against", "near-exact", level="small"),
    Way("small: against high", "against", "high", level="small"),
)
TUNE_WAYS = (
    Way("alone", "alone"),
    *(_against("near-exact", step_factor=factor) for factor in (2, 4, 6)),
    _against("near-exact", step_factor=4, energy_prior=96, energy_carried=0.5),
    _against("near-exact", step_factor=4, importance=0.9),
    _against("near-exact", step_factor=4, inputs="below"),
    _against("near-exact", step_factor=4, rate_weight=0.16),
    Way("reuse of near-exact", "reuse", "near-exact"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    way: str
    kind: str
    bits: float
    divergence: judge.Divergence


def base_profile(pool: workers.Pool) -> pathlib.Path:
    return codec_tool.fit(run.calibration_folder(pool), {}, schemes._MATERIAL,  # pylint: disable=protected-access
                          kv_files.vocabulary())


def prepare(name: str, of: Sequence[pairs.Pair], pool: workers.Pool) -> pathlib.Path:
    texts = [corpus.Text(session.name, pair.domain, session.stored) for pair in of
             for session in (pair.first, pair.second)]
    return kv_files.prepare(name, texts, with_queries=False, pool=pool)


def fit_differences(base: pathlib.Path, samples: pathlib.Path, way: Way, folder: pathlib.Path) -> pathlib.Path:
    flags = [argument for key, value in way.fit for argument in (f"--{key}", str(value))]
    out = folder / ("profile" + "".join(flags).replace("-", "").replace(",", "").replace(".", "_"))
    if not out.exists():
        said = _run("fit", "--profile", base, "--samples", samples, "--material",
                    schemes._MATERIAL, "--out", out, *flags)  # pylint: disable=protected-access
        print(f"{out.name}: {said}", file=sys.stderr, flush=True)
    return out


def code(profile: pathlib.Path, jobs: list[dict], folder: pathlib.Path) -> list[dict]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return _run("code", "--profile", profile, "--jobs", folder / "jobs.json",
                "--block-tokens", codec_tool.BLOCK_TOKENS)


def _run(verb: str, *arguments: object):
    if not _TOOL.is_file():
        raise codec_tool.CodecToolMissing(f"no {_TOOL}: build target reference_tool")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        spec.write(codec_tool._spec())  # pylint: disable=protected-access
        spec.flush()
        done = subprocess.run([str(_TOOL), verb, "--spec", spec.name, *map(str, arguments)],
                              stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise codec_tool.CodecToolError(f"reference_tool {verb}: exit code {done.returncode}")
    return json.loads(done.stdout)


def whole_tokens(session: pairs.Session) -> int:
    return len(session.stored) // codec_tool.BLOCK_TOKENS * codec_tool.BLOCK_TOKENS


def document_bits(session: pairs.Session, block_bytes: Sequence[int]) -> float:
    """Over the blocks that hold some of the document."""
    config = smollm2_weights.load_config()
    own = block_bytes[session.document[0] // codec_tool.BLOCK_TOKENS:]
    components = 2 * config.layer_count * config.kv_head_count * config.head_dim
    return 8 * sum(own) / (len(own) * codec_tool.BLOCK_TOKENS * components)


def judge_restored(folder: pathlib.Path, pair: pairs.Pair, restored: pathlib.Path) -> judge.Divergence:
    """A task."""
    kv = kv_blocks.unpack_block(smollm2_weights.load_config(), restored.read_bytes(), whole_tokens(pair.second))
    next_ids = pair.second.token_ids[whole_tokens(pair.second):]
    return judge.diverge(_exact(folder, pair), judge.continuation(workers.model(), kv, next_ids), next_ids)


@functools.lru_cache(maxsize=32)
def _exact(folder: pathlib.Path, pair: pairs.Pair) -> judge.Distributions:
    session = pair.second
    kv = kv_blocks.unpack_block(smollm2_weights.load_config(), (folder / f"{session.name}.kv").read_bytes(),
                                len(session.stored))[:, :, :whole_tokens(session)]
    return judge.continuation(workers.model(), kv, session.token_ids[whole_tokens(session):])


def measure(ways: Sequence[Way], of: Sequence[pairs.Pair], kv: pathlib.Path, base: pathlib.Path,
            samples: pathlib.Path, folder: pathlib.Path, pool: workers.Pool) -> list[Outcome]:
    outcomes = []
    for way in ways:
        profile = base if way.way == "alone" else fit_differences(base, samples, way, folder)
        jobs = [{"first": str(kv / pair.first.name), "second": str(kv / pair.second.name), "way": way.way,
                 "reference": way.reference, "level": way.level, "out": str(folder / f"{index}.kv")}
                for index, pair in enumerate(of)]
        coded = code(profile, jobs, folder)
        tasks = [(judge_restored, (kv, pair, folder / f"{index}.kv")) for index, pair in enumerate(of)]
        own = [Outcome(way.name, pair.kind, document_bits(pair.second, result["block_bytes"]), divergence)
               for divergence, pair, result in zip(pool.run(way.name, tasks), of, coded)]
        outcomes += own
        for row in rows([way], own):
            print(f"  {row['kind']:10} {row['bits']:.4f} bits, KL {row['kl']:.5f}", file=sys.stderr, flush=True)
    return outcomes


def rows(ways: Sequence[Way], outcomes: Sequence[Outcome]) -> list[dict]:
    found = []
    for kind in (_ALL, *pairs.KINDS):
        alone = None
        for way in ways:
            own = [o for o in outcomes if o.way == way.name and kind in (_ALL, o.kind)]
            if not own:
                continue
            bits = float(np.mean([outcome.bits for outcome in own]))
            alone = bits if way.way == "alone" else alone
            found.append({
                "name": way.name, "kind": kind, "pairs": len(own), "bits": bits,
                "of_alone": None if alone is None else bits / alone,
                **judge.summary([outcome.divergence for outcome in own]),
            })
    return found


def table(all_rows: Sequence[dict]) -> str:
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in all_rows):
        own = [row for row in all_rows if row["kind"] == kind]
        lines += ["", f"{kind}; pairs: {own[0]['pairs']}",
                  f"{'':40}{'bits':>8}{'of alone':>10}{'KL':>10}{'p99 KL':>9}{'worst pair':>12}{'top-1':>8}"]
        for row in own:
            share = "" if row["of_alone"] is None else f"{row['of_alone']:.3f}"
            lines.append(f"{row['name']:40}{row['bits']:8.4f}{share:>10}{row['kl']:10.5f}{row['kl_p99']:9.4f}"
                         f"{row['kl_worst_pair']:12.5f}{row['top1']:8.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there, one per line")
    parser.add_argument("--tune", action="store_true", help="other ways, judged on texts of the fitted packages")
    parser.add_argument("--quick", action="store_true", help="few pairs and ways: does it all run?")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=[], metavar="NAME;...", help="only these")
    parser.add_argument("--profile", type=pathlib.Path, help="the draft that differences are fitted to; else it is fitted")
    parser.add_argument("--folder", type=pathlib.Path, help="keep profiles there; else they are fitted each time")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args()
    start = time.monotonic()
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    fit_pairs = pairs.fit_pairs(tokenizer)
    of = pairs.tune_pairs(tokenizer) if options.tune else pairs.test_pairs(tokenizer)
    ways = TUNE_WAYS if options.tune else WAYS
    if options.quick:
        of, ways = of[::7], ways[:2]
    if options.ways:
        ways = [way for way in ways if way.name in options.ways]
    with workers.Pool(options.jobs) as pool, tempfile.TemporaryDirectory(prefix="kvtrie-references-") as name:
        samples = prepare("pairs-fit", fit_pairs, pool)
        kv = prepare("pairs-tune" if options.tune else "pairs-test",
                     pairs.tune_pairs(tokenizer) if options.tune else pairs.test_pairs(tokenizer), pool)
        folder = options.folder or pathlib.Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = measure(ways, of, kv, options.profile or base_profile(pool), samples, folder, pool)
    found = rows(ways, outcomes)
    print(table(found))
    print(f"{time.monotonic() - start:.0f} s on {options.jobs} processes")
    if options.json:
        kv_files.write_atomically(options.json, "".join(json.dumps(row) + "\n" for row in found).encode())
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
