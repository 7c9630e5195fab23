"""Real KV for codec_costs_bench: texts of SmolLM2-135M-Instruct with a profile that is fitted to others.

A quarter of the calibration texts of tests/bench/quality, without chats and without the vocabulary: what
decides the work of the codec (shares of values that are coded, and of those that are not zero) is about that
of the whole profile, in minutes. Both are kept in the cache.
"""

import pathlib
import sys

_TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_TESTS / "bench/quality"), str(_TESTS / "model")]
# pylint: disable=wrong-import-position
import codec_tool
import corpus
import kv_files
import schemes
import smollm2_tokenizer
import workers


def arguments() -> list[str]:
    """Those of codec_costs_bench that name a profile, and tokens and KV of a text that it was not fitted to."""
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    calibration = corpus.calibration_texts(tokenizer)[::4]
    test = corpus.draw(tokenizer, corpus.PROSE, 1, corpus.TEXT_TOKENS)
    with workers.Pool(1) as pool:
        fitted_to = kv_files.prepare("costs-calibration", calibration, with_queries=False, pool=pool)
        tested = kv_files.prepare("costs-test", test, with_queries=False, pool=pool)
    scheme = next(s for s in schemes.SCHEMES if s.name == "kvtrie high")
    profile = codec_tool.fit(fitted_to, scheme.fit, scheme.material)
    text = tested / test[0].name
    return ["--profile", str(profile), "--tokens", f"{text}.tokens", "--kv", f"{text}.kv"]


if __name__ == "__main__":
    print(*arguments())
