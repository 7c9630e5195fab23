"""Sessions that hold a sample's text again, behind another prefix. Needs no torch."""

import dataclasses
import hashlib
import random
from collections.abc import Sequence

from kvtrie.calibrate.texts import Sample

SHARED_TOKENS_MIN = 2000  # of all sessions to fit: `kvtrie profile fit --repeated` takes no fewer
_PREFIX_TOKENS = (60, 200)
_PREFIX_SHARE_MAX = 3  # of the session: no more than a third
_RUN_TOKENS_MIN = 32  # shorter runs are not coded against others


@dataclasses.dataclass(frozen=True)
class Session:
    """token_ids are as many as a sample has; those of its prefix from `begin` on are the sample's."""

    name: str  # of its files, unique
    sample: Sample
    token_ids: tuple[int, ...]
    begin: int


def repeat(samples: Sequence[Sample], others: Sequence[Sample], prefix_tokens: int, lead_tokens: int) -> list[Session]:
    """A session for each sample that there is another text for. The same samples give the same sessions.

    In front stands the beginning of one of `others`: of another text, and of another group if there is one. The
    sample's text follows from its beginning, or from a little behind it, and so stands at other positions than before.
    lead_tokens: those that every session begins with, 0 or 1.
    """
    longest = min(_PREFIX_TOKENS[1], prefix_tokens // _PREFIX_SHARE_MAX)
    if longest < 1 or prefix_tokens - lead_tokens - longest < _RUN_TOKENS_MIN:
        return []
    sessions = []
    for sample in samples:
        apart = [other for other in others if other.text != sample.text]
        apart = [other for other in apart if other.group != sample.group] or apart
        if not apart:
            continue
        rng = random.Random(f"prefix of {sample.name}")
        prefix = rng.choice(apart).token_ids
        count = rng.randint(min(_PREFIX_TOKENS[0], longest), longest)
        skipped = rng.randint(0, count // 2)
        begin = lead_tokens + count
        ids = prefix[:begin] + sample.token_ids[lead_tokens + skipped:][:len(sample.token_ids) - begin]
        sessions.append(Session(hashlib.sha256(repr(ids).encode()).hexdigest()[:16], sample, ids, begin))
    return sessions


def shared_tokens(sessions: Sequence[Session], prefix_tokens: int) -> int:
    """Of the sessions' prefixes, those that their samples hold too."""
    return sum(prefix_tokens - session.begin for session in sessions)
