"""The model's own KV through a server at a level: put by the C++ client, read by clients that decode it and by
ones that leave it to the server, with a profile that a few texts were enough for."""

import dataclasses
import pathlib

import numpy as np
import pytest

import codec_tool
import judge
import kv_blocks
import kv_files
import schemes
import server_process
import smollm2
import smollm2_tokenizer
import speed
import texts

_FITTED = ("Artistic", "BSD", "GPL-2", "MPL-2.0")  # licenses
_FITTED_TOKENS = 384  # of each
_PREFIX_TOKENS = 256  # put and restored
_CONTINUATION_TOKENS = 192  # judged behind it


def _kv_of(model: smollm2.SmolLM2, token_ids: list[int]) -> smollm2.KvCache:
    cache = model.new_cache(len(token_ids))
    model.extend(cache, token_ids, logits="none")
    return cache


@dataclasses.dataclass(frozen=True)
class _Fitted:
    model: smollm2.SmolLM2
    tokenizer: smollm2_tokenizer.SmolLM2Tokenizer
    samples: pathlib.Path
    profile: pathlib.Path


@pytest.fixture(name="fitted", scope="module")
def _fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted")
    model = smollm2.SmolLM2()
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    samples = folder / "samples"
    samples.mkdir()
    for name in _FITTED:
        token_ids = tokenizer.encode(texts.license_text(name))[:_FITTED_TOKENS]
        cache = _kv_of(model, token_ids)
        (samples / f"{name}.tokens").write_bytes(np.array(token_ids, "<u4").tobytes())
        (samples / f"{name}.kv").write_bytes(kv_blocks.pack_block(cache, 0, len(token_ids)))
    options = {"table": 0, "inputs": "below,same-k"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_files, "cache_folder", lambda: folder / "cache")
        profile = codec_tool.fit(samples, options, schemes.Codec.material)
    return _Fitted(model, tokenizer, samples, profile)


@pytest.mark.parametrize("level", ["high", "near-exact"])
def test_kv_that_a_worker_codes_is_what_this_process_makes(tmp_path, fitted, level):
    prefix = fitted.tokenizer.encode(texts.license_text("Apache-2.0"))[:_PREFIX_TOKENS]
    kv = judge.get_kv(_kv_of(fitted.model, prefix))
    own = codec_tool.code(fitted.profile, level, {}, prefix, kv).kv

    with server_process.WorkerProcess(server_process.worker_binary(), tmp_path) as worker, \
            server_process.ServerProcess(server_process.server_binary(), tmp_path,
                                         ("--noprefault_memory",)) as server:
        restored, said = codec_tool.store(server.start().listen, fitted.profile, level, prefix, kv,
                                          worker.start().listen)
    # Which holds what the level is measured to cost.
    assert np.array_equal(restored, own)
    assert said["worker_blocks"] > 0
    assert said["blocks_without_worker"] == 0


def test_kv_put_at_high_costs_the_model_no_more_than_that(tmp_path, fitted):
    model = fitted.model
    token_ids = fitted.tokenizer.encode(texts.license_text("Apache-2.0"))
    token_ids = token_ids[:_PREFIX_TOKENS + _CONTINUATION_TOKENS]
    prefix, rest = token_ids[:_PREFIX_TOKENS], token_ids[_PREFIX_TOKENS:]
    kv = judge.get_kv(_kv_of(model, prefix))

    with server_process.ServerProcess(server_process.server_binary(), tmp_path,
                                      ("--noprefault_memory",)) as server:
        listen = server.start().listen
        restored, said = codec_tool.store(listen, fitted.profile, "high", prefix, kv)

    assert restored.shape == kv.shape
    assert not np.array_equal(restored, kv)
    assert said["bytes"] < said["raw_bytes"] / 3
    judged = judge.diverge(judge.continuation(model, kv, rest),
                           judge.continuation(model, restored, rest), rest)
    assert judged.kl.mean() <= 0.01
    print(f"KL {judged.kl.mean():.4f} nat; {said}")


def test_the_speed_of_a_fitted_profile_is_measured_on_real_kv(fitted):
    name = _FITTED[0]
    row = speed.measure("--profile", fitted.profile, "--tokens", fitted.samples / f"{name}.tokens",
                        "--kv", fitted.samples / f"{name}.kv")
    assert 0 < row["bits"] < 4
    assert min(row["encode"], row["decode"], row["symbols"]) > 0
