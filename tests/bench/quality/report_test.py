"""Rows, intervals, tables and pictures, of outcomes that can be reckoned."""

import json

import numpy as np
import pytest

import corpus
import judge
import report
import schemes

_ONE = schemes.Baseline("one", "family", "bf16")
_TWO = schemes.Baseline("two", "family", "bf16")


def _outcome(scheme: str, text: str, domain: str, bits: float, kl: list[float],
             change: float, measure: str = "") -> report.Outcome:
    divergence = judge.Divergence(np.array(kl), np.full(len(kl) - 1, change),
                                  np.arange(len(kl)) > 0)
    return report.Outcome(scheme, text, domain, bits, divergence, measure)


@pytest.fixture(name="outcomes")
def _outcomes() -> list[report.Outcome]:
    """Scheme "one": two texts per English domain with KL 1 to 8, and a German text of KL 100."""
    english = [_outcome("one", f"{domain}-{i}", domain, 4, [1 + 2 * d + i] * 4, 0.1 * i)
               for d, domain in enumerate(corpus.ENGLISH_DOMAINS) for i in range(2)]
    return [*english,
            _outcome("one", "German-0", "German", 6, [100.0] * 4, -0.5),
            _outcome("two", "prose-0", "prose", 2, [0.5] * 4, 0.0),
            _outcome("one", "prose-0", "prose", 3, [9.0] * 4, 0.0, measure="turn 3")]


def test_all_is_the_mean_over_the_english_domains(outcomes):
    found = report.rows([_ONE], outcomes)
    assert [(row["domain"], row["texts"]) for row in found] == [
        ("all", 8), ("prose", 2), ("quotes", 2), ("code", 2), ("chat", 2), ("German", 1),
        ("session", 1)]
    whole = found[0]
    assert whole["bits"] == 4 and whole["kl"] == 4.5 and whole["top1"] == 0.75
    assert whole["dnll"] == pytest.approx(0.05)
    assert 7 < whole["kl_p99"] <= 8
    # Eight values, half of them 0.1: standard deviation 0.1 sqrt(2 / 7), t of 7 degrees 2.365.
    half_width = 2.365 * 0.1 * (2 / 7)**0.5 / 8**0.5
    assert whole["dnll_ci"] == pytest.approx([0.05 - half_width, 0.05 + half_width])
    assert found[1]["kl"] == 1.5
    assert found[5]["kl"] == 100 and found[5]["dnll_ci"] is None


def test_rows_are_json_with_the_promised_keys(outcomes):
    for row in report.rows([_ONE, _TWO], outcomes):
        again = json.loads(json.dumps(row))
        assert again == row
        assert {"name", "bits", "kl", "kl_p99", "dnll", "dnll_ci", "top1", "domain"} <= set(row)
        assert ("measure" in row) == (row["domain"] == "session")


def test_bits_at_equal_kl_follow_the_curve_and_end_beyond_it():
    curve = [(4.0, 0.01), (1.0, 0.16), (2.0, 0.04), (9.0, 0.0)]
    assert report.bits_at_kl(curve, 0.02) == pytest.approx(2 * 2**0.5)
    assert report.bits_at_kl(curve, 0.16) == pytest.approx(1)
    assert report.bits_at_kl(curve, 0.005) == pytest.approx(4 * 2**0.5)
    assert report.bits_at_kl(curve, 0.32) == pytest.approx(1 / 2**0.5)
    assert report.bits_at_kl(curve, 0.0049) is None and report.bits_at_kl(curve, 0.33) is None
    assert report.bits_at_kl(curve[:1], 0.01) is None


def test_schemes_are_compared_on_the_texts_that_they_share():
    ours = [schemes.Baseline(f"ours {i}", "kvtrie", "bf16") for i in range(2)]
    outcomes = [_outcome("ours 0", "prose-0", "prose", 1, [0.4] * 4, 0.0),
                _outcome("ours 1", "prose-0", "prose", 2, [0.1] * 4, 0.0),
                _outcome("ours 0", "prose-1", "prose", 50, [40.0] * 4, 0.0),
                _outcome("one", "prose-0", "prose", 3, [0.1] * 4, 0.0),
                _outcome("two", "code-0", "code", 3, [0.1] * 4, 0.0)]
    rows = {(row["name"], row["domain"]): row for row in report.rows([*ours, _ONE, _TWO], outcomes)}
    assert rows["one", "prose"]["bits_ratio"] == pytest.approx(1.5)
    assert rows["one", "all"]["bits_ratio"] == pytest.approx(1.5)
    assert rows["two", "code"]["bits_ratio"] is None


def test_sessions_do_not_count_for_the_domains(outcomes):
    found = report.rows([_ONE], outcomes)
    assert [row["kl"] for row in found if row["domain"] == "prose"] == [1.5]
    assert [row["measure"] for row in found if row["domain"] == "session"] == ["turn 3"]


def test_table_names_every_scheme_and_german_apart(outcomes):
    text = report.table(report.rows([_ONE, _TWO], outcomes))
    english, german, sessions_part = text.split("\n\n")
    assert english.startswith("English, mean over prose, quotes, code, chat; texts: 8")
    assert "one" in english and "two" in english and "4.50000" in english and "±" in english
    assert german.startswith("German; texts: 1") and "100.00000" in german
    assert "turn 3" in sessions_part and "9.00000" in sessions_part


def test_interval_of_many_texts_is_a_little_wider_than_the_normal_one():
    values = np.random.default_rng(1).standard_normal(1000)
    low, high = report.confidence_interval(list(values))
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 1000**0.5, rel=0.05)


def test_frontier_keeps_what_nothing_beats():
    points = [(4, 0.5), (2, 1.0), (3, 2.0), (8, 0.1), (5, 0.6)]
    assert report.frontier(points) == [(2, 1.0), (4, 0.5), (8, 0.1)]


def test_picture_is_made(outcomes, tmp_path):
    report.draw(report.rows([_ONE, _TWO], outcomes), tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
