"""The sessions of the benchmark of sharing, as tokens: what workload.json says, and its seed.

A session has its group's system prompt and some turns. A turn is a question, in some of them behind a document,
and an answer. Documents are chosen from one list by all groups, so that most of them stand behind several
prompts: right behind the system prompt, or later, behind turns that nobody else has. Questions and answers are
of one session alone: pieces of text that are handed out once.

Texts come from the packages that codecs are judged on, and that no profile is fitted to (corpus.py).
"""

import dataclasses
import itertools
import json
import pathlib
import random

import corpus
import smollm2_tokenizer

SPEC_PATH = pathlib.Path(__file__).with_name("workload.json")
_SOURCES = {source.domain: source for source in (corpus.PROSE, corpus.QUOTES, corpus.CODE, corpus.GERMAN)}
_PIECE_CHARS = 12_000  # of a text, encoded at once
_QUICK_SESSIONS_PER_GROUP = 3


@dataclasses.dataclass(frozen=True)
class Turn:
    """end: tokens of the session up to the end of its answer. answer: where that begins."""

    answer: int
    end: int


@dataclasses.dataclass(frozen=True)
class Session:
    """documents: [begin, end) of each, with its number. shared_tokens: the system prompt, and a document that follows
    it at once; `prefix_name` names them. continuation: what might come behind all of it; not stored."""

    name: str
    group: int
    domain: str
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    documents: tuple[tuple[int, int, int], ...]
    system_tokens: int
    shared_tokens: int
    prefix_name: str
    continuation: tuple[int, ...]

    @property
    def private_tokens(self) -> int:
        return len(self.token_ids) - self.system_tokens - sum(end - begin for _, begin, end in self.documents)


@dataclasses.dataclass(frozen=True)
class Workload:
    """sessions: in the order in which they come."""

    sessions: tuple[Session, ...]
    documents: tuple[tuple[int, ...], ...]
    judged: tuple[str, ...]  # names of sessions

    @property
    def distinct_tokens(self) -> int:
        """Each system prompt, each document that occurs and each private piece once."""
        systems = {session.group: session.system_tokens for session in self.sessions}
        used = {number for session in self.sessions for number, _, _ in session.documents}
        return (sum(systems.values()) + sum(len(self.documents[number]) for number in used) +
                sum(session.private_tokens for session in self.sessions))

    @property
    def private_share(self) -> float:
        """Of the distinct tokens, those of one session alone."""
        return sum(session.private_tokens for session in self.sessions) / self.distinct_tokens


def make(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer, quick: bool = False) -> Workload:
    """The same workload for the same packages. quick: few sessions of each group."""
    spec = json.loads(SPEC_PATH.read_text(encoding="utf-8"))
    rng = random.Random(f"sharing {spec['seed']}")
    texts = {domain: _Texts(tokenizer, source, random.Random(f"sharing {spec['seed']} {domain}"))
             for domain, source in _SOURCES.items()}
    of_documents = spec["documents"]
    domains = itertools.cycle([domain for domain in _SOURCES if domain != corpus.GERMAN.domain])
    documents = tuple(tuple(texts[next(domains)].take(rng.randint(*of_documents["tokens"])))
                      for _ in range(of_documents["count"]))
    popularity = [(1 + rank)**-of_documents["popularity_exponent"] for rank in range(len(documents))]

    sessions: list[Session] = []
    judged: list[str] = []
    for group, of_group in enumerate(spec["groups"]):
        own_texts = texts[of_group["domain"]]
        system = _system(tokenizer, own_texts, of_group["system_tokens"])
        count = min(of_group["sessions"], _QUICK_SESSIONS_PER_GROUP) if quick else of_group["sessions"]
        made = [_session(tokenizer, rng, own_texts, spec, group, of_group["domain"], index, system, documents,
                         popularity) for index in range(count)]
        # The longest ones have met most of what there is.
        longest = sorted(made, key=lambda session: (-len(session.turns), session.name))
        judged += [session.name for session in longest[:1 if quick else spec["judged_sessions_per_group"]]]
        sessions += made
    user = tokenizer.encode("<|im_start|>user\n")
    sessions = [dataclasses.replace(session, continuation=(
        *user, *texts[session.domain].take(spec["continuation_tokens"]))) if session.name in judged else session
        for session in sessions]
    rng.shuffle(sessions)
    return Workload(tuple(sessions), documents, tuple(judged))


class _Texts:
    """Hands out the text of a source in pieces, each once."""

    def __init__(self, tokenizer, source: corpus.Source, rng: random.Random):
        self._tokenizer = tokenizer
        self._source = source
        pieces = [text[at:at + _PIECE_CHARS] for text in corpus.plain_texts(source)
                  for at in range(0, len(text) - _PIECE_CHARS, _PIECE_CHARS)]
        rng.shuffle(pieces)
        self._pieces = iter(pieces)
        self._left: list[int] = []

    def take(self, count: int) -> list[int]:
        """Errors: corpus.PackageMissing."""
        while len(self._left) < count:
            piece = next(self._pieces, None)
            if piece is None:
                raise corpus.PackageMissing(f"Debian package {self._source.package} has too little text")
            self._left = self._tokenizer.encode(piece)
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def _system(tokenizer, texts: _Texts, count: int) -> list[int]:
    begin = tokenizer.encode("<|im_start|>system\n")
    end = tokenizer.encode("<|im_end|>\n")
    return begin + texts.take(count - len(begin) - len(end)) + end


def _session(tokenizer, rng, texts, spec, group, domain, index, system, documents, popularity) -> Session:
    of_documents = spec["documents"]
    user = tokenizer.encode("<|im_start|>user\n")
    assistant = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
    end = tokenizer.encode("<|im_end|>\n")
    token_ids = list(system)
    prefix_name = f"group-{group}"
    shared_tokens = len(token_ids)
    turns, used = [], []
    for turn in range(rng.randint(*spec["turns"])):
        token_ids += user
        if rng.random() < of_documents["in_first_turn" if turn == 0 else "in_later_turn"]:
            number = rng.choices(range(len(documents)), popularity)[0]
            used.append((number, len(token_ids), len(token_ids) + len(documents[number])))
            token_ids += documents[number]
            if turn == 0:
                prefix_name, shared_tokens = f"group-{group}-document-{number}", len(token_ids)
        token_ids += texts.take(rng.randint(*spec["question_tokens"])) + assistant
        answer = len(token_ids)
        token_ids += texts.take(rng.randint(*spec["answer_tokens"])) + end
        turns.append(Turn(answer, len(token_ids)))
    return Session(f"session-{group}-{index:03}", group, domain, tuple(token_ids), tuple(turns), tuple(used), len(system),
                   shared_tokens, prefix_name, ())
