"""What the command chooses, skips and refuses."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import codec_tool
import corpus
import fake_model
import judge
import kv_files
import run
import schemes
import smollm2_tokenizer
import workers


def test_names_of_schemes_are_unique_and_can_be_listed():
    names = [scheme.name for scheme in schemes.SCHEMES]
    assert len(set(names)) == len(names)
    assert not any("," in name for name in names)


def test_quick_is_a_part_and_only_overrides_it():
    everything, quick = run.chosen_schemes(False, []), run.chosen_schemes(True, [])
    assert len(everything) == len(schemes.SCHEMES) > len(quick) > 3
    assert [s.name for s in run.chosen_schemes(True, ["q8_0"])] == ["q8_0"]


def test_codecs_without_their_tool_are_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(codec_tool, "_PATH", tmp_path / "none")

    def no_calibration():
        raise AssertionError("calibration texts were prepared for nothing")

    ready, errors = run.fit_codecs(schemes.SCHEMES, no_calibration)
    assert ready == [s for s in schemes.SCHEMES if isinstance(s, schemes.Baseline)]
    assert set(errors) == {s.name for s in schemes.SCHEMES if isinstance(s, schemes.Codec)}
    assert all("build target kvtrie" in str(error) for error in errors.values())


def test_first_of_each_domain():
    texts = [corpus.Text(f"{domain}-{i}", domain, (1,)) for domain in ("German", "prose", "code")
             for i in range(3)]
    assert [t.name for t in run.first_of_each_domain(texts, 2)] == [
        "prose-0", "prose-1", "code-0", "code-1", "German-0", "German-1"]


@pytest.mark.parametrize("arguments,message", [
    (["--only", "q8_0,no such"], "no such schemes: no such"),
    (["--jobs", "0"], "--jobs: at least 1"),
    (["--json", "/no/such/folder/file"], "no folder for /no/such/folder/file"),
])
def test_wrong_options_are_named(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["quality.sh", *arguments])
    with pytest.raises(SystemExit):
        run.parse_options()
    assert message in capsys.readouterr().err


@pytest.fixture(name="command")
def _command(tmp_path, monkeypatch):
    """Runs main() with a stand-in for the model, on one text per domain."""
    rng = np.random.default_rng(10)
    texts = [corpus.Text(f"{domain}-0", domain,
                         tuple(rng.integers(0, 60, corpus.LONG_TEXT_TOKENS).tolist()))
             for domain in corpus.DOMAINS]
    model = fake_model.FakeModel()

    def read_kv(folder, name):
        del folder
        text, = (text for text in texts if text.name == name)
        cache = model.new_cache(corpus.PREFIX_TOKENS)
        model.extend(cache, text.token_ids[:corpus.PREFIX_TOKENS])
        return judge.get_kv(cache)

    monkeypatch.setattr(workers, "model", lambda: model)
    monkeypatch.setattr(run, "test_texts", lambda quick: (texts, texts))
    monkeypatch.setattr(kv_files, "prepare", lambda *args, **kwargs: tmp_path)
    monkeypatch.setattr(kv_files, "vocabulary", lambda: tmp_path / "vocabulary")
    monkeypatch.setattr(kv_files, "read_kv", read_kv)
    monkeypatch.setattr(codec_tool, "_PATH", tmp_path / "none")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["quality.sh", "--jobs", "1", *arguments])
        return run.main()

    return command


def test_a_run_writes_rows_and_a_picture(command, tmp_path, capsys):
    json_path, png_path = tmp_path / "rows.jsonl", tmp_path / "picture.png"
    names = "raw bf16,fp8 e4m3,TurboQuant 2 bit,kvtrie high"
    assert command("--only", names, "--json", str(json_path), "--png", str(png_path)) == 0
    rows = [json.loads(line) for line in json_path.read_text().splitlines()]
    whole = {row["name"]: row for row in rows if row["domain"] == "all"}
    assert list(whole) == ["raw bf16", "fp8 e4m3", "TurboQuant 2 bit"]
    assert [row["bits"] for row in whole.values()] == [16, 8, 2.5]  # a norm for 32 dimensions
    assert whole["raw bf16"]["kl"] > 0
    assert 0 < 10 * whole["fp8 e4m3"]["kl"] < whole["TurboQuant 2 bit"]["kl"]
    assert [row["domain"] for row in rows if row["name"] == "raw bf16"] == ["all", *corpus.DOMAINS]
    measures = [row["measure"] for row in rows if row["domain"] == "session"]
    assert measures == ["turn 1", "turn 3", "turn 6", "stored early", "next 16", "next 256",
                        "next 1000"]
    assert png_path.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert "no row for kvtrie high: no build/release/kvtrie" in said.out
    assert "schemes x texts: 19/19" in said.err


def test_prepare_names_the_folders(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "calibration_folder", lambda pool: tmp_path / "calibration")
    assert command("--prepare") == 0
    assert capsys.readouterr().out == f"calibration {tmp_path}/calibration\ntest {tmp_path}\n"


def test_a_run_without_rows_fails(command):
    assert command("--only", "kvtrie high") == 1


def test_a_failing_tool_costs_its_own_row_and_the_exit_code(command, monkeypatch, tmp_path, capsys):
    def failing(*_):
        raise codec_tool.CodecToolError("out of memory")

    (tmp_path / "tool").touch()
    monkeypatch.setattr(codec_tool, "_PATH", tmp_path / "tool")
    monkeypatch.setattr(codec_tool, "fit", lambda *_: tmp_path)
    monkeypatch.setattr(codec_tool, "code", failing)
    monkeypatch.setattr(run, "calibration_folder", lambda pool: tmp_path)
    assert command("--quick", "--only", "kvtrie high,q8_0") == 1
    said = capsys.readouterr().out
    assert "no row for kvtrie high: out of memory" in said and "q8_0  " in said


def test_the_command_explains_itself():
    command = pathlib.Path(__file__).resolve().parents[1] / "quality.sh"
    said = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "TurboQuant 4 bit" in said and "95 %" in said


def test_results_come_in_the_order_of_the_tasks():
    tasks = [(divmod, (7, divisor)) for divisor in (2, 3, 4)]
    for processes in (1, 2):
        with workers.Pool(processes) as pool:
            assert list(pool.run("divisions", tasks)) == [(3, 1), (2, 1), (1, 3)]


def test_an_error_of_a_task_is_raised():
    for processes in (1, 2):
        with workers.Pool(processes) as pool, pytest.raises(ZeroDivisionError):
            list(pool.run("divisions", [(divmod, (1, 0))]))


def test_progress_is_shown_at_the_start_now_and_then_and_at_the_end(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    progress = workers.Progress("work", 10)
    now[0] += 9
    progress.show(1)
    now[0] += 2
    progress.show(2)
    progress.show(3)
    progress.finish()
    assert capsys.readouterr().err.splitlines() == [
        "work: 0/10, 0 s", "work: 2/10, 11 s", "work: 10/10, 11 s"]


def test_texts_are_written_as_files(tmp_path):
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    ids = (1, *tokenizer.encode("Some words\nand a naïve line."))
    run.write_texts(tmp_path / "texts", [corpus.Text("python-docs-00", "python docs", ids)])
    written, = (tmp_path / "texts").iterdir()
    assert written.name == "python-docs-00.python-docs"
    assert tuple(tokenizer.encode(written.read_text())) == ids[1:]
