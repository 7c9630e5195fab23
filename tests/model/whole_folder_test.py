"""Folders appear whole, once, and not at all after an error."""

import pytest

import whole_folder


def test_a_folder_is_filled_once(tmp_path):
    calls = []

    def fill(folder):
        calls.append(folder)
        (folder / "file").write_text("content", encoding="utf-8")

    folder = tmp_path / "deep/folder"
    for _ in range(2):
        assert whole_folder.fill_once(folder, fill) == folder
        assert (folder / "file").read_text(encoding="utf-8") == "content"
    assert len(calls) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_an_error_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "file").write_text("half", encoding="utf-8")
        raise error

    for error in (ValueError("no"), OSError("no")):
        with pytest.raises(type(error)):
            whole_folder.fill_once(tmp_path / "folder", fill)
        assert not list(tmp_path.iterdir())


def test_who_is_faster_wins(tmp_path):
    folder = tmp_path / "folder"

    def fill(unfinished):
        (unfinished / "file").write_text("late", encoding="utf-8")
        folder.mkdir()
        (folder / "file").write_text("early", encoding="utf-8")

    assert whole_folder.fill_once(folder, fill) == folder
    assert (folder / "file").read_text(encoding="utf-8") == "early"
    assert list(tmp_path.iterdir()) == [folder]
