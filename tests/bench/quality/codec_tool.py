"""The store's own codec, through its command codec_tool: fits profiles, codes texts.

  codec_tool fit --spec SPEC.json --samples FOLDER [--material FILE] [--option K=V]... --out PROFILE
  codec_tool code --spec SPEC.json --profile PROFILE --level LEVEL --block-tokens N [--option K=V]...
                  --tokens FILE.tokens --kv FILE.kv --out FILE.kv

Both print a JSON object on stdout, and progress on stderr.
"""

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
_PATH = pathlib.Path(__file__).resolve().parents[3] / "build/release/tests/bench/codec_tool"


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
        raise CodecToolMissing("no build/release/tests/bench/codec_tool: build target codec_tool")
    return _PATH


def fit(samples: pathlib.Path, options: Mapping[str, object],
        material: pathlib.Path | None = None) -> pathlib.Path:
    """The profile fitted with these options; made where the cache lacks it, with the tool's progress.

    samples: a folder of kv_files.prepare. material: what gradients gave, where they were taken.
    """
    inputs: list[object] = ["--samples", samples]
    digest = hashlib.sha256(tool_path().read_bytes())
    digest.update(f"{samples.name} {sorted(options.items())} {_spec()}".encode())
    if material is not None:
        inputs += ["--material", material]
        digest.update(material.read_bytes())
    profile = kv_files.cache_folder() / "profiles" / digest.hexdigest()[:24]
    if profile.exists():
        return profile
    profile.parent.mkdir(parents=True, exist_ok=True)
    unfinished = profile.with_name(f"{profile.name}.{os.getpid()}")
    try:
        _run("fit", *inputs, *_option_arguments(options), "--out", unfinished, show_progress=True)
        os.replace(unfinished, profile)
    finally:
        unfinished.unlink(missing_ok=True)
    return profile


def code(profile: pathlib.Path, level: str, options: Mapping[str, object],
         token_ids: Sequence[int], kv: np.ndarray) -> Coded:
    """Encodes and decodes a session block by block, all of its blocks at once.

    REQUIRES: a whole number of blocks, whose kv holds bfloat16 values.
    """
    config = smollm2_weights.load_config()
    token_count = len(token_ids)
    if token_count % BLOCK_TOKENS != 0 or kv.shape[2] != token_count:
        raise ValueError(f"KV of {kv.shape[2]} tokens and {token_count} tokens: want equal numbers, "
                         f"a multiple of {BLOCK_TOKENS}")
    with tempfile.TemporaryDirectory(prefix="kvtrie-quality-") as name:
        folder = pathlib.Path(name)
        (folder / "in.tokens").write_bytes(np.array(token_ids, "<u4").tobytes())
        bits = np.ascontiguousarray(kv).view(np.uint32) >> 16
        (folder / "in.kv").write_bytes(bits.astype("<u2").tobytes())
        summary = _run("code", "--profile", profile, "--level", level,
                       "--block-tokens", BLOCK_TOKENS, *_option_arguments(options),
                       "--tokens", folder / "in.tokens", "--kv", folder / "in.kv",
                       "--out", folder / "out.kv")
        restored = kv_blocks.unpack_block(config, (folder / "out.kv").read_bytes(), token_count)
    return Coded(restored, _block_bytes(summary, token_count // BLOCK_TOKENS))


def _block_bytes(summary: dict, block_count: int) -> list[int]:
    """Bytes of each frame: "block_bytes" where the tool says it, else all frames as equally large."""
    total = summary["bytes"]
    each = summary.get("block_bytes")
    if each is None:
        each = [total * (i + 1) // block_count - total * i // block_count
                for i in range(block_count)]
    if len(each) != block_count or sum(each) != total:
        raise CodecToolError(f"codec_tool code: block_bytes of {len(each)} blocks sum to "
                             f"{sum(each)}; there are {block_count} blocks of {total} bytes in all")
    return each


def _run(verb: str, *arguments: object, show_progress: bool = False) -> dict:
    """The JSON object that the tool prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        spec.write(_spec())
        spec.flush()
        command = [tool_path(), verb, "--spec", spec.name, *arguments]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE,
                              stderr=None if show_progress else subprocess.PIPE, text=True,
                              check=False)
    if done.returncode != 0:
        said = (done.stderr or "see above").strip().splitlines()[-3:]
        raise CodecToolError(f"codec_tool {verb}: exit code {done.returncode}: {' '.join(said)}")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise CodecToolError(f"codec_tool {verb}: its output is no JSON: {error}") from error


def _option_arguments(options: Mapping[str, object]) -> list[str]:
    return [argument for key, value in sorted(options.items())
            for argument in ("--option", f"{key}={value}")]


def _spec() -> str:
    """The model's identity; fields as in the proto message ModelSpec, bytes in hexadecimal."""
    config = smollm2_weights.load_config()
    tokenizer = smollm2_weights.filled_cache_folder() / smollm2_weights.TOKENIZER_NAME
    run = {"layer_count": config.layer_count, "kv_heads": config.kv_head_count,
           "k_head_dim": config.head_dim, "v_head_dim": config.head_dim}
    return json.dumps({
        "name": "SmolLM2-135M-Instruct",
        "weights_revision": smollm2_weights.gguf_sha256(),
        "tokenizer_digest": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        "dtype": "DTYPE_BFLOAT16",
        "kv_groups": [{"layer_runs": [run]}],
        "rope": {"pairing": "ROPE_PAIRING_HALF_SPLIT", "theta": config.rope_base},
        "block_tokens": BLOCK_TOKENS,
    })
