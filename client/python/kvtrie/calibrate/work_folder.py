"""What a run has computed, in files, so that a run that was ended goes on where it was. Needs no torch.

    about.json              what decides the samples; another run's folder is refused
    spec.json               kvtrie.v1.ModelSpec
    fitted/NAME.tokens      u32le token ids of the prefix
    fitted/NAME.kv          its raw KV: [layer][K, V][token][KV head][dim] in the spec's dtype, K after RoPE
    fitted/NAME.importance  f32 [plane][KV head][token]; planes are K, V of layer 0, K, V of layer 1, ...
    repeated/NAME.tokens, NAME.kv
                            sessions that hold text of fitted ones behind another prefix
    vocabulary-N.bin        u32le ids of N tokens, then f32 [token][K before RoPE, V] of layer 0
    sums/NAME.npz           what a sample adds to metrics and query statistics
    held-out/NAME.tokens, NAME.kv
                            and sessions that hold their text behind another prefix
    fits/KEY.draft, KEY.json, KEY-NAME.outcomes.npz
                            each fit, and what was measured of it on each held-out text

A file appears whole or not at all.
"""

import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from kvtrie.errors import KvtrieError


class WorkFolder:
    """Single owner; not thread-safe."""

    def __init__(self, path: pathlib.Path, about: Mapping):
        """Makes the folder, or goes on with one that has the same `about`.

        Errors: KvtrieError names the field that differs.
        """
        self.path = path
        known = path / "about.json"
        about = json.loads(json.dumps(about))
        if known.exists():
            try:
                before = json.loads(known.read_text())
            except ValueError:
                before = {}
            for field in sorted({*about, *before}):
                if before.get(field) != about.get(field):
                    raise KvtrieError(f"{path}: is of a run with another {field} ({before.get(field)}, not "
                                      f"{about.get(field)}); remove it, or name another with --work")
        elif path.exists() and any(path.iterdir()):
            raise KvtrieError(f"{path}: is no folder of a calibration, and not empty; name another with --work")
        for folder in ("fitted", "repeated", "sums", "held-out", "fits"):
            try:
                (path / folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise KvtrieError(f"{path}: cannot be made: {error.strerror}") from error
        self.write(known, json.dumps(about, indent=1).encode())

    @property
    def spec(self) -> pathlib.Path:
        return self.path / "spec.json"

    @property
    def fitted(self) -> pathlib.Path:
        return self.path / "fitted"

    @property
    def repeated(self) -> pathlib.Path:
        return self.path / "repeated"

    def held_out(self, name: str) -> pathlib.Path:
        """Without suffix."""
        return self.path / "held-out" / name

    def vocabulary(self, count: int) -> pathlib.Path:
        return self.path / f"vocabulary-{count}.bin"

    def sums(self, name: str) -> pathlib.Path:
        return self.path / "sums" / f"{name}.npz"

    def fit(self, key: str, suffix: str) -> pathlib.Path:
        return self.path / "fits" / f"{key}.{suffix}"

    def write(self, path: pathlib.Path, data: bytes) -> None:
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except OSError as error:
            raise KvtrieError(f"{path}: cannot be written: {error.strerror}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    def write_arrays(self, path: pathlib.Path, **arrays: np.ndarray) -> None:
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}.unfinished.npz")
        try:
            np.savez(unfinished, **arrays)
            os.replace(unfinished, path)
        except OSError as error:
            raise KvtrieError(f"{path}: cannot be written: {error.strerror}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    def write_sample(self, path: pathlib.Path, token_ids: tuple[int, ...], kv: bytes,
                     importance: np.ndarray | None = None) -> None:
        """`path` has no suffix. The tokens come last: a sample with tokens has all of its files."""
        self.write(path.with_name(f"{path.name}.kv"), kv)
        if importance is not None:
            self.write(path.with_name(f"{path.name}.importance"), importance.astype("<f4").tobytes())
        self.write(path.with_name(f"{path.name}.tokens"), np.array(token_ids, "<u4").tobytes())

    @staticmethod
    def has_sample(path: pathlib.Path) -> bool:
        return path.with_name(f"{path.name}.tokens").exists()
