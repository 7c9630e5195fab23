"""How well codecs keep a KV cache, judged by a real model (SmolLM2-135M-Instruct).

Each text's prefix of 768 tokens is restored by each scheme, and the next 256 tokens are computed on it,
teacher-forced: KL of their next-token distributions against those on the exact bfloat16 cache, and the
change of the negative log likelihood of the actual tokens. "raw bf16" is judged against a cache that was
never rounded. Bits count every stored byte. The interval is 95 %, Student's t over texts.

Texts come from Debian packages, and from chats with the model itself, other ones for calibration than for
judging. KV and chats are computed once, and lie below the cache folder, 2 GB in all.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "model"))
# pylint: disable=wrong-import-position
import chat
import codec_tool
import corpus
import judge
import kv_files
import report
import schemes
import sessions
import smollm2_tokenizer
import workers

_SESSION_TEXTS = 2  # of each English domain
_ABLATION_TEXTS = 2  # of each domain


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quality.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true",
                        help="one text per domain and few schemes: does it all run?")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there, one per line")
    parser.add_argument("--png", type=pathlib.Path, help="draw bits against KL there")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...",
                        help="these schemes: " + ", ".join(s.name for s in schemes.SCHEMES))
    parser.add_argument("--prepare", action="store_true",
                        help="only make the folders of calibration and test texts, and name them")
    parser.add_argument("--write-texts", type=pathlib.Path, metavar="FOLDER",
                        help="only write the calibration texts there, as files for kvtrie.calibrate")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="processes (default: the cores)")
    options = parser.parse_args()
    unknown = sorted(set(options.only) - {scheme.name for scheme in schemes.SCHEMES})
    if unknown:
        parser.error(f"no such schemes: {', '.join(unknown)}")
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    for path in filter(None, (options.json, options.png)):
        if not path.absolute().parent.is_dir():
            parser.error(f"no folder for {path}")
    return options


def chosen_schemes(quick: bool, only: Sequence[str]) -> list[schemes.Scheme]:
    if only:
        return [scheme for scheme in schemes.SCHEMES if scheme.name in only]
    return [scheme for scheme in schemes.SCHEMES if scheme.quick or not quick]


def fit_codecs(chosen: Sequence[schemes.Scheme], calibration_folder: Callable[[], pathlib.Path]
               ) -> tuple[list[schemes.Scheme], dict[str, codec_tool.CodecToolError]]:
    """The schemes ready to restore, and the errors because of which others are not, by name."""
    ready, errors = [], {}
    for scheme in chosen:
        if isinstance(scheme, schemes.Codec):
            try:
                codec_tool.tool_path()
                scheme = scheme.fitted(calibration_folder())
            except codec_tool.CodecToolError as error:
                errors[scheme.name] = error
                continue
        ready.append(scheme)
    return ready, errors


def test_texts(quick: bool) -> tuple[list[corpus.Text], list[corpus.Text]]:
    """All texts that have KV, and those of them that are judged."""
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    texts = corpus.test_texts(tokenizer)
    texts += chat.chats("chat-test", corpus.TEST_CHAT_SOURCES, corpus.TEST_CHATS, workers.model,
                        _say)
    return texts, first_of_each_domain(texts, 1) if quick else texts


def calibration_texts() -> list[corpus.Text]:
    texts = corpus.calibration_texts(smollm2_tokenizer.SmolLM2Tokenizer())
    return texts + chat.chats("chat-calibration", corpus.CALIBRATION_CHAT_SOURCES,
                              corpus.CALIBRATION_CHATS, workers.model, _say)


def calibration_folder(pool: workers.Pool) -> pathlib.Path:
    return kv_files.prepare("calibration", calibration_texts(), with_queries=True, pool=pool)


def write_texts(folder: pathlib.Path, texts: Sequence[corpus.Text]) -> None:
    """As UTF-8 files, whose extensions are the domains; without the first token, which is no text."""
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    for text in texts:
        name = f"{text.name}.{text.domain.replace(' ', '-')}"
        kv_files.write_atomically(folder / name, tokenizer.decode(text.token_ids[1:]).encode())


def first_of_each_domain(texts: Sequence[corpus.Text], count: int) -> list[corpus.Text]:
    return [text for domain in corpus.DOMAINS
            for text in [t for t in texts if t.domain == domain][:count]]


def judge_text(folder: pathlib.Path, text: corpus.Text, scheme: schemes.Scheme
               ) -> list[report.Outcome] | codec_tool.CodecToolError:
    """A task: one scheme on one text. An error of the codec's tool is a result, for its row alone."""
    exact, next_ids = _exact(folder, text), _continuation_ids(text)
    if scheme.against_float32:
        divergence = judge.diverge(_unrounded(text), exact.said, next_ids)
        return [report.Outcome(scheme.name, text.name, text.domain, 16, divergence)]
    try:
        restored = scheme.restore(text.token_ids[:corpus.PREFIX_TOKENS], exact.kv)
    except codec_tool.CodecToolError as error:
        return error
    candidate = judge.continuation(workers.model(), restored.kv, next_ids)
    bits = sessions.bits_per_component(restored.byte_count, exact.kv)
    return [report.Outcome(scheme.name, text.name, text.domain, bits,
                           judge.diverge(exact.said, candidate, next_ids))]


def judge_session(folder: pathlib.Path, text: corpus.Text, scheme: schemes.Scheme
                  ) -> list[report.Outcome] | codec_tool.CodecToolError:
    """A task: one scheme over the life of one session."""
    try:
        measures = sessions.measure(workers.model(), scheme, _session_reference(folder, text))
    except codec_tool.CodecToolError as error:
        return error
    return [report.Outcome(scheme.name, text.name, text.domain, measure.bits, measure.divergence,
                           measure.name) for measure in measures]


class _Exact:
    """A text's exact KV, and what the model says after each token of the continuation on it."""

    def __init__(self, folder: pathlib.Path, text: corpus.Text):
        self.kv = kv_files.read_kv(folder, text.name)
        self.said = judge.continuation(workers.model(), self.kv, _continuation_ids(text))


# Tasks are ordered by text, so that a process needs one reference at a time.
@functools.lru_cache(maxsize=1)
def _exact(folder: pathlib.Path, text: corpus.Text) -> _Exact:
    return _Exact(folder, text)


@functools.lru_cache(maxsize=1)
def _session_reference(folder: pathlib.Path, text: corpus.Text) -> sessions.Reference:
    return sessions.reference(workers.model(), text, kv_files.read_kv(folder, text.name))


def _unrounded(text: corpus.Text) -> judge.Distributions:
    """What the model says on a cache that is float32 throughout."""
    cache = workers.model().new_cache(corpus.TEXT_TOKENS, round_kv=False)
    workers.model().extend(cache, text.token_ids[:corpus.PREFIX_TOKENS], logits="none")
    return judge.Distributions.of(
        workers.model().extend(cache, _continuation_ids(text), logits="all"))


def _continuation_ids(text: corpus.Text) -> tuple[int, ...]:
    return text.token_ids[corpus.PREFIX_TOKENS:corpus.TEXT_TOKENS]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    options = parse_options()
    start = time.monotonic()
    if options.write_texts:
        write_texts(options.write_texts, calibration_texts())
        return 0
    with workers.Pool(options.jobs) as pool:
        texts, judged = test_texts(options.quick)
        folder = kv_files.prepare("test", texts, with_queries=False, pool=pool)
        calibration = functools.cache(lambda: calibration_folder(pool))
        if options.prepare:
            print(f"calibration {calibration()}\ntest {folder}")
            return 0
        chosen, errors = fit_codecs(chosen_schemes(options.quick, options.only), calibration)
        few = first_of_each_domain(judged, _ABLATION_TEXTS)
        tasks = [(judge_text, (folder, text, scheme)) for text in judged for scheme in chosen
                 if not scheme.ablation or text in few]
        if not options.quick:
            english = [text for text in texts if text.domain in corpus.ENGLISH_DOMAINS]
            tasks += [(judge_session, (folder, text, scheme))
                      for text in first_of_each_domain(english, _SESSION_TEXTS)
                      for scheme in chosen if scheme.sessions]
        outcomes = []
        # Results first: zip then runs to their end, which is what finishes the progress.
        for result, (_, (_, _, scheme)) in zip(pool.run("schemes x texts", tasks), tasks):
            if isinstance(result, codec_tool.CodecToolError):
                errors[scheme.name] = result
            else:
                outcomes += result

    rows = report.rows([scheme for scheme in chosen if scheme.name not in errors], outcomes)
    print(report.table(rows))
    for name, error in errors.items():
        print(f"no row for {name}: {error}")
    print(f"{time.monotonic() - start:.0f} s on {options.jobs} processes")
    if options.json:
        kv_files.write_atomically(options.json,
                                  "".join(json.dumps(row) + "\n" for row in rows).encode())
    if options.png:
        report.draw(rows, options.png)
    failed = [error for error in errors.values()
              if not isinstance(error, codec_tool.CodecToolMissing)]
    return 0 if rows and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
