"""How outcomes become rows."""

import numpy as np

import codec_tool
import judge
import pairs
import references


def _outcome(way, kind, bits, kl):
    return references.Outcome(way, kind, bits, judge.Divergence(np.full(4, kl), np.zeros(3), np.ones(4, bool)))


def _session(document):
    return pairs.Session("name", tuple(range(200)), document)


def test_rows_are_means_and_shares_of_alone():
    ways = [references.Way("alone", "alone"), references.Way("against high", "against")]
    outcomes = [_outcome("alone", pairs.UNRELATED, 0.5, 0.01), _outcome("alone", pairs.GLOSSARY, 0.3, 0.03),
                _outcome("against high", pairs.UNRELATED, 0.05, 0.02), _outcome("against high", pairs.GLOSSARY, 0.15, 0.04)]
    found = references.rows(ways, outcomes)
    assert [(row["name"], row["kind"], row["pairs"]) for row in found] == [
        ("alone", "all", 2), ("against high", "all", 2), ("alone", "unrelated", 1), ("against high", "unrelated", 1),
        ("alone", "glossary", 1), ("against high", "glossary", 1)]
    assert np.isclose(found[1]["bits"], 0.1) and np.isclose(found[1]["of_alone"], 0.25)
    assert np.isclose(found[1]["kl"], 0.03) and np.isclose(found[1]["kl_worst_pair"], 0.04)
    assert np.isclose(found[5]["of_alone"], 0.5)
    table = references.table(found)
    assert "unrelated; pairs: 1" in table and "0.250" in table


def test_rows_without_alone_have_no_share():
    found = references.rows([references.Way("against high", "against")], [_outcome("against high", pairs.RESOLVED, 0.1, 0)])
    assert [row["of_alone"] for row in found] == [None, None]
    assert references.table(found)


def test_bits_are_of_the_blocks_that_hold_some_of_the_document():
    # Blocks of 16 tokens: the document, tokens 40 to 79, lies in blocks 2 to 4.
    session = _session((40, 80))
    assert references.whole_tokens(session) == 80
    components = 16 * 11520
    assert np.isclose(references.document_bits(session, [9999, 9999, 100, 200, 300]), 8 * 600 / (3 * components))


def test_names_tell_ways_apart():
    for ways in (references.WAYS, references.TUNE_WAYS):
        assert len({way.name for way in ways}) == len(ways)
        assert ways[0].name == "alone" and ways[0].level == references.LEVEL


def test_a_missing_tool_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(references, "_TOOL", tmp_path / "nothing")
    try:
        references.code(tmp_path, [], tmp_path)
    except codec_tool.CodecToolMissing as error:
        assert "reference_tool" in str(error)
    else:
        raise AssertionError("no error")
