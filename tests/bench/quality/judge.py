"""How far a restored cache leads the model astray: KL, change of NLL, agreement of the first choice."""

import dataclasses
from collections.abc import Sequence

import numpy as np

import smollm2

_ROWS = 64  # at a time: temporary arrays of 13 MB


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Next-token distributions after each of n tokens. Immutable.

    logits: [n, vocab] float32. log_sums: [n] float64, the logarithm of the sum of their exponentials.
    """

    logits: np.ndarray
    log_sums: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray) -> "Distributions":
        largest = logits.max(axis=1, keepdims=True)
        sums = np.exp(logits - largest).sum(axis=1, dtype=np.float64)
        return cls(logits, largest[:, 0] + np.log(sums))

    def part(self, start: int, stop: int) -> "Distributions":
        return Distributions(self.logits[start:stop], self.log_sums[start:stop])


@dataclasses.dataclass(frozen=True)
class Divergence:
    """What became of n distributions, in nats.

    kl: [n] float64, KL(reference || candidate). nll_change: [n - 1] float64, of the actual next tokens;
    positive is worse. same_top: [n] bool.
    """

    kl: np.ndarray
    nll_change: np.ndarray
    same_top: np.ndarray

    def head(self, count: int) -> "Divergence":
        return Divergence(self.kl[:count], self.nll_change[:count - 1], self.same_top[:count])


def diverge(reference: Distributions, candidate: Distributions,
            token_ids: Sequence[int]) -> Divergence:
    """Compares distributions after each of `token_ids`.

    KL = sum of p (x - y) - log sum exp x + log sum exp y over logits x, y and p = softmax(x). Sums are in
    float64, so that rounding stays below 1e-6 nat.
    """
    x, y = reference.logits, candidate.logits
    shift = candidate.log_sums - reference.log_sums
    kl = np.empty(len(x))
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        # p as rounded does not sum to 1, and x - y has a mean of its own: hence the quotient.
        p = np.exp(x[rows] - reference.log_sums[rows, None].astype(np.float32))
        weighted = (p * (x[rows] - y[rows])).sum(axis=1, dtype=np.float64)
        kl[rows] = weighted / p.sum(axis=1, dtype=np.float64) + shift[rows]

    next_ids = np.asarray(token_ids[1:])
    rows = np.arange(len(next_ids))
    nll_change = x[rows, next_ids].astype(np.float64) - y[rows, next_ids] + shift[:-1]
    return Divergence(kl, nll_change, x.argmax(axis=1) == y.argmax(axis=1))


def summary(divergences: Sequence[Divergence]) -> dict[str, float]:
    """Of several texts: mean and 99th percentile over their tokens, the worst text's mean, change of NLL, agreement."""
    kl = np.concatenate([divergence.kl for divergence in divergences])
    return {
        "kl": float(kl.mean()), "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_worst_pair": max(float(divergence.kl.mean()) for divergence in divergences),
        "dnll": float(np.mean([divergence.nll_change.mean() for divergence in divergences])),
        "top1": float(np.concatenate([divergence.same_top for divergence in divergences]).mean()),
    }


def set_cache(cache: smollm2.KvCache, kv: np.ndarray) -> None:
    """Makes `kv`, [layers, 2, tokens, KV heads, head_dim], all that the cache holds."""
    tokens = kv.shape[2]
    if tokens > cache.max_tokens:
        raise ValueError(f"{tokens} tokens in a cache for {cache.max_tokens}")
    cache.k[:, :, :tokens] = kv[:, 0].swapaxes(1, 2)
    cache.v[:, :, :tokens] = kv[:, 1].swapaxes(1, 2)
    cache.length = tokens


def get_kv(cache: smollm2.KvCache, first_token: int = 0) -> np.ndarray:
    """A copy of what the cache holds from a token on, in the shape that set_cache takes."""
    live = slice(first_token, cache.length)
    return np.stack([cache.k[:, :, live], cache.v[:, :, live]], axis=1).swapaxes(2, 3).copy()


def continuation(model: smollm2.SmolLM2, kv: np.ndarray,
                 token_ids: Sequence[int]) -> Distributions:
    """The distributions after each of `token_ids`, teacher-forced behind a cache of `kv`."""
    cache = model.new_cache(kv.shape[2] + len(token_ids))
    set_cache(cache, kv)
    return Distributions.of(model.extend(cache, token_ids, logits="all"))
