"""What the benchmark counts, on small sessions; one of them through a real server."""

import numpy as np
import pytest

import kv_blocks
import sharing
import smollm2_weights
import workers
import workload
import workload_kv


def _session(name, token_ids, shared_tokens=32, documents=(), turns=None) -> workload.Session:
    turns = turns or (workload.Turn(len(token_ids) - 16, len(token_ids)),)
    return workload.Session(name, 0, "prose", tuple(token_ids), turns, tuple(documents), 32, shared_tokens, "group-0", ())


_SYSTEM = list(range(100, 132))
_A = _session("a", _SYSTEM + list(range(1000, 1048)))
_B = _session("b", _SYSTEM + list(range(2000, 2048)))
_C = _session("c", list(range(3000, 3064)), shared_tokens=16)


def test_the_nearest_by_a_similarity_shares_most_and_by_a_distance_least():
    # Blocks of 16: a has 5; b shares 2 with a; c shares none.
    assert sharing.nearest_blocks([_A, _B, _C], is_distance=False) == 5 + 3 + 4
    assert sharing.nearest_blocks([_A, _C, _B], is_distance=True) == 5 + 4 + 5
    assert sharing.nearest_blocks([_A, _A], is_distance=False) == 5


def test_uploads_by_turn_are_each_session_up_to_it():
    turns = (workload.Turn(40, 60), workload.Turn(70, 80))
    two = _session("two", _A.token_ids, turns=turns)
    waves = sharing.by_turn(workload.Workload((two, _B), (), ()))
    assert [[(upload.session.name, upload.token_count) for upload in wave] for wave in waves] == [
        [("two", 60), ("b", 80)], [("two", 80)]]
    assert sharing.turns_of(waves[0][0]) == 1
    assert sharing.turns_of(waves[1][0]) == 2


def _stored(block_bytes) -> sharing.Stored:
    return sharing.Stored([sharing.Point(2, 1, 160, 4000)], 5000, block_bytes, 0, {"a": np.array([0.25, 0.75])})


def test_documents_that_were_coded_against_others_are_counted_once_each():
    document = tuple(range(5000, 5020))
    first = _session("first", _SYSTEM + list(document) + [7] * 28, documents=[(0, 32, 52)])
    second = _session("second", _SYSTEM + [8] * 16 + list(document) + [9] * 12, documents=[(0, 48, 68)])
    alone = _stored({"first": (100,) * 5, "second": (100,) * 5})
    again = _stored({"first": (100,) * 5, "second": (100, 100, 90, 10, 20)})
    assert sharing.repeats([first, second, second], alone, again) == sharing.Repeats(1, 200, 30)


def test_rows_are_ratios_to_raw_and_to_prefix_sharing():
    of = workload.Workload((_A, _B), (), ())
    block_bytes = kv_blocks.block_bytes(smollm2_weights.load_config(), 16)
    found = {row["name"]: row for row in sharing.rows(of, {sharing.PREFIX: _stored({})})}
    assert found[sharing.NO_SHARING]["bytes_raw"] == 10 * block_bytes
    assert found[sharing.NO_SHARING]["ratio"] == 1
    assert found[sharing.PREFIX]["bytes_stored"] == 5000
    assert found[sharing.PREFIX]["kl"] == 0.5
    assert found[sharing.NO_SHARING]["over_prefix_sharing"] == pytest.approx(5000 / (10 * block_bytes))
    assert found[sharing.D_T_SIMILARITY]["bytes_stored"] == 8 * block_bytes
    text = sharing.table(list(found.values()))
    assert all(name in text for name in found)


def test_kv_of_parts_is_the_models_and_goes_through_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIE_CACHE", str(tmp_path))
    model = workers.model()
    of = workload.Workload((_A, _B), (), ())
    with workers.Pool(1) as pool:
        kv = workload_kv.prepare(of, pool)
        assert workload_kv.prepare(of, pool) == kv
    cache = model.new_cache(len(_A.token_ids))
    model.extend(cache, _A.token_ids, logits="none")
    blocks = kv.blocks(_A, len(_A.token_ids))
    assert list(blocks.values()) == kv_blocks.pack_blocks(cache, 16)
    with pytest.raises(KeyError):
        blocks[5]

    waves = [[sharing.Upload(_A, 48)], [sharing.Upload(_A, 80), sharing.Upload(_B, 80)]]
    stored = sharing.store("test", waves, None, kv, [])
    block_bytes = kv_blocks.block_bytes(model.config, 16)
    first, last = stored.points
    assert (first.sessions, first.tokens) == (1, 48)
    assert (last.sessions, last.tokens) == (2, 160)
    assert 3 * block_bytes < first.frame_bytes < 3.1 * block_bytes
    assert 8 * block_bytes < last.frame_bytes < 8.1 * block_bytes  # the two of the prompt once
    assert last.frame_bytes < stored.bytes_stored < 9.5 * block_bytes  # with an empty log
    assert [len(sizes) for sizes in stored.block_bytes.values()] == [5, 5]
