"""The wrapper of codec_tool, with a stand-in for the tool that says how it was called."""

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
verb, *rest = sys.argv[1:]
options = [rest[i + 1] for i in range(len(rest)) if rest[i] == "--option"]
flags = {{rest[i][2:]: rest[i + 1] for i in range(0, len(rest), 2) if rest[i] != "--option"}}
spec = json.loads(pathlib.Path(flags["spec"]).read_text())
log = pathlib.Path(__file__).with_name("log")
log.write_text((log.read_text() if log.exists() else "") + json.dumps([verb, flags, options, spec]) + "\\n")
if "fail" in options or "fail=1" in options:
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
    said = {{"bytes": 10 * blocks, "raw_bytes": len(kv), "components": len(kv) // 2, "frames": blocks}}
    if "sizes=1" in options:
        said["block_bytes"] = [10 + i for i in range(blocks)]
        said["bytes"] = sum(said["block_bytes"])
    print(json.dumps(said))
"""


@pytest.fixture(name="tool")
def _tool(tmp_path, monkeypatch):
    """The folder of the stand-in; calls are in its file "log"."""
    path = tmp_path / "codec_tool"
    path.write_text(_TOOL)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(codec_tool, "_PATH", path)
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
    with pytest.raises(codec_tool.CodecToolError, match="build target codec_tool"):
        codec_tool.tool_path()


def test_a_profile_is_fitted_once_per_samples_and_options(tool):
    samples = tool / "samples-1"
    profile = codec_tool.fit(samples, {"b": 2, "a": 1})
    assert profile.read_text() == "a profile"
    assert codec_tool.fit(samples, {"a": 1, "b": 2}) == profile
    (verb, flags, options, spec), = _calls(tool)
    assert verb == "fit" and options == ["a=1", "b=2"]
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
    (_, flags, _, _), = _calls(tool)
    assert flags["material"] == str(material)
    material.write_bytes(b"others")
    assert scheme.fitted(tool / "samples").profile != profile


def test_a_scheme_restores_what_the_tool_writes(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", code={"dead_zone": 0.15}).fitted(tool / "samples")
    kv = _kv(64)
    restored = scheme.restore(range(64), kv)
    np.testing.assert_array_equal(restored.kv, kv)
    assert restored.byte_count == 40
    verb, flags, options, _ = _calls(tool)[-1]
    assert verb == "code" and options == ["dead_zone=0.15"]
    assert flags["level"] == "high" and flags["block-tokens"] == "16"
    assert flags["profile"] == str(scheme.profile)


def test_only_the_bytes_of_new_blocks_count(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", code={"sizes": 1}).fitted(tool / "samples")
    kv = _kv(64)
    restored = scheme.restore(range(64), kv, 32)
    np.testing.assert_array_equal(restored.kv, kv[:, :, 32:])
    assert restored.byte_count == 12 + 13
    equal = schemes.Codec("x", "kvtrie", "high").fitted(tool / "samples")
    assert equal.restore(range(64), kv, 16).byte_count == 30


def test_an_error_of_the_tool_keeps_its_words(tool):
    scheme = schemes.Codec("x", "kvtrie", "high", code={"fail": 1}).fitted(tool / "samples")
    with pytest.raises(codec_tool.CodecToolError,
                       match="code: exit code 1: profile is of another model"):
        scheme.restore(range(16), _kv(16))


def test_a_partly_filled_block_is_refused(tool):
    with pytest.raises(ValueError, match="a multiple of 16"):
        codec_tool.code(tool, "high", {}, range(20), _kv(20))
