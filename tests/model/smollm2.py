"""SmolLM2-135M-Instruct in plain numpy and float32: a real model for tests of the store.

K and V are rounded to bfloat16 as they are produced and attended to as rounded, so that a cache
that went through the store as bfloat16 is the same cache. K is kept after RoPE in half-split
pairing, as in transformers and vLLM.

One BLAS thread: constructing a model sets that for the whole process, for results and timings that
do not depend on the number of cores.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import threadpoolctl

import smollm2_weights

# Rows of every matrix product in prefill. Measured on one core, 64 rows take a third of the time
# per token that 16 rows take, and 128 gain little more. Fewer waste less on partly filled chunks.
CHUNK_TOKENS = 64


class KvCache:
    """K and V of the first `length` tokens of one sequence. Single owner; not thread-safe.

    k, v: [layers, KV heads, capacity, head_dim] float32 that hold bfloat16 values; K after RoPE.
    What lies at or after `length` is finite and without meaning.
    k_before_rope: the same shape, not rounded, or None where it was not asked for. q_before_rope:
    [layers, query heads, capacity, head_dim], likewise. Restoring a cache from stored blocks does
    not restore them.
    round_kv: False keeps K and V as they are computed, in float32, and attends to them so. That is
    what rounding is judged against; such a cache cannot go through the store.
    """

    def __init__(self,
                 config: smollm2_weights.ModelConfig,
                 max_tokens: int,
                 keep_k_before_rope: bool = False,
                 keep_q_before_rope: bool = False,
                 round_kv: bool = True):
        if not 1 <= max_tokens <= config.context_tokens:
            raise ValueError(f"{max_tokens} tokens; the model's context is {config.context_tokens}")
        capacity = -(-max_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        shape = (config.layer_count, config.kv_head_count, capacity, config.head_dim)
        self.config = config
        self.max_tokens = max_tokens
        self.length = 0
        self.round_kv = round_kv
        self.k = np.zeros(shape, np.float32)
        self.v = np.zeros(shape, np.float32)
        self.k_before_rope = np.zeros(shape, np.float32) if keep_k_before_rope else None
        query_shape = (config.layer_count, config.query_head_count, capacity, config.head_dim)
        self.q_before_rope = np.zeros(query_shape, np.float32) if keep_q_before_rope else None

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """What the model says after each of n tokens. Natural logarithms, float32.

    next_log_probs: [n - 1], log-probability of token i + 1 after tokens 0 to i.
    top_ids, top_log_probs: [n, top_count], most probable first.
    """

    next_log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray


class SmolLM2:
    """The model. Read-only after construction; one instance may serve many caches.

    Prefill computes in chunks whose borders are multiples of CHUNK_TOKENS *positions*, and every
    chunk has all its rows, zero where there is no token to compute. A token therefore meets matrix
    products of the same shape, in the same row, however the sequence was split into calls: K, V and
    logits of `extend` are bit-equal whether the tokens before came from `extend` or from a restored
    cache.
    """

    def __init__(self):
        threadpoolctl.threadpool_limits(limits=1, user_api="blas")
        self.config = smollm2_weights.load_config()
        self._weights = smollm2_weights.load_weights()
        self._cos, self._sin = _rope_table(self.config)

    def new_cache(self, max_tokens: int, **options: bool) -> KvCache:
        """An empty cache; options as of KvCache.

        Memory: 46 kB per token, with K before RoPE 23 kB more, with Q before RoPE 69 kB more.
        Errors: ValueError when the model's context is shorter than `max_tokens`.
        """
        return KvCache(self.config, max_tokens, **options)

    def extend(self,
               cache: KvCache,
               token_ids: Sequence[int],
               logits: Literal["last", "all", "none"] = "last") -> np.ndarray | None:
        """Computes the KV of `token_ids` behind what the cache holds and appends it.

        Returns the logits after the last token [vocab], after every token [tokens, vocab], or None.
        "last" is a product with one row and "all" one with a chunk of rows, so the two may differ in
        the last bits.
        Errors: ValueError when there are no tokens or more than the cache has room for.
        """
        chunks = list(self._extend_by_chunks(cache, token_ids, logits))
        if logits == "none":
            return None
        return np.concatenate(chunks) if logits == "all" else chunks[-1][-1]

    def score(self, cache: KvCache, token_ids: Sequence[int], top_count: int = 0) -> TokenScores:
        """As `extend`, but keeps of the logits only what TokenScores names, chunk by chunk."""
        next_log_probs, top_ids, top_log_probs = [], [], []
        scored = 0
        for chunk_logits in self._extend_by_chunks(cache, token_ids, "all"):
            chunk = log_probs(chunk_logits)
            next_ids = np.asarray(token_ids[scored + 1:scored + 1 + len(chunk)], np.int64)
            next_log_probs.append(chunk[np.arange(len(next_ids)), next_ids])
            ids, values = top_k(chunk, top_count)
            top_ids.append(ids)
            top_log_probs.append(values)
            scored += len(chunk)
        return TokenScores(np.concatenate(next_log_probs), np.concatenate(top_ids),
                           np.concatenate(top_log_probs))

    def first_layer_kv(self) -> np.ndarray:
        """K before RoPE and V of layer 0 for each token of the vocabulary, on which alone they depend.

        float32 [vocab, 2 (K, V), KV heads * head_dim], not rounded.
        """
        config, weights = self.config, self._weights
        kv_width = config.kv_head_count * config.head_dim
        normed = self._norm(weights.embedding, 0)
        return (normed @ weights.qkv[0][-2 * kv_width:].T).reshape(len(normed), 2, kv_width)

    def step(self, cache: KvCache, token_id: int) -> np.ndarray:
        """Appends one token and returns the logits after it, [vocab].

        Several times faster than `extend` of one token. Matrix-vector products sum in another
        order, so the KV it appends and its logits may differ from those of `extend` in the last
        bits.
        """
        self._check_room(cache, 1)
        hidden = self._forward(cache, [token_id], first_row=cache.length, row_count=1)
        return self._logits(hidden)[0]

    def generate(self,
                 cache: KvCache,
                 token_ids: Sequence[int],
                 max_new_tokens: int,
                 stop_ids: Sequence[int] = ()) -> list[int]:
        """Extends by `token_ids`, continues greedily, returns the new tokens (a stop token too).

        Afterwards the cache holds all tokens but the last new one, and its KV is that of `extend`:
        what `step` had appended is computed once more in chunks. So a cache depends on its tokens
        alone, not on who produced them, and equals bit for bit what another process computes for
        the same conversation.
        """
        logits = self.extend(cache, token_ids)
        prompt_end = cache.length
        generated = [int(np.argmax(logits))]
        while len(generated) < max_new_tokens and generated[-1] not in stop_ids:
            generated.append(int(np.argmax(self.step(cache, generated[-1]))))
        cache.truncate(prompt_end)
        if len(generated) > 1:
            self.extend(cache, generated[:-1], logits="none")
        return generated

    def _check_room(self, cache: KvCache, token_count: int) -> None:
        if token_count < 1 or cache.length + token_count > cache.max_tokens:
            raise ValueError(
                f"{token_count} tokens behind {cache.length} in a cache for {cache.max_tokens}")

    def _extend_by_chunks(self, cache: KvCache, token_ids: Sequence[int],
                          logits: Literal["last", "all", "none"]) -> Iterator[np.ndarray]:
        """Extends chunk by chunk; yields logits [tokens of the chunk, vocab] where asked for."""
        self._check_room(cache, len(token_ids))
        done = 0
        while done < len(token_ids):
            slot = cache.length % CHUNK_TOKENS
            chunk = token_ids[done:done + CHUNK_TOKENS - slot]
            hidden = self._forward(cache, chunk, cache.length - slot, CHUNK_TOKENS)
            done += len(chunk)
            if logits == "all":
                yield self._logits(hidden)[slot:slot + len(chunk)]
            elif logits == "last" and done == len(token_ids):
                yield self._logits(hidden[slot + len(chunk) - 1:][:1])

    def _forward(self, cache: KvCache, token_ids: Sequence[int], first_row: int,
                 row_count: int) -> np.ndarray:
        """Appends the KV of `token_ids`; returns final, normed hidden states [rows, hidden_dim].

        Row r stands for position first_row + r. Rows without one of `token_ids` hold finite values
        of no meaning.
        """
        config, weights = self.config, self._weights
        head_dim, kv_head_count = config.head_dim, config.kv_head_count
        group_size = config.query_head_count // kv_head_count
        q_width, kv_width = config.query_head_count * head_dim, kv_head_count * head_dim

        new = slice(cache.length, cache.length + len(token_ids))  # positions
        live = slice(new.start - first_row, new.stop - first_row)  # rows
        key_count = first_row + row_count
        rows = slice(first_row, key_count)
        cos, sin = self._cos[rows, None, :], self._sin[rows, None, :]
        causal_mask = np.triu(np.full((row_count, row_count), -np.inf, np.float32), k=1)

        x = np.zeros((row_count, config.hidden_dim), np.float32)
        x[live] = weights.embedding[np.asarray(token_ids)]
        for layer in range(config.layer_count):
            qkv = self._norm(x, 2 * layer) @ weights.qkv[layer].T
            q, k, v = np.split(qkv, [q_width, q_width + kv_width], axis=1)
            q_before_rope = q.reshape(row_count, -1, head_dim)
            q = _rotate(q_before_rope, cos, sin)
            k_before_rope = k.reshape(row_count, kv_head_count, head_dim)
            k = _rotate(k_before_rope, cos, sin)
            v = v.reshape(row_count, kv_head_count, head_dim)
            if cache.round_kv:
                k, v = round_to_bf16(k), round_to_bf16(v)
            cache.k[layer, :, new] = k[live].swapaxes(0, 1)
            cache.v[layer, :, new] = v[live].swapaxes(0, 1)
            if cache.k_before_rope is not None:
                cache.k_before_rope[layer, :, new] = k_before_rope[live].swapaxes(0, 1)
            if cache.q_before_rope is not None:
                cache.q_before_rope[layer, :, new] = q_before_rope[live].swapaxes(0, 1)

            # [KV heads, queries, keys]: query head h reads KV head h // group_size.
            q = q.swapaxes(0, 1).reshape(kv_head_count, group_size * row_count, head_dim)
            scores = q @ cache.k[layer, :, :key_count].swapaxes(1, 2)
            scores *= np.float32(head_dim**-0.5)
            scores.reshape(-1, row_count, key_count)[:, :, rows] += causal_mask
            scores -= scores.max(axis=2, keepdims=True)
            weighted = np.exp(scores, out=scores)
            attended = weighted @ cache.v[layer, :, :key_count]
            attended /= weighted.sum(axis=2, keepdims=True)
            attended = attended.reshape(-1, row_count, head_dim).swapaxes(0, 1)
            attended = attended.reshape(row_count, q_width)
            x += attended @ weights.attn_out[layer].T

            gate, up = np.split(self._norm(x, 2 * layer + 1) @ weights.gate_up[layer].T, 2, axis=1)
            x += (_silu(gate) * up) @ weights.down[layer].T
        cache.length = new.stop
        return self._norm(x, 2 * config.layer_count)

    def _norm(self, x: np.ndarray, index: int) -> np.ndarray:
        """RMS norm of each row, with weights.norms[index]."""
        mean_square = np.mean(x * x, axis=1, keepdims=True)
        scale = 1 / np.sqrt(mean_square + np.float32(self.config.norm_epsilon))
        return x * scale * self._weights.norms[index]

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden @ self._weights.embedding.T


def log_probs(logits: np.ndarray) -> np.ndarray:
    """Natural-logarithm probabilities along the last axis, float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top_k(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values [..., count] of the largest along the last axis, largest first."""
    split = values.shape[-1] - count
    indices = np.argpartition(values, split - 1, axis=-1)[..., split:]
    largest = np.take_along_axis(values, indices, axis=-1)
    order = np.argsort(-largest, axis=-1, kind="stable")
    return np.take_along_axis(indices, order, axis=-1), np.take_along_axis(largest, order, axis=-1)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, halves to even, as float32. REQUIRES: finite float32."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def _rope_table(config: smollm2_weights.ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [positions, head_dim / 2] of float32 angles, as in transformers and vLLM."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = (1.0 / config.rope_base**exponents).astype(np.float32)
    angles = np.arange(config.context_tokens, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Half-split RoPE: turns the pairs (i, i + head_dim / 2) of x [rows, heads, head_dim]."""
    first, second = np.split(x, 2, axis=2)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0.
        return x / (1 + np.exp(-x))
