"""A whole calibration of a tiny model with random weights. Needs torch, transformers and the command kvtrie."""

import argparse
import dataclasses
import json
import math
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

from kvtrie.calibrate import figures, measure, model_spec, repeated, run, steps, torch_model
from kvtrie.calibrate.texts import Sample
from kvtrie.calibrate.work_folder import WorkFolder
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


class _Coder:
    """A stand-in for the command: what is restored tells how it was coded."""

    def __init__(self):
        self.flags: list[dict] = []

    def profile(self, verb, flags):
        assert verb == "code"
        self.flags.append(flags)
        if "out" in flags:
            flags["out"].write_bytes(b"against" if "against-kv" in flags else b"alone")
        size = 1 if "against-kv" in flags else 10
        return {"blocks": 4, "tokens": 64, "components": 400, "block_bytes": [1000, size, size, size]}


class _Model:
    def log_probabilities(self, kv, token_ids):
        """Of two tokens of a vocabulary, the first of which is likelier on KV that was restored."""
        first = {b"exact": 0.5, b"alone": 0.6, b"against": 0.7}[kv]
        return torch.log(torch.tensor([[first, 1 - first]] * len(token_ids)))


def test_what_is_measured_of_text_behind_another_prefix(tmp_path):
    work = WorkFolder(tmp_path, {})
    sample = Sample("s", "py", tuple(range(72)), "t")
    session = repeated.Session("again", sample, tuple(range(100, 172)), 20)
    for name in ("s", "again"):
        work.write_sample(work.held_out(name), sample.token_ids[:64], b"exact")
    coder = _Coder()
    measurement = measure.Measurement(coder, work, _Model(), 64, lambda items, title: items)
    outcomes = measurement.again("key", {"high": "near-exact", "small": "high"}, [session], "")
    assert [(outcome.level, outcome.against, outcome.text, outcome.group) for outcome in outcomes] == [
        ("high", "near-exact", "again", "py"), ("small", "high", "again", "py")]
    flags = coder.flags[0]
    assert flags["level"] == "high" and flags["against-level"] == "near-exact"
    assert flags["kv"] == f"{work.held_out('again')}.kv" and flags["against-kv"] == f"{work.held_out('s')}.kv"
    # Of blocks 1 to 3, which hold tokens 20 to 63.
    assert outcomes[0].bits_per_component == pytest.approx(8 * 3 / 300)
    assert outcomes[0].alone_bits == pytest.approx(8 * 30 / 300)
    assert len(outcomes[0].kl) == 8 and outcomes[0].kl[0] == pytest.approx(0.5 * np.log(0.25 / 0.21), rel=1e-5)
    alone = measurement.alone("key", ["high"], [sample], "")
    assert alone[0].bits_per_component == pytest.approx(8 * 1030 / 400) and alone[0].alone_bits is None
    assert alone[0].kl[0] == pytest.approx(0.5 * np.log(0.25 / 0.24), rel=1e-5)

    count = len(coder.flags)
    again = measurement.again("key", {"high": "near-exact", "small": "high"}, [session], "")
    assert again[0].alone_bits == outcomes[0].alone_bits and again[1].kl.tolist() == outcomes[1].kl.tolist()
    measurement.alone("key", ["high"], [sample], "")
    assert len(coder.flags) == count  # both are read
    measurement.alone("other", ["high"], [sample], "")
    assert len(coder.flags) == count + 1


def _calibration(monkeypatch, tmp_path, kl_of_steps: dict[float, float], of_alone: float):
    """One whose fits of differences have this KL at level high, by their steps."""
    calibration = object.__new__(run._Calibration)  # pylint: disable=protected-access
    calibration._options = argparse.Namespace(margin=0.1, difference_steps=4.0)  # pylint: disable=protected-access
    calibration._fitted_again, calibration._work = [], WorkFolder(tmp_path, {})  # pylint: disable=protected-access
    calibration._fitted_again.append(repeated.Session("x", None, (), 0))  # pylint: disable=protected-access
    monkeypatch.setattr(calibration, "_prefill", lambda *_: None)

    def fit_differences(fit, _material, pairs, difference_steps):
        assert pairs == {"high": "near-exact"}
        row = figures.Figures("high", "worst", 1, 0.05, kl_of_steps[difference_steps], 0.1, 1, "near-exact", of_alone)
        return dataclasses.replace(fit, key=f"{difference_steps:g}", difference_steps=difference_steps,
                                   rows=[*fit.rows, row])
    monkeypatch.setattr(calibration, "_fit_differences", fit_differences)
    return calibration


def _fit(*levels: str):
    chosen = {level: steps.FIRST_STEPS[level] for level in levels}
    return run._Fit("base", chosen, "00", [])  # pylint: disable=protected-access


def test_steps_of_differences_are_halved_until_they_keep_the_promise(monkeypatch, tmp_path, capsys):
    def with_differences(kl, *levels, of_alone=0.1):
        calibration = _calibration(monkeypatch, tmp_path, kl, of_alone)
        return calibration._with_differences(_fit(*levels), None)  # pylint: disable=protected-access
    middle = math.sqrt(8)
    found = with_differences({4.0: 0.0095, 2.0: 0.0089, middle: 0.0091}, "near-exact", "high")
    assert found.key == "2" and found.difference_steps == 2
    said = capsys.readouterr().out
    assert "steps 4 times" in said and "Taken are steps 2 times" in said
    found = with_differences({4.0: 0.0095, 2.0: 0.0089, middle: 0.009}, "near-exact", "high")
    assert found.difference_steps == middle
    assert with_differences({4.0: 0.0089}, "near-exact", "high").difference_steps == 4
    capsys.readouterr()
    found = with_differences({4.0: 0.02, 2.0: 0.02, 1.0: 0.02}, "near-exact", "high")
    assert found == _fit("near-exact", "high")
    assert "high does not keep its promise with a margin against the same text" in capsys.readouterr().out
    assert with_differences({}, "high") == _fit("high")  # nothing is finer
    assert with_differences({4.0: 0.001}, "near-exact", "high", of_alone=0.95) == _fit("near-exact", "high")
    assert "hardly less than alone" in capsys.readouterr().out


def test_a_profile_that_differences_make_too_large_does_without(monkeypatch, tmp_path, capsys):
    calibration = _calibration(monkeypatch, tmp_path, {}, 0.1)
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "_prefill", lambda *_: None)
    monkeypatch.setattr(run, "_PROFILE_BYTES_MAX", 3 << 20)
    calibration._options.fit_flag = ["heads", "table=3"]  # pylint: disable=protected-access
    asked = []

    class Fits:
        def profile(self, verb, flags):
            asked.append((verb, flags))
            flags["out"].write_bytes(bytes(5 << 20))
            return {"body_digest": "01"}
    calibration._kvtrie = Fits()  # pylint: disable=protected-access
    fit = _fit("near-exact", "high")
    assert calibration._with_differences(fit, "material") == fit  # pylint: disable=protected-access
    assert "has 5 MiB, must have at most 3" in capsys.readouterr().out
    (verb, flags), = asked
    assert verb == "fit" and flags["difference-steps"] == "4" and flags["heads"] and "table" not in flags
    assert flags["base"].name == "base.draft" and flags["repeated"].name == "repeated"


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
    assert "will code no text against another: fitted samples give" in done.stderr  # so short are they
    profile = (tmp_path / "p.kvp").read_bytes()
    assert profile.startswith(b"KVP1")

    again = _run(tmp_path, *more)  # nothing is computed again
    assert again.returncode == 0 and (tmp_path / "p.kvp").read_bytes() == profile
    other = _run(tmp_path, *more, "--continuation-tokens", 64)
    assert other.returncode == 1 and "is of a run with another" in other.stderr


@pytest.mark.skipif(not _KVTRIE.is_file(), reason=f"no {_KVTRIE}: build target kvtrie")
def test_a_profile_codes_text_against_the_same_text_elsewhere(tmp_path):
    (tmp_path / "model").mkdir()
    _make(tmp_path / "model", "llama")
    _texts(tmp_path / "texts")
    # Steps that are fine enough: at coarser ones nearly all that such small blocks take is what every frame takes.
    more = ["--no-gradients", "--fits-max", 1, "--near-exact", 0.0001, "--high", 0.0005, "--small", 0.002, "--json",
            tmp_path / "measured.json", "--png", tmp_path / "p.png", "--sample-tokens", 256, "--repeated-samples", 20]
    done = _run(tmp_path, *more)
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "measured.json").read_text())
    against = [group for group in measured["groups"] if group["against"]]
    assert 1 <= measured["about"]["difference_steps"] <= 4
    assert [(group["level"], group["against"]) for group in against] == [("high", "near-exact")] * 3 + [
        ("small", "high")] * 3
    assert {group["group"] for group in against} == {"txt", "md", "other"}
    for group in against:
        assert group["of_alone"] < 0.9 and group["mean_kl"] <= 0.9 * steps.MEAN_KL_MAX[group["level"]]
    for level in measured["levels"]:
        assert level["mean_kl"] == max(group["mean_kl"] for group in measured["groups"]
                                       if group["level"] == level["quality"])
    assert "against near-exact" in done.stdout and (tmp_path / "p.png").exists()

    profile = (tmp_path / "p.kvp").read_bytes()
    again = _run(tmp_path, *more)  # nothing is computed again
    assert again.returncode == 0 and (tmp_path / "p.kvp").read_bytes() == profile
    assert "fit of differences" in done.stderr and "fit of differences" not in again.stderr
    without = _run(tmp_path, *more, "--repeated-samples", 0)
    assert without.returncode == 0, without.stderr
    assert len((tmp_path / "p.kvp").read_bytes()) < len(profile) and "against near-exact" not in without.stdout
