"""The main job with few sessions, and the stub client, against the built server (KVTRIE_BUILD)."""

import json
import os
import random
import subprocess
import sys

import pytest

import kvtrie_stub
import main_job
import main_job_report
import server_process

_BLOCK_TOKENS = 4


@pytest.fixture(scope="module", name="numbers")
def _numbers() -> dict:
    return main_job.run(server_process.server_binary(), quick=True)


def test_nothing_is_lost_or_changed(numbers):
    assert main_job.is_right(numbers), numbers


def test_fetched_bytes_are_the_bytes_that_were_put(numbers):
    assert numbers["cache_bit_equal"]
    assert len(numbers["per_session"]) == numbers["sessions"] == 6


def test_logits_and_greedy_answers_are_those_without_the_store(numbers):
    assert numbers["logits_bit_equal"] and numbers["greedy_equal"]
    assert numbers["greedy_sessions"] >= 2


def test_kill_during_a_put_loses_no_acknowledged_block(numbers):
    assert numbers["acknowledged_before_kill"] > 50
    assert numbers["lost_after_kill"] == 0
    assert numbers["verify_findings"] == 0


def test_sessions_share_what_they_have_in_common(numbers):
    assert numbers["tokens_reused"] > numbers["tokens"] / 3
    assert numbers["bytes_stored"] < numbers["bytes_raw"] * 0.75


def test_restoring_is_sooner_than_recomputing(numbers):
    """The quickstart shows 10 times for 1,000 tokens; a machine that does other work as well, less."""
    assert numbers["prefix_tokens"] >= 1000
    assert numbers["prefix_restore_s"] < numbers["prefix_recompute_s"] / 3
    assert all(s["restore_s"] < s["recompute_s"] for s in numbers["per_session"])


def test_report_shows_the_numbers(numbers, tmp_path):
    assert f"{numbers['tokens_reused']:,}" in main_job_report.table(numbers)
    main_job_report.draw(numbers, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(numbers)


def test_a_wrong_setting_stops_the_start_and_is_named(tmp_path):
    server = server_process.ServerProcess(server_process.server_binary(), tmp_path,
                                          flags=("--memory_tier_bytes=lots",))
    with pytest.raises(RuntimeError, match="memory_tier_bytes"):
        server.start()


@pytest.fixture(scope="module", name="small")
def _small(tmp_path_factory):
    """A stub, the id of a model with blocks of 4 tokens, and the size of a block."""
    folder = tmp_path_factory.mktemp("server")
    with server_process.ServerProcess(server_process.server_binary(), folder) as server:
        addresses = server.start()
        stub = kvtrie_stub.KvtrieStub(addresses.listen, addresses.admin)
        registered = stub.register_model(_small_spec())
        yield stub, registered.model_id, registered.raw_block_bytes
        stub.close()
        server.stop()


def _small_spec() -> kvtrie_stub.types_pb2.ModelSpec:
    types = kvtrie_stub.types_pb2
    run = types.LayerRun(layer_count=16, kv_heads=4, k_head_dim=64, v_head_dim=64)
    return types.ModelSpec(name="small", weights_revision="1", tokenizer_digest=b"1",
                           dtype=types.DTYPE_BFLOAT16, kv_groups=[types.KvGroup(layer_runs=[run])],
                           rope=types.RopeSpec(pairing=types.ROPE_PAIRING_NONE),
                           block_tokens=_BLOCK_TOKENS)


def test_model_id_depends_on_the_spec_alone(small):
    stub, model_id, block_bytes = small
    assert block_bytes == 16 * 2 * _BLOCK_TOKENS * 4 * 64 * 2
    assert stub.register_model(_small_spec()).model_id == model_id
    other = _small_spec()
    other.weights_revision = "2"
    assert stub.register_model(other).model_id != model_id


def test_what_was_put_is_fetched_and_the_tail_is_not_stored(small):
    stub, model_id, block_bytes = small
    token_ids = list(range(1, 4 * _BLOCK_TOKENS + 3))
    blocks = {index: random.Random(index).randbytes(block_bytes) for index in range(4)}
    acknowledged = []
    result = stub.put(model_id, token_ids, blocks, "one", acknowledged.append)
    assert acknowledged == [0, 1, 2, 3]
    assert (result.stored_blocks, result.bytes_sent) == (4, 4 * block_bytes)
    match = stub.lookup(model_id, token_ids)
    assert match.block_count == 4
    assert stub.fetch(model_id, match, 4, block_bytes) == list(blocks.values())


def test_putting_again_sends_nothing(small):
    stub, model_id, block_bytes = small
    token_ids = list(range(100, 100 + 2 * _BLOCK_TOKENS))
    blocks = {index: bytes([index]) * block_bytes for index in range(2)}
    stub.put(model_id, token_ids, blocks)
    again = stub.put(model_id, token_ids, blocks)
    assert (again.stored_blocks, again.bytes_sent) == (0, 0)


def test_a_changed_token_ends_the_match(small):
    stub, model_id, block_bytes = small
    token_ids = list(range(200, 200 + 3 * _BLOCK_TOKENS))
    stub.put(model_id, token_ids, {index: bytes(block_bytes) for index in range(3)})
    token_ids[_BLOCK_TOKENS] += 1
    assert stub.lookup(model_id, token_ids).block_count == 1
    token_ids[0] += 1
    assert stub.lookup(model_id, token_ids).block_count == 0


def test_an_unknown_model_is_not_found(small):
    stub, _, _ = small
    with pytest.raises(kvtrie_stub.StoreError, match="NOT_FOUND"):
        stub.lookup(b"\1" * 16, [1] * _BLOCK_TOKENS)


def test_a_block_of_the_wrong_size_is_refused_alone(small):
    stub, model_id, block_bytes = small
    token_ids = list(range(300, 300 + 2 * _BLOCK_TOKENS))
    with pytest.raises(kvtrie_stub.StoreError, match="INVALID_ARGUMENT"):
        stub.put(model_id, token_ids, {0: bytes(block_bytes), 1: bytes(block_bytes + 1)})
    assert stub.lookup(model_id, token_ids).block_count <= 1


def test_a_chunk_that_fails_its_checksum_is_refused(small, monkeypatch):
    stub, model_id, block_bytes = small
    token_ids = list(range(400, 400 + _BLOCK_TOKENS))
    stub.put(model_id, token_ids, {0: bytes(block_bytes)})
    match = stub.lookup(model_id, token_ids)
    monkeypatch.setattr(kvtrie_stub.crc32c, "crc32c", lambda data: 1)
    with pytest.raises(kvtrie_stub.StoreError, match="checksum"):
        stub.fetch(model_id, match, 1, block_bytes)


def test_the_command_says_what_is_missing():
    """Without a server built, main_job.py names the command that builds it."""
    done = subprocess.run([sys.executable, main_job.__file__, "--quick"], capture_output=True,
                          text=True, check=False, env=os.environ | {"KVTRIE_BUILD": "/nowhere"})
    assert done.returncode == 1 and "tests/run.sh --stage build-release" in done.stderr
    assert "Traceback" not in done.stderr
