"""Texts of Debian packages, as tokens: what codecs are calibrated on, and what they are judged on.

The two never share a package. A text is a run of a file from a random line on, tokens behind the model's
own first token, "<|im_start|>". Texts of one set do not overlap. The same packages give the same texts.
"""

import dataclasses
import functools
import gzip
import html.parser
import pathlib
import random
import re
import subprocess
from collections.abc import Callable

import smollm2_tokenizer

PREFIX_TOKENS = 768  # restored
TEXT_TOKENS = 1024  # the prefix and the continuation that it is judged by
LONG_TEXT_TOKENS = PREFIX_TOKENS + 1000  # of the test texts that are no chats

_FIRST_TOKEN_ID = 1  # "<|im_start|>"
_CHARS_PER_TOKEN_MAX = 8
_DRAWS_MAX = 1000


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of one Debian package. plain: what a file's bytes say to a reader."""

    domain: str
    package: str
    path: re.Pattern
    plain: Callable[[bytes], str]


@dataclasses.dataclass(frozen=True)
class Text:
    name: str  # a file name
    domain: str
    token_ids: tuple[int, ...]


class PackageMissing(Exception):
    """A package that texts come from is not installed, or holds other files than it used to."""


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", errors="ignore")


class _PageText(html.parser.HTMLParser):
    """Collects the text of an HTML page, a line per block."""

    _SILENT = {"head", "script", "style"}
    _INLINE = {"a", "abbr", "b", "code", "em", "i", "span", "strong", "tt"}

    def __init__(self):
        super().__init__()
        self.parts = []
        self._silent_depth = 0

    def handle_starttag(self, tag, attrs):
        self._silent_depth += tag in self._SILENT
        if tag not in self._INLINE:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self._silent_depth -= tag in self._SILENT
        if tag not in self._INLINE:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self._silent_depth:
            self.parts.append(data)


def plain_html(data: bytes) -> str:
    page = _PageText()
    page.feed(_utf8(data))
    page.close()
    text = re.sub(r"[ \t\xa0]+", " ", "".join(page.parts))
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def plain_quotes(data: bytes) -> str:
    """Quotations with an empty line between them instead of a line with "%"."""
    return _utf8(data).replace("\n%\n", "\n\n")


_MAN_SPECIAL = {"aq": "'", "bu": "*", "co": "(C)", "cq": "'", "dq": '"', "em": "-", "en": "-",
                "lq": '"', "oq": "'", "rq": '"', "rs": "\\", "ti": "~", "ha": "^"}
_MAN_TEXT_MACROS = {"B", "BI", "BR", "I", "IB", "IR", "RB", "RI", "SH", "SM", "SS", "IP"}


def plain_man(data: bytes) -> str:
    """The words of a compressed manual page; tables and conditional parts lose their layout."""
    lines = []
    for line in _utf8(gzip.decompress(data)).splitlines():
        if line.startswith((".", "'")):
            macro, _, arguments = line[1:].strip().partition(" ")
            if macro not in _MAN_TEXT_MACROS:
                continue
            line = arguments.replace('"', "")
        line = re.sub(r'\\".*', "", line)
        line = re.sub(r"\\f(\(..|\[[^\]]*\]|.)|\\s[-+]?\d|\\[&/,|^%:]", "", line)
        line = re.sub(r"\\\((..)|\\\[([^\]]*)\]",
                      lambda m: _MAN_SPECIAL.get(m[1] or m[2], ""), line)
        lines.append(line.replace("\\-", "-").replace("\\ ", " ").replace("\\e", "\\"))
    return "\n".join(line.rstrip() for line in lines if line.strip())


HANDBOOK = Source("handbook", "debian-handbook",
                  re.compile(r"/html/en-US/[^/]+\.html$"), plain_html)
PYTHON_DOCS = Source("python docs", "python3.11-doc",
                     re.compile(r"/html/_sources/(howto|library|reference|tutorial)/[^/]+\.txt$"),
                     _utf8)
# Without tables of Unicode characters and of other languages' words.
DOCUTILS = Source("docutils", "python3-docutils",
                  re.compile(r"/docutils/(?!.*(languages|utils/math)/).*\.py$"), _utf8)
HEADERS = Source("headers", "libabsl-dev", re.compile(r"^/usr/include/absl/.*\.h$"), _utf8)

PROSE = Source("prose", "developers-reference", re.compile(r"/_sources/[^/]+\.rst\.txt$"), _utf8)
QUOTES = Source("quotes", "fortunes",
                re.compile(r"/games/fortunes/(?!art$|ascii-art$|translate-me$)[^/.]+$"),
                plain_quotes)
CODE = Source("code", "libpython3.11-stdlib",
              re.compile(r"^/usr/lib/python3\.11/(?!test/|lib2to3/)[^_][^/]*(/[^/]+)?\.py$"), _utf8)
# Other languages: calibration has two, and is judged on a third.
FRENCH = Source("French", "manpages-fr", re.compile(r"/man/fr/man[178]/[^/]+\.gz$"), plain_man)
SPANISH = Source("Spanish", "manpages-es", re.compile(r"/man/es/man[178]/[^/]+\.gz$"), plain_man)
GERMAN = Source("German", "manpages-de", re.compile(r"/man/de/man[178]/[^/]+\.gz$"), plain_man)

CHAT_DOMAIN = "chat"
ENGLISH_DOMAINS = (PROSE.domain, QUOTES.domain, CODE.domain, CHAT_DOMAIN)
DOMAINS = (*ENGLISH_DOMAINS, GERMAN.domain)

# What chats quote.
CALIBRATION_CHAT_SOURCES = (HANDBOOK, PYTHON_DOCS)
TEST_CHAT_SOURCES = (PROSE, QUOTES)

_CALIBRATION_COUNTS = ((HANDBOOK, 30), (PYTHON_DOCS, 30), (DOCUTILS, 14), (HEADERS, 10),
                       (FRENCH, 7), (SPANISH, 7))
# Parts of the calibration texts, by their names.
CALIBRATION_PARTS = {
    "all": lambda names: names,
    "quarter": lambda names: names[::4],
    "prose": lambda names: [name for name in names if name.startswith(HANDBOOK.domain)],
}
CALIBRATION_CHATS = 12
_TEST_COUNTS = ((PROSE, 4), (QUOTES, 4), (CODE, 4), (GERMAN, 3))
TEST_CHATS = 4


def calibration_texts(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> list[Text]:
    """TEXT_TOKENS each; without the chats."""
    return [text for source, count in _CALIBRATION_COUNTS
            for text in draw(tokenizer, source, count, TEXT_TOKENS)]


def test_texts(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> list[Text]:
    """LONG_TEXT_TOKENS each; without the chats."""
    return [text for source, count in _TEST_COUNTS
            for text in draw(tokenizer, source, count, LONG_TEXT_TOKENS)]


@functools.cache
def files_of(source: Source) -> tuple[pathlib.Path, ...]:
    """The package's files that the source reads, sorted.

    Errors: PackageMissing.
    """
    listed = subprocess.run(["dpkg-query", "-L", source.package], capture_output=True, text=True,
                            check=False).stdout.splitlines()
    paths = (pathlib.Path(line) for line in sorted(listed) if source.path.search(line))
    found = tuple(path for path in paths if path.is_file() and not path.is_symlink())
    if not found:
        raise PackageMissing(f"no texts of Debian package {source.package}: run "
                             "deploy/packages/install.sh")
    return found


@functools.cache
def plain_texts(source: Source) -> tuple[str, ...]:
    """The readable text of each of files_of(source)."""
    return tuple(source.plain(path.read_bytes()) for path in files_of(source))


def draw(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer, source: Source, count: int,
         token_count: int) -> list[Text]:
    """`count` texts of a source, the same for the same package.

    Errors: PackageMissing when its files have not enough text.
    """
    rng = random.Random(f"texts of {source.domain}")
    plain = plain_texts(source)
    long_enough = [i for i, text in enumerate(plain) if len(text) > 2 * token_count]
    taken: dict[int, list[range]] = {}
    texts = []
    for _ in range(_DRAWS_MAX):
        if len(texts) == count or not long_enough:
            break
        index = rng.choice(long_enough)
        whole = plain[index]
        start = whole.find("\n", rng.randrange(len(whole))) + 1
        token_ids = tokenizer.encode(whole[start:start + _CHARS_PER_TOKEN_MAX * token_count])
        token_ids = token_ids[:token_count - 1]
        end = start + len(tokenizer.decode(token_ids))
        if len(token_ids) < token_count - 1 or any(start < other.stop and other.start < end
                                                   for other in taken.get(index, [])):
            continue
        taken.setdefault(index, []).append(range(start, end))
        name = f"{source.domain.replace(' ', '-')}-{len(texts):02}"
        texts.append(Text(name, source.domain, (_FIRST_TOKEN_ID, *token_ids)))
    if len(texts) < count:
        raise PackageMissing(f"Debian package {source.package} has text for {len(texts)} of "
                             f"{count} texts of {token_count} tokens")
    return texts


def pieces(sources: tuple[Source, ...], rng: random.Random, count: int) -> list[str]:
    """Runs of 80 to 500 characters from random lines of the sources, each source as often."""
    found = []
    while len(found) < count:
        whole = rng.choice(plain_texts(sources[len(found) % len(sources)]))
        start = whole.find("\n", rng.randrange(max(1, len(whole)))) + 1
        piece = whole[start:start + rng.randint(80, 500)].strip()
        if len(piece) >= 80:
            found.append(piece)
    return found
