"""Files of text to samples of tokens, and which of them are held out. Needs no torch."""

import dataclasses
import glob
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtrie.errors import KvtrieError

_BYTES_PER_TOKEN_MAX = 16  # more of a file is not read than samples can need


@dataclasses.dataclass(frozen=True)
class Sample:
    """A run of one text: a prefix whose KV is stored, and the continuation that is judged on it."""

    name: str  # of its files, unique
    group: str
    token_ids: tuple[int, ...]
    text: str  # names the text that it is of


@dataclasses.dataclass(frozen=True)
class Split:
    """fitted and held_out share no text."""

    fitted: list[Sample]
    held_out: list[Sample]
    too_short: list[pathlib.Path]  # texts without one whole sample


@dataclasses.dataclass(frozen=True)
class Cut:
    """How texts are cut. Counts are of tokens or samples."""

    sample_tokens: int = 1024
    samples_per_text: int = 4
    fitted_max: int = 48
    held_out_share: float = 0.2  # of the texts of a group, at least one
    held_out_max: int = 4  # texts of a group, of which one sample each is judged


def split(paths: Sequence[pathlib.Path], held_out_groups: Mapping[str, Sequence[pathlib.Path]],
          encode: Callable[[str], list[int]], first_token: int | None, cut: Cut) -> Split:
    """Cuts files into samples. The same files give the same samples.

    Each group of `paths`, which are the file extensions, gives some of its texts to be held out; those of
    held_out_groups all are. Every sample begins with first_token, if there is one, as sessions do.
    Errors: KvtrieError, when a file cannot be read or a group has too little text.
    """
    wanted = [path.resolve() for path in paths]
    only_judged = {path.resolve() for group in held_out_groups.values() for path in group}
    if both := sorted(only_judged.intersection(wanted)):
        raise KvtrieError(f"{both[0]}: is in --text and in --held-out-group; what is judged must not be fitted")

    by_extension: dict[str, list[pathlib.Path]] = {}
    for path in sorted(set(wanted)):
        by_extension.setdefault(path.suffix.lstrip(".").lower() or "no extension", []).append(path)
    if both := sorted(set(by_extension).intersection(held_out_groups)):
        raise KvtrieError(f"--held-out-group: {both[0]} is the group of --text's files with that extension; choose "
                          "another name")
    made = Split([], [], [])
    fitted_by_group: list[list[Sample]] = []
    unseen: set[tuple[int, ...]] = set()  # of the texts that are held out
    for group, of_group in by_extension.items():
        texts = _cut_all(of_group, group, encode, first_token, cut, made.too_short)
        if len(texts) < 2:
            raise KvtrieError(f"--text: group {group} has {len(texts)} of {len(of_group)} texts with "
                              f"{cut.sample_tokens} tokens, must have 2: one to fit and one to hold out")
        texts.sort(key=lambda samples: hashlib.sha256(repr(samples[0].token_ids).encode()).digest())
        count = max(1, min(cut.held_out_max, round(len(texts) * cut.held_out_share)))
        made.held_out.extend(samples[0] for samples in texts[:count])
        unseen.update(sample.token_ids for samples in texts[:count] for sample in samples)
        fitted_by_group.append([sample for turn in range(cut.samples_per_text) for samples in texts[count:]
                                for sample in samples[turn:turn + 1]])
    for group, of_group in held_out_groups.items():
        texts = _cut_all(of_group, group, encode, first_token, cut, made.too_short)
        if not texts:
            raise KvtrieError(f"--held-out-group: {group} has no text of {cut.sample_tokens} tokens")
        made.held_out.extend(samples[0] for samples in texts[:cut.held_out_max])
        unseen.update(sample.token_ids for samples in texts for sample in samples)
    # Copies of a file, a license say, may be on both sides.
    for i, of_group in enumerate(fitted_by_group):
        once = {sample.token_ids: sample for sample in reversed(of_group) if sample.token_ids not in unseen}
        fitted_by_group[i] = list(once.values())[::-1]
        unseen.update(once)
    made.fitted.extend(_in_turn(fitted_by_group, cut.fitted_max))
    if not made.fitted:
        raise KvtrieError("--text: every text has a copy that is held out; give others")
    return made


def parse_groups(arguments: Iterable[str]) -> dict[str, list[pathlib.Path]]:
    """Of "NAME=FILE,FILE,...", where a file may be a pattern. Errors: KvtrieError."""
    groups: dict[str, list[pathlib.Path]] = {}
    for argument in arguments:
        name, equals, patterns = argument.partition("=")
        if not name or not equals:
            raise KvtrieError(f"--held-out-group {argument}: must be NAME=FILE,FILE,...")
        for pattern in patterns.split(","):
            found = sorted(glob.glob(pattern))
            if not found:
                raise KvtrieError(f"--held-out-group {name}: no file {pattern}")
            groups.setdefault(name, []).extend(map(pathlib.Path, found))
    return groups


def _cut_all(paths: Sequence[pathlib.Path], group: str, encode: Callable[[str], list[int]],
             first_token: int | None, cut: Cut, too_short: list[pathlib.Path]) -> list[list[Sample]]:
    """The samples of each text that has any."""
    texts = []
    for path in sorted(set(paths)):
        lead = [] if first_token is None else [first_token]
        own_tokens = cut.sample_tokens - len(lead)
        token_ids = encode(_read(path, cut.samples_per_text * cut.sample_tokens * _BYTES_PER_TOKEN_MAX))
        samples = []
        for start in range(0, len(token_ids) - own_tokens + 1, own_tokens)[:cut.samples_per_text]:
            ids = (*lead, *token_ids[start:start + own_tokens])
            digest = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
            name = f"{digest}-{len(samples)}"
            samples.append(Sample(name, group, ids, samples[0].text if samples else name))
        if samples:
            texts.append(samples)
        else:
            too_short.append(path)
    return texts


def _read(path: pathlib.Path, bytes_max: int) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max)
    except OSError as error:
        raise KvtrieError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.end == len(data) == bytes_max or len(data) - error.start < 4 and len(data) == bytes_max:
            return data[:error.start].decode()  # cut within a character
        raise KvtrieError(f"{path}: is no UTF-8 text: byte {error.start}; convert it, or leave it out") from error


def _in_turn(groups: Sequence[list[Sample]], count: int) -> list[Sample]:
    """At most `count` samples, one of each group in turn, so that a large group leaves room for others."""
    longest = max(map(len, groups), default=0)
    return [group[i] for i in range(longest) for group in groups if i < len(group)][:count]
