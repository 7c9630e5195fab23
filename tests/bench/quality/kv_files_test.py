"""The folder of texts and their KV: its bytes, its name, and that it is made once and whole."""

import numpy as np
import pytest

import corpus
import judge
import kv_blocks
import kv_files
import query_statistics
import smollm2_weights
import workers

# Short, so that the real model takes a moment only.
_TEXTS = [corpus.Text(f"text-{i}", "prose", tuple(range(1 + i, 49 + i))) for i in range(2)]


@pytest.fixture(name="cache")
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_files, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_folder_holds_tokens_kv_and_queries_in_the_stores_order(cache, monkeypatch):
    monkeypatch.setattr(corpus, "PREFIX_TOKENS", 32)
    with workers.Pool(1) as pool:
        folder = kv_files.prepare("calibration", _TEXTS, with_queries=True, pool=pool)
        assert kv_files.prepare("calibration", _TEXTS, with_queries=True, pool=None) == folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "queries.npz", "text-0.kv", "text-0.tokens", "text-1.kv", "text-1.tokens"]
    assert [path.name for path in cache.iterdir()] == [folder.name]

    assert np.fromfile(folder / "text-1.tokens", "<u4").tolist() == list(range(2, 34))
    config = smollm2_weights.load_config()
    exact = workers.model().new_cache(32)
    workers.model().extend(exact, range(2, 34), logits="none")
    assert (folder / "text-1.kv").read_bytes() == kv_blocks.pack_block(exact, 0, 32)
    np.testing.assert_array_equal(kv_files.read_kv(folder, "text-1"), judge.get_kv(exact))

    queries = np.load(folder / "queries.npz")
    assert queries["query_count"] == 2 * (32 - query_statistics.FIRST_POSITION)
    assert queries["mean"].shape == (config.layer_count, config.query_head_count, config.head_dim)


def test_name_depends_on_the_tokens_and_nothing_is_left_of_a_failure(cache):

    class FailingPool:

        def run(self, what, tasks):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        kv_files.prepare("test", _TEXTS, with_queries=False, pool=FailingPool())
    assert not list(cache.iterdir())

    class EmptyPool:

        def run(self, what, tasks):
            return iter(())

    first = kv_files.prepare("test", _TEXTS, with_queries=False, pool=EmptyPool())
    other = kv_files.prepare("test", _TEXTS[:1], with_queries=False, pool=EmptyPool())
    assert first != other and first.name.startswith("test-")


def test_a_file_is_replaced_whole(tmp_path):
    kv_files.write_atomically(tmp_path / "new" / "file", b"one")
    kv_files.write_atomically(tmp_path / "new" / "file", b"two")
    assert [path.read_bytes() for path in (tmp_path / "new").iterdir()] == [b"two"]
