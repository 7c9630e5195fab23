"""Query statistics against numpy's own, and the queries against the model's first layer."""

import numpy as np
import pytest

import query_statistics
import smollm2
import smollm2_tokenizer
import smollm2_weights
import texts


@pytest.fixture(scope="module", name="caches")
def _caches() -> list[smollm2.KvCache]:
    """Two sequences of unequal length; the second is computed in two calls."""
    model = smollm2.SmolLM2()
    token_ids = smollm2_tokenizer.SmolLM2Tokenizer().encode(texts.license_text("BSD"))
    caches = [model.new_cache(200, keep_q_before_rope=True) for _ in range(2)]
    model.extend(caches[0], token_ids[:100], logits="none")
    model.extend(caches[1], token_ids[100:170], logits="none")
    model.extend(caches[1], token_ids[170:180], logits="none")
    return caches


def test_queries_are_kept_before_rope(caches):
    """Layer 0 sees nothing but the embeddings."""
    weights, config = smollm2_weights.load_weights(), smollm2_weights.load_config()
    token_ids = smollm2_tokenizer.SmolLM2Tokenizer().encode(texts.license_text("BSD"))[100:180]
    x = weights.embedding[token_ids]
    x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + config.norm_epsilon) * weights.norms[0]
    expected = x @ weights.qkv[0][:config.hidden_dim].T
    expected = expected.reshape(80, config.query_head_count, config.head_dim).swapaxes(0, 1)
    np.testing.assert_allclose(caches[1].q_before_rope[0][:, :80], expected, rtol=0,
                               atol=1e-5 * np.abs(expected).max())


def test_mean_and_covariance_are_numpys(caches, tmp_path):
    config = caches[0].config
    statistics = query_statistics.QueryStatistics(config)
    for cache in caches:
        part = query_statistics.QueryStatistics(config)
        part.add(cache)
        statistics.merge(part)
    statistics.save(tmp_path / "queries.npz")
    stored = np.load(tmp_path / "queries.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["queries.npz"]

    first = query_statistics.FIRST_POSITION
    assert stored["query_count"] == sum(cache.length - first for cache in caches) == 148
    heads = (config.layer_count, config.query_head_count)
    assert stored["mean"].shape == (*heads, config.head_dim)
    assert stored["covariance"].shape == (*heads, config.head_dim, config.head_dim)
    for layer, head in ((0, 0), (17, 4), (29, 8)):
        q = np.concatenate([c.q_before_rope[layer, head, first:c.length] for c in caches])
        np.testing.assert_allclose(stored["mean"][layer, head], q.mean(axis=0), rtol=0, atol=1e-4)
        np.testing.assert_allclose(stored["covariance"][layer, head],
                                   np.cov(q.T, bias=True), rtol=1e-4, atol=1e-4)


def test_refuses_a_cache_without_queries():
    config = smollm2_weights.load_config()
    with pytest.raises(ValueError, match="keep_q_before_rope"):
        query_statistics.QueryStatistics(config).add(smollm2.KvCache(config, 64))
