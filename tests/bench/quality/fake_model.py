"""A small stand-in for the model, for tests of what is done with one.

K and V of a token depend on the token and on the K and V before it, and the logits on them, so that an
error in a cache goes on as in a real model.
"""

from collections.abc import Sequence

import numpy as np

import smollm2
import smollm2_weights

CONFIG = smollm2_weights.ModelConfig(
    layer_count=2, query_head_count=2, kv_head_count=1, head_dim=32, hidden_dim=64, mlp_dim=64,
    vocab_size=60, context_tokens=4096, rope_base=10000, norm_epsilon=1e-5)


class FakeModel:
    """Has of smollm2.SmolLM2 what this folder uses."""

    def __init__(self):
        rng = np.random.default_rng(7)
        kv_shape = (CONFIG.layer_count, 2, CONFIG.kv_head_count, CONFIG.head_dim)
        self.config = CONFIG
        self._tokens = rng.standard_normal((CONFIG.vocab_size, *kv_shape)).astype(np.float32)
        self._output = rng.standard_normal((np.prod(kv_shape), CONFIG.vocab_size)) / 4
        self.extended: list[int] = []  # how many tokens each call of extend computed

    def new_cache(self, max_tokens: int, round_kv: bool = True) -> smollm2.KvCache:
        return smollm2.KvCache(CONFIG, max_tokens, round_kv=round_kv)

    def extend(self, cache: smollm2.KvCache, token_ids: Sequence[int],
               logits: str = "last") -> np.ndarray | None:
        self.extended.append(len(token_ids))
        said = np.array([self._append(cache, token_id) for token_id in token_ids])
        return {"all": said, "last": said[-1], "none": None}[logits]

    def step(self, cache: smollm2.KvCache, token_id: int) -> np.ndarray:
        return self._append(cache, token_id)

    def _append(self, cache: smollm2.KvCache, token_id: int) -> np.ndarray:
        if cache.length == cache.max_tokens:
            raise ValueError("the cache is full")
        kv = self._tokens[token_id % CONFIG.vocab_size]
        if cache.length:
            last = cache.length - 1
            kv = kv + 0.5 * np.stack([cache.k[:, :, last], cache.v[:, :, last]], axis=1)
        kv = np.ascontiguousarray(kv, np.float32)
        if cache.round_kv:
            kv = smollm2.round_to_bf16(kv)
        cache.k[:, :, cache.length], cache.v[:, :, cache.length] = kv[:, 0], kv[:, 1]
        cache.length += 1
        return (kv.reshape(-1) @ self._output).astype(np.float32)
