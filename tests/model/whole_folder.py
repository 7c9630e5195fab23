"""Folders of the cache that appear whole or not at all."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable


def fill_once(folder: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The folder; where it is not there, `fill` is called with an empty one that takes its place.

    Several processes may do so at once.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        fill(unfinished)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.exists():  # Otherwise another process was faster, and its files are the same.
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
