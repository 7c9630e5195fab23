"""The modules of the model and of the judge beside those of this folder."""

import pathlib
import sys

_TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_TESTS / "model"), str(_TESTS / "bench/quality")]
