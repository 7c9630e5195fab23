"""Mean and covariance of a model's queries before RoPE, for each layer and query head.

They say which directions of K the model looks at, without gradients: a score is q . k, so an error e of
K changes scores by E[(q . e)^2] = e^T (covariance + mean mean^T) e on average.
"""

import os
import pathlib

import numpy as np

import smollm2
import smollm2_weights

# The first tokens of a sequence, which every later one attends to whatever it is, are outliers.
FIRST_POSITION = 16


class QueryStatistics:
    """Sums over the queries of any number of sequences. Single owner; not thread-safe."""

    def __init__(self, config: smollm2_weights.ModelConfig):
        heads = (config.layer_count, config.query_head_count, config.head_dim)
        self.query_count = 0  # of each layer and head
        self._sum = np.zeros(heads)
        self._outer_sum = np.zeros((*heads, config.head_dim))

    def add(self, cache: smollm2.KvCache) -> None:
        """Adds a sequence's queries from FIRST_POSITION on.

        Errors: ValueError when the cache was not asked to keep them.
        """
        if cache.q_before_rope is None:
            raise ValueError("the cache keeps no queries: new_cache(..., keep_q_before_rope=True)")
        self.query_count += max(0, cache.length - FIRST_POSITION)
        for layer, queries in enumerate(cache.q_before_rope):
            q = queries[:, FIRST_POSITION:cache.length].astype(np.float64)
            self._sum[layer] += q.sum(axis=1)
            self._outer_sum[layer] += q.swapaxes(1, 2) @ q

    def merge(self, other: "QueryStatistics") -> None:
        """Adds what another has seen."""
        self.query_count += other.query_count
        self._sum += other._sum
        self._outer_sum += other._outer_sum

    def mean(self) -> np.ndarray:
        """[layers, query heads, head_dim]"""
        return self._sum / self.query_count

    def covariance(self) -> np.ndarray:
        """[layers, query heads, head_dim, head_dim], of the whole population."""
        mean = self.mean()
        return self._outer_sum / self.query_count - mean[..., :, None] * mean[..., None, :]

    def save(self, path: pathlib.Path) -> None:
        """Writes mean and covariance (float32) and query_count (int64), uncompressed, at once."""
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.npz")
        np.savez(unfinished, mean=self.mean().astype(np.float32),
                 covariance=self.covariance().astype(np.float32),
                 query_count=np.int64(self.query_count))
        os.replace(unfinished, path)
