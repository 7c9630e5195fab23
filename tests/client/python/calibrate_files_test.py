"""Work folders, the command kvtrie (a stand-in), figures, metrics and tables, without torch."""

import json
import sys

import numpy as np
import pytest

import kvtrie.calibrate.__main__
from kvtrie.calibrate import commands, figures, metrics, options, report, steps
from kvtrie.calibrate.work_folder import WorkFolder
from kvtrie.errors import KvtrieError


def test_a_work_folder_goes_on_with_the_same_run_only(tmp_path):
    work = WorkFolder(tmp_path / "w", {"model": "a", "tokens": 3})
    work.write_sample(work.fitted / "x", (1, 2), b"kv", np.ones((2, 1, 2)))
    assert (work.fitted / "x.tokens").read_bytes() == b"\1\0\0\0\2\0\0\0"
    assert (work.fitted / "x.kv").read_bytes() == b"kv"
    assert np.frombuffer((work.fitted / "x.importance").read_bytes(), "<f4").tolist() == [1] * 4
    again = WorkFolder(tmp_path / "w", {"model": "a", "tokens": 3})
    assert again.has_sample(again.fitted / "x") and not again.has_sample(again.fitted / "y")
    with pytest.raises(KvtrieError, match=r"another tokens \(3, not 4\)"):
        WorkFolder(tmp_path / "w", {"model": "a", "tokens": 4})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("")
    with pytest.raises(KvtrieError, match="no folder of a calibration"):
        WorkFolder(tmp_path / "other", {})


def test_a_sample_without_tokens_is_not_there(tmp_path):
    work = WorkFolder(tmp_path / "w", {})
    (work.fitted / "x.kv").write_bytes(b"kv")
    assert not work.has_sample(work.fitted / "x")


def test_files_appear_whole_or_not_at_all(tmp_path):
    work = WorkFolder(tmp_path / "w", {})
    work.write_arrays(work.sums("a"), x=np.arange(3))
    assert np.load(work.sums("a"))["x"].tolist() == [0, 1, 2]
    with pytest.raises(KvtrieError, match="cannot be written"):
        work.write(tmp_path / "none" / "a", b"")
    with pytest.raises(KvtrieError, match="cannot be written"):
        work.write_arrays(tmp_path / "none" / "a.npz", x=np.arange(3))
    assert not [path for path in tmp_path.rglob("*unfinished*")]


@pytest.fixture(name="program")
def _program(tmp_path):
    path = tmp_path / "kvtrie"
    path.write_text(f"#!{sys.executable}\nimport json, sys\n"
                    "if '--fail' in sys.argv: sys.exit('high: mean_kl is 1')\n"
                    "print('text' if '--text' in sys.argv else json.dumps({'said': sys.argv[1:], 'profile_id': 'ab'}))\n")
    path.chmod(0o755)
    return str(path)


def test_flags_of_the_command(program):
    kvtrie = commands.Kvtrie(program)
    assert kvtrie.profile("code", "file", flags={"high": 1, "heads": True, "none": None, "off": False})["said"] == [
        "profile", "code", "file", "--json", "--high=1", "--heads"]
    assert kvtrie.put("p.kvp", "host:1") == "ab"


def test_an_error_of_the_command_keeps_its_words(program, tmp_path, monkeypatch):
    kvtrie = commands.Kvtrie(program)
    with pytest.raises(KvtrieError, match="profile code: exit code 1: high: mean_kl is 1"):
        kvtrie.profile("code", flags={"fail": True})
    with pytest.raises(KvtrieError, match="printed no JSON"):
        kvtrie.profile("code", flags={"text": True})
    with pytest.raises(KvtrieError, match="is no program"):
        commands.Kvtrie(str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(KvtrieError, match="no command kvtrie in PATH"):
        commands.Kvtrie()


def _outcome(level, group, bits, kl, same=True, against=None, alone_bits=None):
    return figures.Outcome(level, "t", group, bits, np.array(kl), np.full(len(kl), same), against, alone_bits)


def test_a_level_claims_what_its_worst_group_had():
    rows = figures.of_groups([
        _outcome("high", "code", 0.4, [0.001, 0.003]), _outcome("high", "code", 0.6, [0.002, 0.002]),
        _outcome("high", "german", 0.8, [0.009, 0.007], same=False)])
    assert [(row.group, row.texts) for row in rows] == [("code", 2), ("german", 1), ("worst", 3)]
    assert rows[0].mean_kl == pytest.approx(0.002) and rows[0].bits_per_component == pytest.approx(0.5)
    worst = figures.worst(rows)["high"]
    assert worst.mean_kl == pytest.approx(0.008)
    assert worst.bits_per_component == pytest.approx(0.6)
    assert worst.same_top == 0
    measured = figures.measured_json("00", rows, {"model": "m"})
    assert measured["levels"] == [{"quality": "high", "bits_per_component": worst.bits_per_component,
                                   "mean_kl": worst.mean_kl, "kl_p99": worst.kl_p99}]
    assert len(measured["groups"]) == 2 and json.dumps(measured)


def test_a_level_claims_the_worse_of_alone_and_against_others():
    rows = figures.of_groups([
        _outcome("near-exact", "code", 1.5, [0.0005]), _outcome("high", "code", 0.5, [0.010, 0.000]),
        _outcome("small", "code", 0.2, [0.02, 0.04]),
        _outcome("high", "code", 0.06, [0.009, 0.007], same=False, against="near-exact", alone_bits=0.6),
        _outcome("high", "german", 0.04, [0.001, 0.001], against="near-exact", alone_bits=0.4),
        _outcome("small", "code", 0.05, [0.01, 0.01], against="high", alone_bits=0.2)])
    assert [(row.level, row.against, row.group) for row in rows] == [
        ("near-exact", None, "code"), ("near-exact", None, "worst"), ("high", None, "code"), ("high", None, "worst"),
        ("small", None, "code"), ("small", None, "worst"), ("high", "near-exact", "code"),
        ("high", "near-exact", "german"), ("high", "near-exact", "worst"), ("small", "high", "code"),
        ("small", "high", "worst")]
    assert figures.worst(rows)["high"].mean_kl == pytest.approx(0.005)
    against = figures.worst_against(rows)
    assert set(against) == {"high", "small"}
    assert against["high"].mean_kl == pytest.approx(0.008) and against["high"].of_alone == pytest.approx(0.1)
    assert against["high"].bits_per_component == pytest.approx(0.05) and against["high"].texts == 2
    claims = figures.claims(rows)
    assert claims["near-exact"] == figures.worst(rows)["near-exact"]
    assert claims["high"].mean_kl == pytest.approx(0.008) and claims["high"].bits_per_component == 0.5
    assert claims["high"].kl_p99 == figures.worst(rows)["high"].kl_p99 and claims["high"].same_top == 0
    assert claims["small"].mean_kl == pytest.approx(0.03)
    measured = figures.measured_json("00", rows, {})
    assert [level["mean_kl"] for level in measured["levels"]] == [row.mean_kl for row in claims.values()]
    assert [group["against"] for group in measured["groups"]] == [None, None, None, "near-exact", "near-exact", "high"]


def test_rounding_makes_no_kl_negative_and_no_number_is_an_error():
    assert figures.of_groups([_outcome("high", "a", 1, [-1e-9])])[0].mean_kl == 0
    with pytest.raises(KvtrieError, match="not a number"):
        figures.of_groups([_outcome("high", "a", 1, [np.nan])])


def test_query_statistics_are_mean_and_covariance():
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 3, 50, 4)) + 1  # [layer][head][token][dim]
    sums = [{"query_count": np.float64(25), "query_sum": part.sum(2), "query_outer": part.swapaxes(2, 3) @ part}
            for part in (q[:, :, :25], q[:, :, 25:])]
    numbers = metrics.query_statistics(sums)
    assert numbers.dtype == np.dtype("<f4")
    np.testing.assert_allclose(numbers[:24].reshape(2, 3, 4), q.mean(2), rtol=1e-5)
    covariance = numbers[24:].reshape(2, 3, 4, 4)
    np.testing.assert_allclose(covariance[1, 2], np.cov(q[1, 2].T, bias=True), rtol=1e-4, atol=1e-6)


def test_metrics_of_gradients_are_means_over_tokens():
    g = np.random.default_rng(2).standard_normal((4, 2, 30, 3))
    sums = [{"gradient_count": np.float64(10), "gradient_outer": part.swapaxes(2, 3) @ part}
            for part in np.split(g, 3, axis=2)]
    np.testing.assert_allclose(metrics.from_gradients(sums), g.swapaxes(2, 3) @ g / 30, rtol=1e-5)


def test_metrics_without_gradients_know_what_is_read():
    """One layer, one head: queries look along the first dimension, the output takes the second."""
    sums = [{"query_count": np.float64(1), "query_outer": np.diag([4.0, 0, 0, 0])[None, None],
             "value_count": np.float64(1), "value_sum": np.zeros((1, 1, 4)), "value_outer": np.eye(4)[None, None],
             "stream_count": np.float64(1), "stream_square": np.ones(1)}]
    weights = np.zeros((1, 1, 5, 4))
    weights[0, 0, 3, 1] = 2
    metric = metrics.without_gradients(sums, weights, 1, None)
    assert metric.shape == (2, 1, 4, 4)
    k, v = metric[:, 0]
    assert k[0, 0] > 0 and np.count_nonzero(k) == 1
    assert v[1, 1] > 0 and np.count_nonzero(v) == 1
    turned = metrics.without_gradients(sums, weights, 1, np.array([1.0, 0.1]))[0, 0]
    # The first pair is dimensions 0 and 2: what is read of one is read of the other, elsewhere.
    assert turned[2, 2] > 0 and turned[1, 1] == 0 and np.trace(turned) == pytest.approx(np.trace(k))


def test_tables_line_up():
    rows = figures.of_groups([_outcome("near-exact", "py", 1.25, [0.0005]), _outcome("near-exact", "md", 1, [0.002])])
    rows += figures.of_groups([_outcome("high", "py", 0.05, [0.004], against="near-exact", alone_bits=0.4)])
    text = report.figures_table(rows, {"near-exact": 0.00085, "high": 0.001})
    lines = text.splitlines()
    assert lines[0].split() == ["LEVEL", "STEP", "CODED", "GROUP", "TEXTS", "BITS", "OF", "ALONE", "MEAN", "KL", "KL",
                                "P99", "SAME", "TOKEN", "PROMISE"]
    assert "against near-exact  py" in lines[4] and "0.050      12 %" in lines[4]
    assert "kept, 0.001" in lines[1] and "BROKEN, 0.001" in lines[2] and "BROKEN" in lines[3]
    assert len({line.index("0.00085") for line in lines[1:4]}) == 1


def test_the_picture_is_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    rows = figures.of_groups([_outcome("high", "py", 0.5, [0.008]), _outcome("small", "py", 0.2, [0.0]),
                              _outcome("small", "py", 0.03, [0.01], against="high", alone_bits=0.2)])
    report.draw(rows, tmp_path / "a.png", "m")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KvtrieError, match="cannot be written"):
        report.draw(rows, tmp_path / "none" / "a.png", "m")


def test_a_missing_library_is_named_with_its_cure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delitem(sys.modules, "kvtrie.calibrate.run", raising=False)
    monkeypatch.delitem(sys.modules, "kvtrie.calibrate.torch_model", raising=False)
    monkeypatch.delattr(kvtrie.calibrate, "run", raising=False)
    monkeypatch.setattr(sys, "argv", ["calibrate", "m", "--text", "t", "--out", str(tmp_path / "o.kvp")])
    assert kvtrie.calibrate.__main__.main() == 1
    assert "pip install './client/python[calibrate]'" in capsys.readouterr().err


def _parse(tmp_path, *arguments):
    return options.parse(["model", "--text", "a.txt", "--out", str(tmp_path / "o.kvp"), *arguments])


def test_options(tmp_path):
    parsed = _parse(tmp_path)
    assert parsed.work == tmp_path / "o.kvp.work"
    assert parsed.near_exact == steps.FIRST_STEPS["near-exact"]
    assert options.first_token(None, 7) == 7
    assert options.first_token("none", 7) is None
    assert options.first_token("3", 7) == 3
    with pytest.raises(KvtrieError, match="must be a token id"):
        options.first_token("x", None)
    assert options.fit_flags(["table=3", "heads"]) == {"table": "3", "heads": True}
    with pytest.raises(KvtrieError, match="NAME=VALUE"):
        options.fit_flags(["=3"])
    with pytest.raises(KvtrieError, match="--png .*its folder does not exist"):
        _parse(tmp_path, "--png", str(tmp_path / "none/a.png"))


@pytest.mark.parametrize("arguments", [
    ["--repeated-samples", "-1"], ["--difference-steps", "0"], ["--difference-steps", "nan"],
    ["--continuation-tokens", "1024"], ["--block-tokens", "7"], ["--high", "-1"], ["--margin", "1"],
    ["--high", "0", "--small", "0", "--near-exact", "0"], ["--no-gradients", "--material", "m"]])
def test_contradictions_end_with_code_2(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        _parse(tmp_path, *arguments)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err
