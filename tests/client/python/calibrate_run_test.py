"""A whole calibration of a tiny model with random weights. Needs torch, transformers and the command kvtrie."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

# pylint: disable=wrong-import-position
import torch
import transformers

from kvtrie.calibrate import model_spec, torch_model
from kvtrie.errors import KvtrieError

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_KVTRIE = pathlib.Path(os.environ.get("KVTRIE_PROGRAM", _ROOT / "build/release/kvtrie"))
_LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"

_SHAPE = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1}
_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(head_dim=16, **_SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=16, **_SHAPE),
    "mistral": lambda: transformers.MistralConfig(head_dim=16, sliding_window=4096, **_SHAPE),
    "llama3 scaling": lambda: transformers.LlamaConfig(head_dim=16, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0}, **_SHAPE),
}


def _make(folder: pathlib.Path, kind: str, scale: float = 1.0) -> pathlib.Path:
    """A model with a tokenizer of one token per letter. scale: of the weights of q and k."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[kind]())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6 * (scale if "q_proj" in name or "k_proj" in name else 1))
    model.to(torch.float32).save_pretrained(folder)
    import tokenizers
    vocabulary = {"<unk>": 0, "<s>": 1} | {letter: 2 + i for i, letter in enumerate(_LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>",
                                         unk_token="<unk>").save_pretrained(folder)
    return folder


def _load(folder: pathlib.Path) -> torch_model.Model:
    geometry = model_spec.geometry_from_config(model_spec.read_config(folder))
    return torch_model.Model(folder, geometry, "float32", "cpu")


@pytest.mark.parametrize("kind", list(_CONFIGS))
def test_kv_is_what_the_model_goes_on_from(tmp_path, kind):
    """Restored exactly, the prefix's KV gives the output of the whole text."""
    model = _load(_make(tmp_path, kind))
    ids = tuple(int(i) for i in np.random.default_rng(1).integers(2, 30, 48))
    said = model.log_probabilities(model.prefill(ids[:32]), ids[32:])
    with torch.no_grad():
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids])).logits[0, 32:]
    kl, same = torch_model.divergence(torch.log_softmax(whole, -1), said)
    assert kl.max() < 1e-4 and same.all()


@pytest.mark.parametrize("kind", list(_CONFIGS))
def test_the_first_layer_depends_on_the_token_alone(tmp_path, kind):
    model = _load(_make(tmp_path, kind))
    rows = model.first_layer(range(model.vocabulary_tokens))
    if kind == "llama3 scaling":
        assert rows is None
        return
    assert rows.shape == (64, 2, 2, rows.shape[-1])
    ids = tuple(int(i) for i in np.random.default_rng(1).integers(2, 30, 48))
    kv = np.frombuffer(model.prefill(ids), "<f4").reshape(3, 2, 48, 2, -1)[0]
    np.testing.assert_allclose(rows[list(ids), 1], kv[1], rtol=1e-3, atol=1e-3)
    turned_back = model._turn_back(torch.tensor(kv[0]).transpose(0, 1)).transpose(0, 1)  # pylint: disable=protected-access
    np.testing.assert_allclose(rows[list(ids), 0], turned_back, rtol=1e-3, atol=1e-3)


def test_gradients_are_those_of_errors_in_stored_kv(tmp_path):
    """Fisher's information says what a small error costs: KL = e^T M e / 2, summed over the continuation."""
    model = _load(_make(tmp_path, "llama"))
    ids = tuple(int(i) for i in np.random.default_rng(1).integers(2, 30, 48))
    draws = 400
    computed = model.compute(ids, 32, draws, 1)
    assert computed.importance.shape == (6, 2, 32)
    kv = np.frombuffer(computed.kv, "<f4").reshape(3, 2, 32, 2, 16)
    reference = model.log_probabilities(computed.kv, ids[32:])
    rng = np.random.default_rng(2)
    token, plane, head = 20, 3, 1
    expected, found = [], []
    for _ in range(12):
        error = rng.standard_normal(16) * 0.02
        changed = kv.copy()
        changed[plane // 2, plane % 2, token, head] += error
        kl, _ = torch_model.divergence(reference, model.log_probabilities(changed.tobytes(), ids[32:]))
        found.append(kl.sum())
        # Over random directions, e^T M e is |e|^2 times the mean of M's diagonal.
        expected.append(np.square(error).sum() * computed.importance[plane, head, token] / 16 / 2)
    assert np.mean(found) == pytest.approx(np.mean(expected), rel=0.4)


def test_importance_does_not_depend_on_how_k_is_turned(tmp_path):
    """Turning back keeps lengths; metrics do depend on it, and have the same trace."""
    model = _load(_make(tmp_path, "llama"))
    ids = tuple(int(i) for i in np.random.default_rng(1).integers(2, 30, 48))
    turned = model.compute(ids, 32, 2, 1)
    model._turned = False  # pylint: disable=protected-access
    kept = model.compute(ids, 32, 2, 1)
    np.testing.assert_allclose(turned.importance, kept.importance, rtol=1e-3, atol=1e-9)
    a, b = turned.sums["gradient_outer"], kept.sums["gradient_outer"]
    np.testing.assert_allclose(np.trace(a, axis1=2, axis2=3), np.trace(b, axis1=2, axis2=3), rtol=1e-3)
    assert np.abs(a[0] - b[0]).max() > 0.01 * np.abs(a[0]).max()
    np.testing.assert_allclose(a[1], b[1])


def test_a_model_that_is_not_what_its_configuration_says_is_refused(tmp_path):
    _make(tmp_path, "llama")
    config = model_spec.read_config(tmp_path)
    geometry = model_spec.geometry_from_config(config)
    import dataclasses
    with pytest.raises(KvtrieError, match="layer 0: K is not turned by RoPE of theta 500"):
        torch_model.Model(tmp_path, dataclasses.replace(geometry, rope_theta=500.0), "float32", "cpu")
    with pytest.raises(KvtrieError, match="3 of 4 layers have an attention"):
        torch_model.Model(tmp_path, dataclasses.replace(geometry, layers=4), "float32", "cpu")


def _texts(folder: pathlib.Path) -> pathlib.Path:
    rng = np.random.default_rng(5)
    words = ["".join(rng.choice(list(_LETTERS[:26]), rng.integers(2, 7))) for _ in range(60)]
    folder.mkdir()
    for i in range(14):
        text = " ".join(rng.choice(words, 120))
        (folder / f"{i}.{'txt' if i < 6 else 'md' if i < 12 else 'other'}").write_text(text)
    return folder


def _run(folder: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", "-m", "kvtrie.calibrate", folder / "model", "--text",
               *sorted((folder / "texts").glob("*.txt")), *sorted((folder / "texts").glob("*.md")),
               "--held-out-group", f"other={folder}/texts/*.other", "--out", folder / "p.kvp", "--kvtrie", _KVTRIE,
               "--sample-tokens", 128, "--continuation-tokens", 48, "--threads", 1, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(_ROOT / "client/python")})


@pytest.mark.skipif(not _KVTRIE.is_file(), reason=f"no {_KVTRIE}: build target kvtrie")
@pytest.mark.parametrize("mode", ["gradients", "no gradients"])
def test_every_level_of_the_profile_keeps_its_promise(tmp_path, mode):
    (tmp_path / "model").mkdir()
    _make(tmp_path / "model", "llama")
    _texts(tmp_path / "texts")
    more = ["--no-gradients"] if mode == "no gradients" else []
    more += ["--fits-max", 12, "--json", tmp_path / "measured.json"]
    done = _run(tmp_path, *more)
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert [level["quality"] for level in measured["levels"]] == ["near-exact", "high", "small"]
    for level, bound in zip(measured["levels"], (0.001, 0.01, 0.05)):
        assert 0 < level["mean_kl"] <= 0.9 * bound
    assert {group["group"] for group in measured["groups"]} == {"txt", "md", "other"}
    assert "BROKEN" not in done.stdout.split("LEVEL")[-1]
    profile = (tmp_path / "p.kvp").read_bytes()
    assert profile.startswith(b"KVP1")

    again = _run(tmp_path, *more)  # nothing is computed again
    assert again.returncode == 0 and (tmp_path / "p.kvp").read_bytes() == profile
    other = _run(tmp_path, *more, "--continuation-tokens", 64)
    assert other.returncode == 1 and "is of a run with another" in other.stderr
