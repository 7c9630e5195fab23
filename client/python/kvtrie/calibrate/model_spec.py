"""A model's identity and the geometry of its KV, from a Hugging Face configuration. Needs no torch.

The result is proto3's JSON of kvtrie.v1.ModelSpec (proto/kvtrie/v1/types.proto), as a dict. A profile serves
models whose specs have the same codec key: all fields count but block_tokens, dtype and layout_tag. So
whoever puts KV has to register the model with the same name, revision and tokenizer digest.
"""

import base64
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping

from kvtrie.errors import KvtrieError

DTYPES = {"float32": "DTYPE_FLOAT32", "float16": "DTYPE_FLOAT16", "bfloat16": "DTYPE_BFLOAT16"}
RAW_BLOCK_BYTES_MAX = 64 << 20  # of a sample, as of any block
BLOCK_TOKENS_MAX = 1024

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_SCALING_TEXT_MAX = 256


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a plain model's KV looks like: every layer alike."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int  # of K and of V
    dtype: str  # "bfloat16": one of DTYPES
    rope_theta: float
    rotary_dims: int  # leading dimensions that are turned
    rope_scaling: str  # "": none; then the codec knows how K was turned
    windows: tuple[int, ...]  # [layer] attention span in tokens; 0: all

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def token_bytes(self) -> int:
        """Raw KV of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def sample_tokens_max(self) -> int:
        """Tokens whose raw KV fits a block."""
        return min(BLOCK_TOKENS_MAX, RAW_BLOCK_BYTES_MAX // self.token_bytes)


def read_config(model_dir: pathlib.Path) -> dict:
    """config.json of a model's folder. Errors: KvtrieError."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvtrieError(f"{path}: cannot be read: {error.strerror}; MODEL_DIR is the folder of a Hugging "
                          "Face model") from error
    except ValueError as error:
        raise KvtrieError(f"{path}: is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise KvtrieError(f"{path}: is no JSON object")
    return config


def geometry_from_config(config: Mapping, kv_dtype: str | None = None) -> Geometry:
    """Errors: KvtrieError names the field that is missing, or that is not of a plain model with RoPE.

    kv_dtype: what the engine keeps KV as, if not as the weights.
    """
    if "text_config" in config:
        raise KvtrieError("config.json: text_config: models of more than text are not supported; calibrate the "
                          "language model by itself")
    if "kv_lora_rank" in config:
        raise KvtrieError("config.json: kv_lora_rank: one latent per token (MLA) is not supported")
    layers = _count(config, "num_hidden_layers")
    query_heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", query_heads)
    if query_heads % kv_heads != 0:
        raise KvtrieError(f"config.json: num_attention_heads {query_heads} is no multiple of num_key_value_heads "
                          f"{kv_heads}")
    head_dim = _count(config, "head_dim", _count(config, "hidden_size") // query_heads)
    dtype = kv_dtype or str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if dtype not in DTYPES:
        raise KvtrieError(f"config.json: dtype: {dtype or 'missing'}, must be one of {', '.join(DTYPES)}; or give "
                          "--kv-dtype")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise KvtrieError("config.json: rope_parameters: layers that turn K in several ways are not supported")
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise KvtrieError("config.json: rope_theta is missing: only models that turn K by RoPE, as Llama, SmolLM2, "
                          "Qwen2 and Mistral do, are supported")
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    return Geometry(layers, query_heads, kv_heads, head_dim, dtype, float(theta), int(head_dim * factor),
                    _scaling(rope), _windows(config, layers))


def spec_json(geometry: Geometry, name: str, weights_revision: str, tokenizer_digest: bytes,
              block_tokens: int) -> dict:
    """The spec of an unsplit model without adapter."""
    run = {"kv_heads": geometry.kv_heads, "k_head_dim": geometry.head_dim, "v_head_dim": geometry.head_dim}
    groups: list[dict] = []
    for window in geometry.windows:
        if not groups or groups[-1]["window_tokens"] != window:
            groups.append({"layer_runs": [{"layer_count": 0, **run}], "window_tokens": window})
        groups[-1]["layer_runs"][0]["layer_count"] += 1
    rotary_dims = 0 if geometry.rotary_dims == geometry.head_dim else geometry.rotary_dims
    return {
        "name": name,
        "weights_revision": weights_revision,
        "tokenizer_digest": base64.b64encode(tokenizer_digest).decode(),
        "dtype": DTYPES[geometry.dtype],
        "kv_groups": groups,
        "rope": {"pairing": "ROPE_PAIRING_HALF_SPLIT", "theta": geometry.rope_theta,
                 "rotary_dims": rotary_dims, "scaling": geometry.rope_scaling},
        "block_tokens": block_tokens,
    }


def check_same_model(spec: Mapping, made: Mapping) -> None:
    """That a spec that somebody wrote describes the KV of the model at hand.

    Errors: KvtrieError names the field.
    """
    for field in ("dtype", "kv_groups", "rope"):
        if _without_defaults(spec.get(field)) != _without_defaults(made[field]):
            raise KvtrieError(f"--spec: {field} is {json.dumps(spec.get(field))}, and the model's is "
                              f"{json.dumps(made[field])}")


def file_digest(paths: list[pathlib.Path]) -> bytes:
    """SHA-256 of the files' names and contents, in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.digest()


def weight_files(model_dir: pathlib.Path) -> list[pathlib.Path]:
    """Errors: KvtrieError when there are none."""
    for pattern in _WEIGHT_PATTERNS:
        if paths := sorted(model_dir.glob(pattern)):
            return paths
    raise KvtrieError(f"{model_dir}: has no weights: no {' and no '.join(_WEIGHT_PATTERNS)}")


def tokenizer_files(model_dir: pathlib.Path) -> list[pathlib.Path]:
    """What decides which tokens a text has. Errors: KvtrieError when there are none."""
    paths = [model_dir / name for name in _TOKENIZER_FILES if (model_dir / name).is_file()]
    if not paths:
        raise KvtrieError(f"{model_dir}: has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    return paths


def _count(config: Mapping, field: str, otherwise: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = otherwise
    if not isinstance(value, int) or value < 1:
        raise KvtrieError(f"config.json: {field}: {'missing' if value is None else value}, must be a number from 1 on; "
                          "only models of the kind of Llama, SmolLM2, Qwen2 and Mistral are supported")
    return value


def _scaling(rope: Mapping) -> str:
    """A name and its parameters; they are part of the model's identity."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ""
    parameters = ",".join(f"{key}={value}" for key, value in sorted(rope.items())
                          if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor"))
    text = f"{kind}:{parameters}"
    if len(text.encode()) > _SCALING_TEXT_MAX:
        text = f"{kind}:{hashlib.sha256(parameters.encode()).hexdigest()}"
    return text


def _windows(config: Mapping, layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise KvtrieError("config.json: layer_types: must be full_attention or sliding_attention for each layer; "
                              "other layers have no KV that could be stored")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if config.get("use_sliding_window") is False:
        window = 0
    return (window,) * layers


def _without_defaults(value):
    """proto3's JSON may leave out what is zero or empty, and write names in camel case."""
    if isinstance(value, Mapping):
        return {_snake_case(key): _without_defaults(inner) for key, inner in value.items()
                if inner not in (0, "", None)}
    if isinstance(value, list):
        return [_without_defaults(inner) for inner in value]
    return value


def _snake_case(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
