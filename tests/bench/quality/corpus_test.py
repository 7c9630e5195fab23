"""Texts: the same each time, of the packages that they say, and none of one set in the other."""

import gzip
import pathlib
import re

import pytest

import chat
import corpus
import smollm2_tokenizer

_CALIBRATION = (corpus.HANDBOOK, corpus.PYTHON_DOCS, corpus.DOCUTILS, corpus.HEADERS)
_TEST = (corpus.PROSE, corpus.QUOTES, corpus.CODE, corpus.GERMAN)
_WINDOW = 32


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> smollm2_tokenizer.SmolLM2Tokenizer:
    return smollm2_tokenizer.SmolLM2Tokenizer()


def test_calibration_and_test_share_no_package():
    calibration = {source.package for source in (*_CALIBRATION, *corpus.CALIBRATION_CHAT_SOURCES)}
    test = {source.package for source in (*_TEST, *corpus.TEST_CHAT_SOURCES)}
    assert len(calibration) == len(test) == 4 and not calibration & test


def test_files_belong_to_one_source():
    files = [path for source in (*_CALIBRATION, *_TEST) for path in corpus.files_of(source)]
    assert len(files) > 1000 and len(set(files)) == len(files)


def test_there_are_as_many_texts_as_promised(tokenizer):
    calibration, test = corpus.calibration_texts(tokenizer), corpus.test_texts(tokenizer)
    counts = [sum(text.domain == source.domain for text in calibration) for source in _CALIBRATION]
    assert counts == [30, 30, 14, 10] and corpus.CALIBRATION_CHATS == 12
    counts = [sum(text.domain == source.domain for text in test) for source in _TEST]
    assert counts == [4, 4, 4, 3] and corpus.TEST_CHATS == 4
    assert {len(text.token_ids) for text in calibration} == {1024}
    assert {len(text.token_ids) for text in test} == {1768}
    names = [text.name for text in calibration + test]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)


def test_the_same_texts_each_time(tokenizer):
    assert corpus.calibration_texts(tokenizer) == corpus.calibration_texts(tokenizer)
    assert corpus.test_texts(tokenizer) == corpus.test_texts(tokenizer)


def test_no_text_has_a_part_of_another(tokenizer):
    """By windows of tokens, at every place in one text and every second window in the other: boilerplate
    such as a license's is shorter than two windows, or it would be found here."""
    seen: dict[tuple[int, ...], str] = {}
    for text in corpus.calibration_texts(tokenizer):
        for start in range(1, len(text.token_ids) - _WINDOW + 1):
            seen.setdefault(text.token_ids[start:start + _WINDOW], text.name)
    shared = []
    for text in corpus.test_texts(tokenizer):
        for start in range(1, len(text.token_ids) - _WINDOW + 1, _WINDOW):
            other = seen.get(text.token_ids[start:start + _WINDOW])
            if other is not None:
                shared.append((text.name, other, start))
    assert not shared


def test_a_missing_package_says_what_to_run():
    source = corpus.Source("none", "no-such-package", re.compile("."), lambda data: "")
    with pytest.raises(corpus.PackageMissing, match="no-such-package.*install.sh"):
        corpus.files_of(source)


def test_too_little_text_is_refused(tokenizer, monkeypatch):
    """330,000 characters have no room for 90 texts of some 4,400 that do not overlap."""
    monkeypatch.setattr(corpus, "_DRAWS_MAX", 100)
    with pytest.raises(corpus.PackageMissing, match="developers-reference has text for [3-7].? of 90"):
        corpus.draw(tokenizer, corpus.PROSE, 90, 1024)


def test_packages_are_on_the_list_of_packages():
    """A package whose texts lie in one that it depends on is listed by its stable name."""
    stable = {"python3.11-doc": "python3-doc", "libpython3.11-stdlib": "libpython3-stdlib"}
    path = pathlib.Path(__file__).resolve().parents[3] / "deploy/packages/debian.txt"
    listed = set(path.read_text(encoding="utf-8").split())
    for source in (*_CALIBRATION, *_TEST):
        assert stable.get(source.package, source.package) in listed


def test_a_page_becomes_lines():
    page = (b"<html><head><title>no</title></head><body><h1>Top</h1><p>One <b>bold</b> &amp; two"
            b"<script>no()</script></p>\n<p>three</p></body></html>")
    assert corpus.plain_html(page) == "Top\nOne bold & two\nthree"


def test_a_manual_page_becomes_its_words():
    page = ('.\\" comment\n.TH NAME 1\n.SH BESCHREIBUNG\n\\fBls\\fP zeigt\\&. Dateien\\-\n'
            '.br\n.BR ls (1),\n\\(aqx\\(aq \\(bu\n')
    assert (corpus.plain_man(gzip.compress(page.encode())) ==
            "BESCHREIBUNG\nls zeigt. Dateien-\nls (1),\n'x' *")


def test_quotes_stand_apart():
    assert corpus.plain_quotes(b"one\n%\ntwo\n") == "one\n\ntwo\n"


def test_users_say_the_same_each_time_and_quote_their_sources():
    turns = chat.user_turns(corpus.TEST_CHAT_SOURCES, "chat-test-00")
    assert turns == chat.user_turns(corpus.TEST_CHAT_SOURCES, "chat-test-00")
    assert turns != chat.user_turns(corpus.TEST_CHAT_SOURCES, "chat-test-01")
    for turn in turns:
        piece = turn.split("\n\n", 1)[1]
        assert 80 <= len(piece) <= 500
        assert any(piece in whole for source in corpus.TEST_CHAT_SOURCES
                   for whole in corpus.plain_texts(source))
