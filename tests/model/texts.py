"""Real texts that a Debian machine with Python has, and the chat sessions that tests make of them.

Nothing here is downloaded or invented: licenses of /usr/share/common-licenses, and sources and
docstrings of Python's standard library. The licenses are the same on every Debian 12; the library's
texts change with Python's patch releases, and the sessions with them.
"""

import ast
import dataclasses
import functools
import pathlib
import random
import sysconfig

import smollm2_tokenizer

_LICENSE_FOLDER = pathlib.Path("/usr/share/common-licenses")
_MODULES = tuple("""
    argparse bisect calendar collections/__init__ configparser contextlib copy csv difflib
    fractions functools glob heapq inspect ipaddress mailbox os pprint queue random shutil smtplib
    statistics subprocess tempfile textwrap threading
""".split())

# Characters of a docstring that makes a good answer, about 40 to 220 tokens.
_ANSWER_CHARS = range(160, 900)

GROUP_COUNT = 3
SESSIONS_PER_GROUP = 8
SESSION_TOKENS_MIN = 400
SESSION_TOKENS_MAX = 1450  # leaves room for the model's last answer within 1,500 tokens

# After the first turn; leaves room for the rest of the session.
_OPENING_TOKENS_MAX = 1350


def license_paths() -> list[pathlib.Path]:
    """License files, each text once, sorted by name."""
    return [path for path in sorted(_LICENSE_FOLDER.iterdir()) if not path.is_symlink()]


def license_text(name: str) -> str:
    return (_LICENSE_FOLDER / name).read_text(encoding="utf-8")


def python_source_paths() -> list[pathlib.Path]:
    """Some of the standard library's sources, in a fixed order."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    return [folder / f"{module}.py" for module in _MODULES]


@dataclasses.dataclass(frozen=True)
class Documented:
    """One documented function or class of the standard library."""

    name: str  # as in "textwrap.wrap"
    docstring: str


@functools.cache
def documented() -> tuple[Documented, ...]:
    """Public functions, classes and methods whose docstring is long enough to be an answer."""
    found = []
    for path, module in zip(python_source_paths(), _MODULES):
        module_name = module.removesuffix("/__init__")
        found += _documented_in(ast.parse(path.read_text(encoding="utf-8")), module_name)
    return tuple(found)


def _documented_in(parent: ast.AST, parent_name: str) -> list[Documented]:
    found = []
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            name = f"{parent_name}.{child.name}"
            docstring = (ast.get_docstring(child) or "").strip()
            if len(docstring) in _ANSWER_CHARS:
                found.append(Documented(name, docstring))
            found += _documented_in(child, name)
    return found


@dataclasses.dataclass(frozen=True)
class ChatSession:
    """One conversation: a system prompt, user turns, and answers to all but the last of them.

    The sessions of one group share their system prompt; two neighbours also share their first turn.
    """

    name: str
    group: int
    messages: tuple[smollm2_tokenizer.Message, ...]

    def turn_prompts(self, tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> list[list[int]]:
        """Token ids that the model is given at each user turn; each is a prefix of the next."""
        return [
            tokenizer.encode_chat(self.messages[:end])
            for end, message in enumerate(self.messages, start=1)
            if message["role"] == "user"
        ]


def chat_sessions(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer,
                  seed: int = 1) -> list[ChatSession]:
    """24 sessions in 3 groups of 8, of 2 or 3 user turns; the same for the same seed and texts.

    The last prompt of a session has SESSION_TOKENS_MIN to SESSION_TOKENS_MAX tokens. The system
    prompts have about 250, 550 and 1,000 tokens, so that most sessions of two groups stay below
    1,000 tokens.
    """
    rng = random.Random(seed)
    system_prompts = (
        _system_prompt(tokenizer, "CC0-1.0", 250),
        _system_prompt(tokenizer, "Apache-2.0", 550),
        _system_prompt(tokenizer, "GPL-3", 1000),
    )
    sessions = []
    for group, system_prompt in enumerate(system_prompts):
        for first_of_pair in range(0, SESSIONS_PER_GROUP, 2):
            opening = _opening(tokenizer, rng, system_prompt)
            for index in (first_of_pair, first_of_pair + 1):
                sessions.append(
                    _session(tokenizer, rng, f"group{group}-session{index}", group, opening))
    return sessions


def _system_prompt(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer, license_name: str,
                   token_count: int) -> str:
    introduction = (
        "You help programmers. Answer questions about Python briefly. Our code is published under "
        "this license, which you must respect:\n\n")
    return tokenizer.cut(introduction + license_text(license_name).strip(), token_count)


def _opening(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer, rng: random.Random,
             system_prompt: str) -> list[smollm2_tokenizer.Message]:
    """The system prompt and a first turn."""
    while True:
        messages = [{"role": "system", "content": system_prompt}, *_exchange(rng)]
        if len(tokenizer.encode_chat(messages)) <= _OPENING_TOKENS_MAX:
            return messages


def _session(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer, rng: random.Random, name: str,
             group: int, opening: list[smollm2_tokenizer.Message]) -> ChatSession:
    """Draws the turns after the first until the session's size is in range."""
    while True:
        messages = list(opening)
        for _ in range(rng.choice((0, 1))):
            messages += _exchange(rng)
        messages.append(_exchange(rng)[0])
        token_count = len(tokenizer.encode_chat(messages))
        if SESSION_TOKENS_MIN <= token_count <= SESSION_TOKENS_MAX:
            return ChatSession(name, group, tuple(messages))


def _exchange(rng: random.Random) -> list[smollm2_tokenizer.Message]:
    """A question and its answer."""
    answer, other = rng.sample(documented(), 2)
    question = rng.choice((
        f"What does {answer.name} do?",
        f"Please explain {answer.name}. I do know {other.name} already:\n\n{other.docstring}",
    ))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer.docstring},
    ]
