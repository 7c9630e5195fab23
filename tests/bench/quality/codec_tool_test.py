"""The wrapper of `kvtrie profile`, with a stand-in for the tool that says how it was called."""

import json
import stat
import sys

import numpy as np
import pytest

import codec_tool
import kv_files
import schemes
import smollm2
import smollm2_weights

_TOOL = f"""#!{sys.executable}
import json, os, pathlib, sys
verb, *rest = sys.argv[2:] if sys.argv[1] == "profile" else ["store", *sys.argv[1:]]
rest = [word for word in rest if word != "--json"]
flags = {{rest[i][2:]: rest[i + 1] for i in range(0, len(rest), 2)}}
spec = json.loads(pathlib.Path(flags["spec"]).read_text())
log = pathlib.Path(__file__).with_name("log")
log.write_text((log.read_text() if log.exists() else "") + json.dumps([verb, flags, spec]) + "\\n")
if "fail" in flags:
    sys.exit("profile is of another model: fit it again")
if verb == "fit":
    print("fitting", file=sys.stderr)
    pathlib.Path(flags["out"]).write_text("a profile")
    print("{{}}")
else:
    kv = pathlib.Path(flags["kv"]).read_bytes()
    tokens = len(pathlib.Path(flags["tokens"]).read_bytes()) // 4
    pathlib.Path(flags["out"]).write_bytes(kv)
    blocks = tokens // int(flags["block-tokens"])
    sizes = [10 + i for i in range(blocks)]
    print(json.dumps({{"block_bytes": sizes, "bytes": sum(sizes) + int(flags.get("wrong", 0))}}))
"""


@pytest.fixture(name="tool")
def _tool(tmp_path, monkeypatch):
    """The folder of the stand-in; calls are in its file "log"."""
    path = tmp_path / "codec_tool"
    path.write_text(_TOOL)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(codec_tool, "_PATH", path)
    monkeypatch.setattr(codec_tool, "_STORE_PATH", path)
    monkeypatch.setattr(kv_files, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path


def _calls(tool) -> list[list]:
    return [json.loads(line) for line in (tool / "log").read_text().splitlines()]


def _kv(tokens: int) -> np.ndarray:
    config = smollm2_weights.load_config()
    shape = (config.layer_count, 2, tokens, config.kv_head_count, config.head_dim)
    kv = np.random.default_rng(9).standard_normal(shape).astype(np.float32)
    return smollm2.round_to_bf16(kv)


def test_a_missing_tool_says_what_to_build(tmp_path, monkeypatch):
    monkeypatch.setattr(codec_tool, "_PATH", tmp_path / "none")
    with pytest.raises(codec_tool.CodecToolError, match="build target kvtrie"):
        codec_tool.tool_path()


def test_a_profile_is_fitted_once_per_samples_and_options(tool):
    samples = tool / "samples-1"
    profile = codec_tool.fit(samples, {"b": 2, "a": 1})
    assert profile.read_text() == "a profile"
    assert codec_tool.fit(samples, {"a": 1, "b": 2}) == profile
    (verb, flags, spec), = _calls(tool)
    assert verb == "fit" and flags["a"] == "1" and flags["b"] == "2"
    assert flags["samples"] == str(samples)
    assert "material" not in flags
    assert spec["kv_groups"][0]["layer_runs"][0] == {
        "layer_count": 30, "kv_heads": 3, "k_head_dim": 64, "v_head_dim": 64}
    assert spec["dtype"] == "DTYPE_BFLOAT16" and spec["rope"]["theta"] == 100000
    assert codec_tool.fit(samples, {}) != profile
    assert codec_tool.fit(tool / "samples-2", {}) != codec_tool.fit(samples, {})
    assert [path.name for path in profile.parent.iterdir() if "." in path.name] == []


def test_a_fit_has_the_inputs_that_its_scheme_names(tool):
    material = tool / "material"
    material.write_bytes(b"some")
    scheme = schemes.Codec("x", "kvtrie", "high", material=material)
    profile = scheme.fitted(tool / "samples").profile
    (_, flags, _), = _calls(tool)
    assert flags["material"] == str(material)
    vocabulary = np.fromfile(flags["vocabulary"], "<u4").reshape(-1)
    tokens = len(vocabulary) // (1 + 2 * 192)
    assert vocabulary[:tokens].tolist() == list(range(tokens)) and tokens == 49152
    material.write_bytes(b"others")
    assert scheme.fitted(tool / "samples").profile != profile


def test_a_scheme_restores_what_the_tool_writes(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", code={"rounds": 2}).fitted(tool / "samples")
    kv = _kv(64)
    restored = scheme.restore(range(64), kv)
    np.testing.assert_array_equal(restored.kv, kv)
    assert restored.byte_count == 10 + 11 + 12 + 13
    verb, flags, _ = _calls(tool)[-1]
    assert verb == "code" and flags["rounds"] == "2"
    assert flags["level"] == "high" and flags["block-tokens"] == "16"
    assert flags["profile"] == str(scheme.profile)


def test_blocks_of_another_size_and_importance_go_to_the_tool(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", block_tokens=32).fitted(tool / "samples")
    assert scheme.restore(range(64), _kv(64)).byte_count == 10 + 11
    weights = np.arange(64, dtype=np.float32)
    codec_tool.code(scheme.profile, "high", {}, range(64), _kv(64), importance=weights)
    plain, weighted = (flags for verb, flags, _ in _calls(tool) if verb == "code")
    assert plain["block-tokens"] == "32" and "token-importance" not in plain
    assert weighted["token-importance"].endswith("in.importance")


def test_only_the_bytes_of_new_blocks_count(tool):
    scheme = schemes.Codec("x", "kvtrie", "high").fitted(tool / "samples")
    kv = _kv(64)
    restored = scheme.restore(range(64), kv, 32)
    np.testing.assert_array_equal(restored.kv, kv[:, :, 32:])
    assert restored.byte_count == 12 + 13


def test_sizes_that_contradict_each_other_are_refused(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", code={"wrong": 1}).fitted(tool / "samples")
    with pytest.raises(codec_tool.CodecToolError, match="4 blocks of 46 bytes, and there are 4 of 47"):
        scheme.restore(range(64), _kv(64))


def test_an_error_of_the_tool_keeps_its_words(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", code={"fail": 1}).fitted(tool / "samples")
    with pytest.raises(codec_tool.CodecToolError,
                       match="code: exit code 1: profile is of another model"):
        scheme.restore(range(16), _kv(16))


def test_a_partly_filled_block_is_refused(tool):
    with pytest.raises(ValueError, match="a multiple of 16"):
        codec_tool.code(tool, "high", {}, range(20), _kv(20))


def test_what_is_stored_goes_to_the_server_that_was_named(tool):
    kv = _kv(32)
    restored, said = codec_tool.store("host:1", tool / "profile", "high", list(range(32)), kv)
    np.testing.assert_array_equal(restored, kv)
    assert said["block_bytes"] == [10, 11]
    (verb, flags, _), = _calls(tool)
    assert verb == "store"
    assert flags["server"] == "host:1" and flags["level"] == "high"
