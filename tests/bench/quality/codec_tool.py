"""The store's own codec, through its command `kvtrie profile`: fits profiles, codes texts."""

import base64
import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

import kv_blocks
import kv_files
import smollm2_weights

BLOCK_TOKENS = 16
MEAN_KL_MAX = {"near-exact": 0.001, "high": 0.01, "small": 0.05}  # nat, as storage/kv/quality.h has them
_BUILD = pathlib.Path(__file__).resolve().parents[3] / "build/release"
_PATH = _BUILD / "kvtrie"
_STORE_PATH = _BUILD / "tests/bench/coded_store_tool"


class CodecToolError(Exception):
    """The tool failed, or wrote what it should not."""


class CodecToolMissing(CodecToolError):
    """The tool is not built."""


@dataclasses.dataclass(frozen=True)
class Coded:
    """kv: as restored, float32 [layers, 2, tokens, KV heads, head_dim]. block_bytes: of each frame."""

    kv: np.ndarray
    block_bytes: list[int]


def tool_path() -> pathlib.Path:
    """Errors: CodecToolMissing."""
    if not _PATH.is_file():
        raise CodecToolMissing("no build/release/kvtrie: build target kvtrie")
    return _PATH


def fit(samples: pathlib.Path, options: Mapping[str, object], material: pathlib.Path | None = None,
        vocabulary: pathlib.Path | None = None) -> pathlib.Path:
    """The profile fitted with these flags; made where the cache lacks it, with the tool's progress.

    samples: a folder of kv_files.prepare. material: what gradients gave, where they were taken.
    vocabulary: a file of kv_files.vocabulary.
    """
    inputs: list[object] = ["--samples", samples]
    digest = hashlib.sha256(tool_path().read_bytes())
    digest.update(f"{samples.name} {sorted(options.items())} {_spec()}".encode())
    if material is not None:
        inputs += ["--material", material]
        digest.update(material.read_bytes())
    if vocabulary is not None:
        inputs += ["--vocabulary", vocabulary]
        digest.update(vocabulary.name.encode())
    profile = kv_files.cache_folder() / "profiles" / digest.hexdigest()[:24]
    if profile.exists():
        return profile
    profile.parent.mkdir(parents=True, exist_ok=True)
    unfinished = profile.with_name(f"{profile.name}.{os.getpid()}")
    try:
        _run([tool_path(), "profile", "fit"], *inputs, *_flags(options), "--json", "--out", unfinished, show_progress=True)
        os.replace(unfinished, profile)
    finally:
        unfinished.unlink(missing_ok=True)
    return profile


def code(profile: pathlib.Path, level: str, options: Mapping[str, object],
         token_ids: Sequence[int], kv: np.ndarray, block_tokens: int = BLOCK_TOKENS,
         importance: np.ndarray | None = None) -> Coded:
    """Encodes and decodes a session block by block, all of its blocks at once.

    importance: [tokens], 1 for an average one; None: as the profile estimates it.
    REQUIRES: a whole number of blocks, whose kv holds bfloat16 values.
    """
    summary, restored = _restore([tool_path(), "profile", "code"], profile, level, token_ids, kv,
                                 *_flags(options), block_tokens=block_tokens, importance=importance)
    block_bytes = summary["block_bytes"]
    if len(block_bytes) != len(token_ids) // block_tokens or sum(block_bytes) != summary["bytes"]:
        raise CodecToolError(f"kvtrie profile code: {len(block_bytes)} blocks of {sum(block_bytes)} "
                             f"bytes, and there are {len(token_ids) // block_tokens} of "
                             f"{summary['bytes']} in all")
    return Coded(restored, block_bytes)


def seal_unmeasured(draft: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """A whole profile that claims no more than its levels promise: for those who measure what they keep themselves."""
    config = smollm2_weights.load_config()
    shape = (config.layer_count, 2, BLOCK_TOKENS, config.kv_head_count, config.head_dim)
    summary, _ = _restore([tool_path(), "profile", "code"], draft, "high", [0] * BLOCK_TOKENS,
                          np.zeros(shape, np.float32))
    levels = [{"quality": level, "bits_per_component": 4, "mean_kl": kl, "kl_p99": kl}
              for level, kl in MEAN_KL_MAX.items()]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as measured:
        json.dump({"body_digest": summary["body_digest"], "levels": levels}, measured)
        measured.flush()
        _run_plain([tool_path(), "profile", "seal", draft, "--measured", measured.name, "--out", out])
    return out


def put_profile(profile: pathlib.Path, server: str) -> None:
    _run_plain([tool_path(), "--server", server, "profile", "put", profile])


def store(server: str, profile: pathlib.Path, level: str, token_ids: Sequence[int], kv: np.ndarray,
          worker: str | None = None) -> tuple[np.ndarray, dict]:
    """KV that went through a server at a level, as all kinds of readers got it, and what the tool measured.

    With `worker`, that one codes it.

    REQUIRES: as code.
    """
    more = ("--worker", worker) if worker else ()
    summary, restored = _restore([_STORE_PATH], profile, level, token_ids, kv, "--server", server, *more)
    return restored, summary


def _restore(command: list[object], profile: pathlib.Path, level: str, token_ids: Sequence[int],
             kv: np.ndarray, *more: object, block_tokens: int = BLOCK_TOKENS,
             importance: np.ndarray | None = None) -> tuple[dict, np.ndarray]:
    config = smollm2_weights.load_config()
    token_count = len(token_ids)
    if token_count % block_tokens != 0 or kv.shape[2] != token_count:
        raise ValueError(f"KV of {kv.shape[2]} tokens and {token_count} tokens: want equal numbers, "
                         f"a multiple of {block_tokens}")
    with tempfile.TemporaryDirectory(prefix="kvtrie-quality-") as name:
        folder = pathlib.Path(name)
        (folder / "in.tokens").write_bytes(np.array(token_ids, "<u4").tobytes())
        bits = np.ascontiguousarray(kv).view(np.uint32) >> 16
        (folder / "in.kv").write_bytes(bits.astype("<u2").tobytes())
        if importance is not None:
            (folder / "in.importance").write_bytes(importance.astype("<f4").tobytes())
            more = (*more, "--token-importance", folder / "in.importance")
        summary = _run(command, "--profile", profile, "--level", level,
                       "--block-tokens", block_tokens, *more,
                       "--tokens", folder / "in.tokens", "--kv", folder / "in.kv",
                       "--out", folder / "out.kv")
        return summary, kv_blocks.unpack_block(config, (folder / "out.kv").read_bytes(), token_count)


def _run(command: list[object], *arguments: object, show_progress: bool = False) -> dict:
    """The JSON object that a command prints."""
    name = " ".join([pathlib.Path(command[0]).name, *command[1:]])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        spec.write(_spec())
        spec.flush()
        done = subprocess.run(list(map(str, [*command, "--spec", spec.name, *arguments])),
                              stdout=subprocess.PIPE,
                              stderr=None if show_progress else subprocess.PIPE, text=True,
                              check=False)
    if done.returncode != 0:
        said = (done.stderr or "see above").strip().splitlines()[-3:]
        raise CodecToolError(f"{name}: exit code {done.returncode}: {' '.join(said)}")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise CodecToolError(f"{name}: its output is no JSON: {error}") from error


def _run_plain(command: list[object]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CodecToolError(f"{' '.join(map(str, command[1:]))}: exit code {done.returncode}: {done.stderr.strip()}")


def _flags(options: Mapping[str, object]) -> list[str]:
    """True is a switch."""
    return [argument for key, value in sorted(options.items())
            for argument in ([f"--{key}"] if value is True else [f"--{key}", str(value)])]


def _spec() -> str:
    """The model's identity: proto3's JSON of ModelSpec."""
    config = smollm2_weights.load_config()
    tokenizer = smollm2_weights.filled_cache_folder() / smollm2_weights.TOKENIZER_NAME
    digest = hashlib.sha256(tokenizer.read_bytes()).digest()
    run = {"layer_count": config.layer_count, "kv_heads": config.kv_head_count,
           "k_head_dim": config.head_dim, "v_head_dim": config.head_dim}
    return json.dumps({
        "name": "SmolLM2-135M-Instruct",
        "weights_revision": smollm2_weights.gguf_sha256(),
        "tokenizer_digest": base64.b64encode(digest).decode(),
        "dtype": "DTYPE_BFLOAT16",
        "kv_groups": [{"layer_runs": [run]}],
        "rope": {"pairing": "ROPE_PAIRING_HALF_SPLIT", "theta": config.rope_base},
        "block_tokens": BLOCK_TOKENS,
    })
