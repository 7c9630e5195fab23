"""Reuse of a document's KV through a real server and client, on the real model; and how outcomes become rows."""

import dataclasses
import pathlib

import numpy as np
import pytest

import codec_tool
import judge
import kv_blocks
import pairs
import server_process
import smollm2
import smollm2_tokenizer
import smollm2_weights
import text_reuse
import texts

_DOCUMENT_TOKENS = 150
_CONTINUATION_TOKENS = 48
_SKIPPED = 8


def _outcome(name, kind, kl, saved=0.5):
    return text_reuse.Outcome(name, kind, saved, judge.Divergence(np.full(32, kl), np.zeros(31), np.ones(32, bool)))


def test_rows_are_means_by_kind():
    outcomes = [_outcome("0 recomputed", pairs.UNRELATED, 0.02, 0.8), _outcome("0 recomputed", pairs.UNRELATED, 0.04, 0.6),
                _outcome("0 recomputed", pairs.RESOLVED, 1.0), _outcome("8 recomputed", pairs.UNRELATED, 0.01)]
    found = text_reuse.rows(outcomes)
    assert [(row["kind"], row["name"], row["pairs"]) for row in found] == [
        ("unrelated", "0 recomputed", 2), ("unrelated", "8 recomputed", 1), ("resolved", "0 recomputed", 1)]
    assert np.isclose(found[0]["kl"], 0.03) and np.isclose(found[0]["saved"], 0.7)
    assert np.isclose(found[0]["kl_worst_pair"], 0.04) and np.isclose(found[0]["kl_first16"], 0.03)
    table = text_reuse.table(found)
    assert "unrelated; pairs: 2" in table and "0.700" in table


def test_a_document_may_begin_its_first_session():
    session = pairs.Session("a", tuple(range(100)), (20, 70))
    pair = text_reuse.document_first(pairs.Pair("p", pairs.UNRELATED, "x", session, session))
    assert pair.second == session
    assert pair.first.stored == session.token_ids[20:70] and pair.first.continuation == session.continuation


def test_a_missing_tool_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(text_reuse, "_TOOL", tmp_path / "nothing")
    with pytest.raises(codec_tool.CodecToolMissing, match="text_reuse_tool"):
        text_reuse.fetch("127.0.0.1:1", [], tmp_path)


@dataclasses.dataclass(frozen=True)
class _Kept:
    """One pair through a server: what its client got for the second session. kv: float32, zeros where nothing came."""

    model: smollm2.SmolLM2
    folder: pathlib.Path
    pair: pairs.Pair
    exact: np.ndarray
    source: np.ndarray
    kv: np.ndarray
    said: dict


@pytest.fixture(name="kept", scope="module")
def _kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reuse")
    model, tokenizer = smollm2.SmolLM2(), smollm2_tokenizer.SmolLM2Tokenizer()
    license_ids = tokenizer.encode(texts.license_text("Apache-2.0"))
    document = tuple(license_ids[:_DOCUMENT_TOKENS])
    rest = tuple(license_ids[_DOCUMENT_TOKENS:_DOCUMENT_TOKENS + _CONTINUATION_TOKENS])
    sessions = []
    for name, prefix in (("first", "A recipe for a cake, with apples and nuts:\n"), ("second", "What follows is the text of a license")):
        ids = (1, *tokenizer.encode(prefix))
        sessions.append(pairs.Session(name, (*ids, *document, *rest), (len(ids), len(ids) + len(document))))
    exact = []
    for session in sessions:
        cache = model.new_cache(len(session.stored))
        model.extend(cache, session.stored, logits="none")
        exact.append(judge.get_kv(cache))
        (folder / f"{session.name}.tokens").write_bytes(np.array(session.stored, "<u4").tobytes())
        (folder / f"{session.name}.kv").write_bytes(kv_blocks.pack_block(cache, 0, len(session.stored)))
    job = {"first": str(folder / "first"), "second": str(folder / "second"), "salt": "pair", "skip": _SKIPPED,
           "level": "exact", "out": str(folder / "out.kv")}
    with server_process.ServerProcess(server_process.server_binary(), folder,
                                      ("--noprefault_memory", "--text_reuse=all")) as server:
        said = text_reuse.fetch(server.start().listen, [job], folder)[0]
    blocks = -(-len(sessions[1].stored) // codec_tool.BLOCK_TOKENS) * codec_tool.BLOCK_TOKENS
    kv = kv_blocks.unpack_block(smollm2_weights.load_config(), (folder / "out.kv").read_bytes(), blocks)
    pair = pairs.Pair("pair", pairs.UNRELATED, "license", *sessions)
    return _Kept(model, folder, pair, exact[1], exact[0], kv, said)


def _reused(kept):
    (begin, end), = kept.said["reused"]
    return begin, end


def test_the_document_is_reused_but_for_its_first_tokens_and_what_fills_no_block(kept):
    begin, end = _reused(kept)
    first, second = kept.pair.first, kept.pair.second
    assert kept.said["matched_tokens"] == 0
    assert begin == second.document[0] + _SKIPPED
    assert end - begin == len(first.stored) // codec_tool.BLOCK_TOKENS * codec_tool.BLOCK_TOKENS - first.document[0] - _SKIPPED
    assert not kept.kv[:, :, :begin].any() and not kept.kv[:, :, end:].any()


def test_k_is_what_the_model_computes_at_the_new_position(kept):
    """Layer 0 knows no other token: there reused KV is the model's own, within the roundings of K to bfloat16."""
    begin, end = _reused(kept)
    shift = kept.pair.first.document[0] - kept.pair.second.document[0]
    assert shift != 0
    own, reused = kept.exact[0, :, begin:end], kept.kv[0, :, begin:end]
    np.testing.assert_array_equal(reused[1], own[1])
    half = own.shape[-1] // 2
    size = np.hypot(own[0, ..., :half], own[0, ..., half:])
    error = np.abs(reused[0] - own[0])
    assert (error <= np.concatenate([size, size], axis=-1) * 2.0**-7).all()
    unmoved = np.abs(kept.source[0, 0, begin + shift:end + shift] - own[0])
    assert unmoved.mean() > 20 * error.mean()
    # Above it, V is that of the source, whose text before was another one.
    np.testing.assert_array_equal(kept.kv[:, 1, begin:end], kept.source[:, 1, begin + shift:end + shift])
    assert not np.array_equal(kept.kv[5, 1, begin:end], kept.exact[5, 1, begin:end])


def test_a_continuation_hardly_notices_and_notices_none_where_nothing_is_reused(kept):
    session = kept.pair.second
    exact = judge.continuation(kept.model, kept.exact, session.continuation)
    kl = {}
    for name, reused in (("none", []), ("document", kept.said["reused"])):
        cache = text_reuse.fill(kept.model, session.stored, reused, kept.kv, len(session.continuation))
        assert cache.length == len(session.stored)
        said = judge.Distributions.of(kept.model.extend(cache, session.continuation, logits="all"))
        kl[name] = judge.diverge(exact, said, session.continuation).kl.mean()
    print(f"KL {kl}")
    assert kl["none"] < 1e-5
    assert 10 * kl["none"] < kl["document"] < 0.1
    assert np.isclose(text_reuse.judge_reused(kept.folder, kept.pair, kept.folder / "out.kv", kept.said).kl.mean(),
                      kl["document"], rtol=1e-3)
