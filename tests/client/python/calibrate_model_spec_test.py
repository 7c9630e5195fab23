"""A model's spec from its configuration, without torch."""

import base64
import json

import pytest

from kvtrie.calibrate import model_spec
from kvtrie.errors import KvtrieError

_SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
            "head_dim": 64, "dtype": "bfloat16", "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
# As files of transformers 4 are.
_LLAMA3 = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
           "torch_dtype": "bfloat16", "rope_theta": 500000.0,
           "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}


def test_geometry_of_a_small_model():
    geometry = model_spec.geometry_from_config(_SMOLLM2)
    assert (geometry.layers, geometry.query_heads, geometry.kv_heads, geometry.head_dim) == (30, 9, 3, 64)
    assert (geometry.rope_theta, geometry.rotary_dims, geometry.rope_scaling) == (100000.0, 64, "")
    assert geometry.token_bytes == 30 * 2 * 3 * 64 * 2
    assert geometry.sample_tokens_max == 1024
    assert geometry.windows == (0,) * 30


def test_a_large_model_has_short_samples_and_its_scaling_rule_is_named():
    geometry = model_spec.geometry_from_config(_LLAMA3)
    assert geometry.head_dim == 128
    assert geometry.sample_tokens_max == (64 << 20) // (32 * 2 * 8 * 128 * 2) == 512
    assert geometry.rope_scaling == "llama3:factor=8.0,low_freq_factor=1.0"


def test_a_long_scaling_rule_is_a_digest():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 64}
    scaling = model_spec.geometry_from_config({**_SMOLLM2, "rope_parameters": rope}).rope_scaling
    assert scaling.startswith("longrope:") and len(scaling) == len("longrope:") + 64


def test_kv_may_be_of_another_type_than_the_weights():
    assert model_spec.geometry_from_config(_SMOLLM2, "float16").dtype == "float16"


def test_partly_turned_heads():
    config = {**_SMOLLM2, "partial_rotary_factor": 0.5}
    geometry = model_spec.geometry_from_config(config)
    assert geometry.rotary_dims == 32
    assert model_spec.spec_json(geometry, "n", "r", b"t", 16)["rope"]["rotary_dims"] == 32


def test_windows_are_those_of_the_layers():
    sliding = {**_SMOLLM2, "sliding_window": 4096}
    assert set(model_spec.geometry_from_config(sliding).windows) == {4096}
    assert set(model_spec.geometry_from_config({**sliding, "use_sliding_window": False}).windows) == {0}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 10
    geometry = model_spec.geometry_from_config({**sliding, "layer_types": kinds})
    groups = model_spec.spec_json(geometry, "n", "r", b"t", 16)["kv_groups"]
    assert len(groups) == 20
    assert [(group["window_tokens"], group["layer_runs"][0]["layer_count"]) for group in groups[:2]] == [
        (4096, 2), (0, 1)]


@pytest.mark.parametrize("change, what", [
    ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
    ({"num_hidden_layers": "30"}, "num_hidden_layers: 30"),
    ({"num_key_value_heads": 2}, "no multiple of num_key_value_heads"),
    ({"head_dim": 0}, "head_dim: 0"),
    ({"dtype": "float8"}, "float8, must be one of"),
    ({"dtype": None}, "dtype: missing"),
    ({"rope_parameters": None}, "rope_theta is missing"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "several ways"),
    ({"kv_lora_rank": 512}, "MLA"),
    ({"text_config": {}}, "models of more than text"),
    ({"layer_types": ["linear_attention"] * 30}, "layer_types"),
])
def test_other_models_are_refused_by_the_field(change, what):
    with pytest.raises(KvtrieError, match=what):
        model_spec.geometry_from_config({**_SMOLLM2, **change})


def test_the_spec_is_proto3_json():
    spec = model_spec.spec_json(model_spec.geometry_from_config(_SMOLLM2), "SmolLM2", "r1", b"\x00\xff", 16)
    assert base64.b64decode(spec.pop("tokenizer_digest")) == b"\x00\xff"
    assert spec == {
        "name": "SmolLM2", "weights_revision": "r1", "dtype": "DTYPE_BFLOAT16",
        "kv_groups": [{"layer_runs": [{"layer_count": 30, "kv_heads": 3, "k_head_dim": 64, "v_head_dim": 64}],
                       "window_tokens": 0}],
        "rope": {"pairing": "ROPE_PAIRING_HALF_SPLIT", "theta": 100000.0, "rotary_dims": 0, "scaling": ""},
        "block_tokens": 16}


def test_a_spec_of_somebody_else_must_describe_the_same_kv():
    made = model_spec.spec_json(model_spec.geometry_from_config(_SMOLLM2), "a", "b", b"c", 16)
    theirs = {"name": "x", "dtype": "DTYPE_BFLOAT16",
              "kvGroups": made["kv_groups"],  # not read: protobuf takes it, and so should this
              "kv_groups": [{"layerRuns": [{"layerCount": 30, "kvHeads": 3, "kHeadDim": 64, "vHeadDim": 64}]}],
              "rope": {"pairing": "ROPE_PAIRING_HALF_SPLIT", "theta": 100000}}
    model_spec.check_same_model(theirs, made)
    with pytest.raises(KvtrieError, match="rope is"):
        model_spec.check_same_model({**theirs, "rope": {"pairing": "ROPE_PAIRING_NONE"}}, made)
    with pytest.raises(KvtrieError, match="dtype is"):
        model_spec.check_same_model({**theirs, "dtype": "DTYPE_FLOAT16"}, made)


def test_files_of_a_model(tmp_path):
    with pytest.raises(KvtrieError, match="config.json: cannot be read"):
        model_spec.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(KvtrieError, match="no JSON object"):
        model_spec.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KvtrieError, match="is no JSON"):
        model_spec.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(_SMOLLM2))
    assert model_spec.read_config(tmp_path) == _SMOLLM2
    with pytest.raises(KvtrieError, match="has no weights"):
        model_spec.weight_files(tmp_path)
    with pytest.raises(KvtrieError, match="has no tokenizer"):
        model_spec.tokenizer_files(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    paths = model_spec.weight_files(tmp_path)
    assert [path.name for path in paths] == ["a.safetensors", "b.safetensors"]
    digest = model_spec.file_digest(paths)
    (tmp_path / "a.safetensors").write_bytes(b"onf")
    assert model_spec.file_digest(paths) != digest
