"""Folders of texts with their KV, as the codec's tools read them, kept in the cache.

For each text NAME.tokens, u32le, and NAME.kv: K and V of these tokens in the store's raw order
([layer][K, V][token][KV head][dim], bfloat16, K after RoPE), the text as one run. Beside calibration
texts QUERIES_NAME, the statistics of the queries over all of them.

A folder's name is a digest of all that it depends on, and it appears whole or not at all. 18 MB per text;
folders that are no longer used may be removed at any time.
"""

import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence

import numpy as np

import corpus
import kv_blocks
import query_statistics
import smollm2
import smollm2_weights
import whole_folder
import workers

QUERIES_NAME = "queries.npz"


def cache_folder() -> pathlib.Path:
    root = os.environ.get("KVTRIE_CACHE") or pathlib.Path.home() / ".cache" / "kvtrie"
    return pathlib.Path(root) / "quality"


def write_atomically(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


@functools.cache
def model_digest() -> str:
    """Names what decides the model's KV and logits: weights, code, the library that multiplies."""
    digest = hashlib.sha256(f"{smollm2_weights.gguf_sha256()} {np.__version__}".encode())
    for module in (smollm2, smollm2_weights, kv_blocks):
        digest.update(pathlib.Path(module.__file__).read_bytes())
    return digest.hexdigest()


def vocabulary() -> pathlib.Path:
    """The file of what layer 0 makes of each token, as `kvtrie profile fit --vocabulary` takes it.

    Ids are in the order of the tokenizer's merges: what comes often comes first.
    """
    path = cache_folder() / f"vocabulary-{model_digest()[:24]}"
    if not path.exists():
        rows = workers.model().first_layer_kv().astype("<f4")
        write_atomically(path, np.arange(len(rows), dtype="<u4").tobytes() + rows.tobytes())
    return path


def prepare(name: str, texts: Sequence[corpus.Text], with_queries: bool,
            pool: workers.Pool) -> pathlib.Path:
    """The folder with the KV of each text's first PREFIX_TOKENS tokens, computed where it is missing."""
    digest = hashlib.sha256(model_digest().encode())
    digest.update(pathlib.Path(__file__).read_bytes())
    for text in texts:
        digest.update(f"{text.name} {text.token_ids[:corpus.PREFIX_TOKENS]}".encode())

    def compute(folder: pathlib.Path) -> None:
        statistics = query_statistics.QueryStatistics(smollm2_weights.load_config())
        tasks = [(_write_text, (folder, text, with_queries)) for text in texts]
        for of_text in pool.run(f"KV of the {name} texts", tasks):
            if of_text is not None:
                statistics.merge(of_text)
        if with_queries:
            statistics.save(folder / QUERIES_NAME)

    return whole_folder.fill_once(cache_folder() / f"{name}-{digest.hexdigest()[:24]}", compute)


def part(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A folder with those samples of a folder of `prepare` that corpus.CALIBRATION_PARTS names."""
    if name == "all":
        return folder
    names = sorted(path.stem for path in folder.glob("*.tokens"))
    target = folder.with_name(f"{folder.name}-{name}")
    target.mkdir(exist_ok=True)
    for sample in corpus.CALIBRATION_PARTS[name](names):
        for suffix in (".tokens", ".kv"):
            link = target / (sample + suffix)
            if not link.is_symlink():
                link.symlink_to(folder / link.name)
    return target


def read_kv(folder: pathlib.Path, name: str) -> np.ndarray:
    """Float32 [layers, 2 (K, V), tokens, KV heads, head_dim] of a text."""
    kv = (folder / f"{name}.kv").read_bytes()
    return kv_blocks.unpack_block(smollm2_weights.load_config(), kv, corpus.PREFIX_TOKENS)


def _write_text(folder: pathlib.Path, text: corpus.Text,
                with_queries: bool) -> query_statistics.QueryStatistics | None:
    model = workers.model()
    token_ids = text.token_ids[:corpus.PREFIX_TOKENS]
    cache = model.new_cache(len(token_ids), keep_q_before_rope=with_queries)
    model.extend(cache, token_ids, logits="none")
    (folder / f"{text.name}.tokens").write_bytes(np.array(token_ids, "<u4").tobytes())
    (folder / f"{text.name}.kv").write_bytes(kv_blocks.pack_block(cache, 0, len(token_ids)))
    if not with_queries:
        return None
    statistics = query_statistics.QueryStatistics(model.config)
    statistics.add(cache)
    return statistics
