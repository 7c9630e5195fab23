"""What the command chooses, skips and refuses."""

import subprocess
import sys
import pathlib

import pytest

import codec_tool
import corpus
import run
import schemes
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

    ready, reasons = run.fit_codecs(schemes.SCHEMES, no_calibration)
    assert ready == [s for s in schemes.SCHEMES if isinstance(s, schemes.Baseline)]
    assert set(reasons) == {s.name for s in schemes.SCHEMES if isinstance(s, schemes.Codec)}
    assert all("build target codec_tool" in reason for reason in reasons.values())


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


def test_progress_says_nothing_within_two_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    progress = workers.Progress("work", 10)
    progress.show(1)
    now[0] += 1.9
    progress.show(2)
    assert capsys.readouterr().err == ""
    now[0] += 0.2
    progress.show(3)
    progress.show(4)
    progress.finish()
    assert capsys.readouterr().err == "work: 3/10, 2 s\nwork: 10/10, 2 s\n"
