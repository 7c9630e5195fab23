"""Pairs of sessions that hold the same document behind different prefixes.

A session is the model's own first token, a prefix, a document and what comes behind it. The first session
of a pair is stored as it is, the second one against it. Documents for fitting come from other packages than
those for judging.

Three kinds are judged. "unrelated": the prefixes are texts that have nothing to do with the document.
"glossary": frequent words of the document are replaced by words that mean nothing, and the prefix says what
they stand for: the right ones in the second session, in the first one those of another document. "resolved":
the same, and behind the document comes its own text with the words put back, which only the glossary tells.
"""

import collections
import dataclasses
import random
import re

import corpus
import smollm2_tokenizer

DOCUMENT_TOKENS = 500
CONTINUATION_TOKENS = 224
PREFIX_TOKENS = range(60, 201)

UNRELATED, GLOSSARY, RESOLVED = "unrelated", "glossary", "resolved"
KINDS = (UNRELATED, GLOSSARY, RESOLVED)

FIT_SOURCES = ((corpus.HANDBOOK, 6), (corpus.PYTHON_DOCS, 6), (corpus.DOCUTILS, 4), (corpus.HEADERS, 3),
               (corpus.FRENCH, 2), (corpus.SPANISH, 2))
TUNE_SOURCES = ((corpus.HANDBOOK, 3), (corpus.PYTHON_DOCS, 2), (corpus.DOCUTILS, 2), (corpus.FRENCH, 1))
TEST_SOURCES = ((corpus.PROSE, 3), (corpus.QUOTES, 3), (corpus.CODE, 3), (corpus.GERMAN, 2))
GLOSSARY_SOURCES = ((corpus.PROSE, 4), (corpus.QUOTES, 2))

_FIRST_TOKEN_ID = 1  # "<|im_start|>"
_WINDOW = 32  # tokens; texts that share so many are not different ones
_WORDS = 12  # that a glossary explains
_NONSENSE = ("blarn", "wuggle", "friptan", "drosk", "quendle", "marvit", "stombel", "plivar", "krenzo", "tamsil",
             "horpin", "vexil", "grundo", "lopash", "zintar", "bromack", "cheldin", "fasquet", "nubrel", "orvane",
             "pelgram", "rusket", "siddow", "trellix")
_COMMON = frozenset("about after again also because before being between could every first from have into made make "
                    "more most much must only other over same should since some such than that their them then there "
                    "these they this those through under until very were what when where which while will with would "
                    "your".split())


@dataclasses.dataclass(frozen=True)
class Session:
    """document: [begin, end) among the tokens; behind it lies the continuation."""

    name: str
    token_ids: tuple[int, ...]
    document: tuple[int, int]

    @property
    def stored(self) -> tuple[int, ...]:
        return self.token_ids[:self.document[1]]

    @property
    def continuation(self) -> tuple[int, ...]:
        return self.token_ids[self.document[1]:]


@dataclasses.dataclass(frozen=True)
class Pair:
    name: str
    kind: str
    domain: str
    first: Session
    second: Session


def fit_pairs(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> list[Pair]:
    return _unrelated(tokenizer, "fit", FIT_SOURCES, 0)


def tune_pairs(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> list[Pair]:
    """Of the packages that are fitted to, and of other texts than those."""
    fitted = {window for pair in fit_pairs(tokenizer) for window in _windows(pair.second)}
    pairs = _unrelated(tokenizer, "tune", [(source, 3 * count) for source, count in TUNE_SOURCES], CONTINUATION_TOKENS)
    kept = []
    for source, count in TUNE_SOURCES:
        kept += [pair for pair in pairs if pair.domain == source.domain and fitted.isdisjoint(_windows(pair.second))][:count]
    return kept


def _windows(session) -> set:
    return {session.token_ids[at:at + _WINDOW] for at in range(len(session.token_ids) - _WINDOW + 1)}


def test_pairs(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> list[Pair]:
    pairs = _unrelated(tokenizer, "test", TEST_SOURCES, CONTINUATION_TOKENS)
    for source, count in GLOSSARY_SOURCES:
        texts = corpus.draw(tokenizer, source, count, 1 + DOCUMENT_TOKENS + CONTINUATION_TOKENS)
        plain = [tokenizer.decode(text.token_ids[1:]) for text in texts]
        for index, text in enumerate(plain):
            other = plain[(index + 1) % count]
            for kind in (GLOSSARY, RESOLVED):
                name = f"{kind}-{source.domain}-{index:02}"
                pairs.append(_with_glossary(tokenizer, name, kind, source.domain, text, other))
    return pairs


def _unrelated(tokenizer, name, sources, continuation_tokens) -> list[Pair]:
    rng = random.Random(f"prefixes of {name} pairs")
    prefix_sources = tuple(source for source, _ in sources)
    pairs = []
    for source, count in sources:
        texts = corpus.draw(tokenizer, source, count, 1 + DOCUMENT_TOKENS + continuation_tokens)
        for index, text in enumerate(texts):
            pair_name = f"{name}-{source.domain.replace(' ', '-')}-{index:02}"
            sessions = [_session(f"{pair_name}-{which}", _prefix(tokenizer, rng, prefix_sources),
                                 text.token_ids[1:1 + DOCUMENT_TOKENS], text.token_ids[1 + DOCUMENT_TOKENS:])
                        for which in ("first", "second")]
            pairs.append(Pair(pair_name, UNRELATED, source.domain, *sessions))
    return pairs


def _prefix(tokenizer, rng, sources) -> tuple[int, ...]:
    count = rng.choice(PREFIX_TOKENS)
    rng_sources = (rng.choice(sources),)
    token_ids: list[int] = []
    while len(token_ids) < count:
        token_ids += tokenizer.encode(corpus.pieces(rng_sources, rng, 1)[0] + "\n\n")
    return tuple(token_ids[:count])


def _session(name, prefix, document, continuation) -> Session:
    begin = 1 + len(prefix)
    return Session(name, (_FIRST_TOKEN_ID, *prefix, *document, *continuation), (begin, begin + len(document)))


def _frequent_words(text: str) -> list[str]:
    words = collections.Counter(re.findall(r"\b[a-z]{5,}\b", text))
    return [word for word, _ in words.most_common() if word not in _COMMON][:_WORDS]


def _glossary(words, nonsense) -> str:
    lines = [f'"{new}" means {old}.' for new, old in zip(nonsense, words)]
    return "In the text below some words are replaced.\n" + "\n".join(lines) + "\n\n"


def _with_glossary(tokenizer, name, kind, domain, text, other) -> Pair:
    rng = random.Random(name)
    words, wrong = _frequent_words(text), _frequent_words(other)
    wrong = [word for word in wrong if word not in words]
    nonsense = rng.sample(_NONSENSE, len(words))
    rng.shuffle(wrong)
    coded = text
    for new, old in zip(nonsense, words):
        coded = re.sub(rf"\b{old}\b", new, coded)
    coded_ids = tokenizer.encode(coded)
    document = tuple(coded_ids[:DOCUMENT_TOKENS])
    continuation = coded_ids[DOCUMENT_TOKENS:]
    if kind == RESOLVED:
        continuation = tokenizer.encode("\n\nThe same text with the words put back:\n\n" + text)
    continuation = tuple(continuation[:CONTINUATION_TOKENS])
    sessions = [_session(f"{name}-{which}", tuple(tokenizer.encode(_glossary(of, nonsense))), document, continuation)
                for which, of in (("first", wrong), ("second", words))]
    return Pair(name, kind, domain, *sessions)
