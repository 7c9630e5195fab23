"""What an error in K (before RoPE) or V costs the model's output, for each plane and KV head. Needs no torch.

A plane is K or V of one layer, in the order K, V of layer 0, K, V of layer 1, ... A metric M says that an
error e of one token costs about e^T M e / 2 nat, summed over a continuation's tokens.
"""

from collections.abc import Iterable, Mapping

import numpy as np

_DISTANCES = (1, 4, 16, 64, 256, 700)  # from a query to a token, over which metrics without gradients are averaged
# Mean squared attention weight of a token, and what a squared relative error of the residual stream costs: no part of
# either is known without gradients. As SmolLM2-135M has it; it only says where the search for steps begins.
_COST_OF_ATTENTION = 0.004


def query_statistics(sums: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
    """What `kvtrie profile` takes as --queries: f32 means [layer][query head][dim], then covariances.

    sums: of samples, `query_count` [], `query_sum` [layer][head][dim], `query_outer` [layer][head][dim][dim].
    """
    total = _total(sums, ("query_count", "query_sum", "query_outer"))
    mean = total["query_sum"] / total["query_count"]
    covariance = total["query_outer"] / total["query_count"] - mean[..., :, None] * mean[..., None, :]
    return np.concatenate([mean.ravel(), covariance.ravel()]).astype("<f4")


def from_gradients(sums: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Fisher information: f32 [plane][KV head][dim][dim], the mean of g g^T over tokens.

    sums: of samples, `gradient_count` [] and `gradient_outer` [plane][head][dim][dim].
    """
    total = _total(sums, ("gradient_count", "gradient_outer"))
    return (total["gradient_outer"] / total["gradient_count"]).astype("<f4")


def without_gradients(sums: Iterable[Mapping[str, np.ndarray]], output_weights: np.ndarray, kv_heads: int,
                      rope_frequencies: np.ndarray | None) -> np.ndarray:
    """The same shape, from queries and the output projection.

    An error e of K changes a token's score for a query q by q.e / sqrt(dim), and so moves weight to its V; an
    error of V adds itself, weighted. Both pass the output projection and count by their size beside the
    residual stream.

    sums: as of query_statistics, and `value_sum`, `value_outer` [layer][KV head][...], `value_count`,
    `stream_square` [layer], `stream_count`: squared length of the residual stream behind each layer.
    output_weights: [layer][query head][hidden][dim].
    rope_frequencies: [pair] radians per token, half-split; None: K is not turned.
    """
    total = _total(sums, ("query_count", "query_outer", "value_count", "value_sum", "value_outer",
                          "stream_count", "stream_square"))
    seconds = total["query_outer"] / total["query_count"]
    value_mean = total["value_sum"] / total["value_count"]
    value_covariance = (total["value_outer"] / total["value_count"]
                        - value_mean[..., :, None] * value_mean[..., None, :])
    stream = total["stream_square"] / total["stream_count"]
    layers, query_heads, dim = seconds.shape[:3]
    metrics = np.zeros((layers, 2, kv_heads, dim, dim))
    for layer in range(layers):
        for head in range(query_heads):
            of = head * kv_heads // query_heads
            weights = output_weights[layer, head].astype(np.float64)
            passed = weights.T @ weights
            moved = np.trace(passed @ value_covariance[layer, of])
            metrics[layer, 0, of] += _turned_mean(seconds[layer, head], rope_frequencies) / dim * moved
            metrics[layer, 1, of] += passed
        metrics[layer] *= _COST_OF_ATTENTION / stream[layer]
    return metrics.reshape(2 * layers, kv_heads, dim, dim).astype("<f4")


def _turned_mean(second: np.ndarray, frequencies: np.ndarray | None) -> np.ndarray:
    """Mean over distances of R^T second R, R being the turn of RoPE over that distance."""
    if frequencies is None:
        return second
    dim, pairs = len(second), len(frequencies)
    mean = np.zeros_like(second)
    for distance in _DISTANCES:
        turn = np.eye(dim)
        cosines, sines = np.cos(distance * frequencies), np.sin(distance * frequencies)
        first, other = np.arange(pairs), np.arange(pairs) + pairs
        turn[first, first] = turn[other, other] = cosines
        turn[first, other], turn[other, first] = -sines, sines
        mean += turn.T @ second @ turn / len(_DISTANCES)
    return mean


def _total(sums: Iterable[Mapping[str, np.ndarray]], names: tuple[str, ...]) -> dict[str, np.ndarray]:
    total: dict[str, np.ndarray] = {}
    for of_sample in sums:
        for name in names:
            value = of_sample[name].astype(np.float64)
            total[name] = total[name] + value if name in total else value
    return total
