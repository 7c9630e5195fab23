"""Texts to samples, and the split into fitted and held-out ones. A token here is a character."""

import pytest

from kvtrie.calibrate import texts
from kvtrie.errors import KvtrieError

_CUT = texts.Cut(sample_tokens=10, samples_per_text=2, fitted_max=100, held_out_share=0.2, held_out_max=2)


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _files(folder, extension: str, count: int, alphabet: str = "a"):
    paths = [folder / f"{i}.{extension}" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_text("".join(chr(ord(alphabet) + (i * 7 + at) % 26) for at in range(30)))
    return paths


def _split(paths, groups=None, first_token=1, cut=_CUT):
    return texts.split(paths, groups or {}, _encode, first_token, cut)


def _ids(samples):
    return {sample.token_ids for sample in samples}


def test_samples_are_whole_and_begin_with_the_first_token(tmp_path):
    split = _split(_files(tmp_path, "txt", 5))
    assert len(split.held_out) == 1 and len(split.fitted) == 2 * 4
    for sample in split.fitted + split.held_out:
        assert len(sample.token_ids) == 10 and sample.token_ids[0] == 1
    assert {sample.group for sample in split.fitted} == {"txt"}
    assert len({sample.name for sample in split.fitted}) == 8
    assert len({sample.text for sample in split.fitted}) == 4
    assert not {sample.text for sample in split.fitted} & {sample.text for sample in split.held_out}
    without = _split(_files(tmp_path, "txt", 5), first_token=None)
    assert all(sample.token_ids[0] >= ord("a") for sample in without.fitted)
    assert all(len(sample.token_ids) == 10 for sample in without.fitted)


def test_no_text_is_both_fitted_and_judged(tmp_path):
    """Nor a copy of it: the files of the two groups are the same."""
    paths = _files(tmp_path, "py", 10) + _files(tmp_path, "md", 10)
    split = _split(paths)
    assert [sample.group for sample in split.held_out] == ["md", "md", "py", "py"]
    whole = {path.read_text()[:9] for path in paths}
    held = {"".join(map(chr, sample.token_ids[1:])) for sample in split.held_out}
    assert len(held) >= 2 and held <= whole
    assert not _ids(split.held_out) & _ids(split.fitted)
    assert len(_ids(split.fitted)) == len(split.fitted) > 4


def test_the_split_does_not_depend_on_the_order_of_arguments(tmp_path):
    paths = _files(tmp_path, "txt", 10)
    assert _split(paths) == _split(paths[::-1] + paths)


def test_groups_take_turns_where_samples_are_limited(tmp_path):
    paths = _files(tmp_path, "a", 20) + _files(tmp_path, "b", 3, "A")
    cut = texts.Cut(10, 2, 6, 0.2, 2)
    groups = [sample.group for sample in _split(paths, cut=cut).fitted]
    assert groups == ["a", "b", "a", "b", "a", "b"]


def test_held_out_groups_are_only_judged(tmp_path):
    german = tmp_path / "german"
    german.mkdir()
    groups = texts.parse_groups([f"german={german}/*.txt"] if _files(german, "txt", 3) else [])
    split = _split(_files(tmp_path, "txt", 5), groups)
    assert [sample.group for sample in split.held_out] == ["txt", "german", "german"]
    assert "german" not in {sample.group for sample in split.fitted}


def test_short_texts_are_left_out_and_named(tmp_path):
    paths = _files(tmp_path, "txt", 4)
    paths[1].write_text("short")
    split = _split(paths)
    assert split.too_short == [paths[1]]


@pytest.mark.parametrize("arguments, what", [
    (["german"], "must be NAME=FILE"),
    (["=x"], "must be NAME=FILE"),
    (["german=/none/*"], "german: no file /none"),
])
def test_groups_are_named_with_files(arguments, what):
    with pytest.raises(KvtrieError, match=what):
        texts.parse_groups(arguments)


def test_what_cannot_be_split_is_said(tmp_path):
    paths = _files(tmp_path, "txt", 5)
    with pytest.raises(KvtrieError, match="group txt has 1 of 1 texts"):
        _split(paths[:1])
    with pytest.raises(KvtrieError, match="is in --text and in --held-out-group"):
        _split(paths, {"x": [paths[0]]})
    with pytest.raises(KvtrieError, match="choose another name"):
        _split(paths[1:], {"txt": [paths[0]]})
    with pytest.raises(KvtrieError, match="cannot be read"):
        _split([*paths, tmp_path / "none.txt"])
    short = tmp_path / "short.x"
    short.write_text("ab")
    with pytest.raises(KvtrieError, match="x has no text of 10 tokens"):
        _split(paths, {"x": [short]})
    paths[0].write_bytes(b"abc\xff" + b"d" * 30)
    with pytest.raises(KvtrieError, match="no UTF-8 text: byte 3"):
        _split(paths)


def test_a_long_file_may_be_cut_within_a_character(tmp_path):
    paths = _files(tmp_path, "txt", 4)
    paths[0].write_text("x" + "ä" * 1000)  # 2 * 10 * 16 bytes are read: half of a character is the last
    assert len(_split(paths).fitted) == 6
