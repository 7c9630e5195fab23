"""What the levels of a fit cost the model, on held-out texts."""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from kvtrie.calibrate import figures, torch_model
from kvtrie.calibrate.commands import Kvtrie
from kvtrie.calibrate.repeated import Session
from kvtrie.calibrate.texts import Sample
from kvtrie.calibrate.work_folder import WorkFolder


class Measurement:
    """Of drafts whose files begin with their key. What was measured before is read. Not thread-safe."""

    def __init__(self, kvtrie: Kvtrie, work: WorkFolder, model: torch_model.Model, prefix_tokens: int,
                 progress: Callable[[Sequence, str], Iterable]):
        self._kvtrie = kvtrie
        self._work = work
        self._model = model
        self._prefix_tokens = prefix_tokens
        self._progress = progress

    def alone(self, key: str, levels: Sequence[str], samples: Sequence[Sample], title: str) -> list[figures.Outcome]:
        """Each level on each text, coded alone. By level first, as tables are."""
        outcomes = []
        for sample in self._progress(samples, title):
            def measure(sample=sample):
                reference = self._reference(sample.name, sample.token_ids)
                for level in levels:
                    yield level, self._judge(key, level, sample.name, sample.token_ids, reference)
            outcomes += [figures.Outcome(level, sample.name, sample.group, *of_level)
                         for level, of_level in self._saved(key, sample.name, levels, measure).items()]
        return sorted(outcomes, key=lambda outcome: levels.index(outcome.level))

    def again(self, key: str, pairs: Mapping[str, str], sessions: Sequence[Session], title: str
              ) -> list[figures.Outcome]:
        """Each level of `pairs` on each session, coded against its sample at the level that stands there."""
        outcomes = []
        levels = list(pairs)
        for session in self._progress(sessions, title):
            def measure(session=session):
                reference = self._reference(session.name, session.token_ids)
                stored = self._work.held_out(session.sample.name)
                for level, finer in pairs.items():
                    of_level = self._judge(key, level, session.name, session.token_ids, reference, session.begin, {
                        "against-tokens": f"{stored}.tokens", "against-kv": f"{stored}.kv", "against-level": finer})
                    yield level, of_level
            outcomes += [figures.Outcome(level, session.name, session.sample.group, *of_level[:3], pairs[level],
                                         of_level[3])
                         for level, of_level in self._saved(key, session.name, levels, measure).items()]
        return sorted(outcomes, key=lambda outcome: levels.index(outcome.level))

    def _saved(self, key: str, name: str, levels: Sequence[str], measure: Callable[[], Iterable]) -> dict[str, tuple]:
        known = self._work.fit(f"{key}-{name}", "outcomes.npz")
        if not known.exists():
            self._work.write_arrays(known, **{f"{level} {what}": value for level, of_level in measure()
                                              for what, value in zip(_FIELDS, of_level)})
        saved = np.load(known)
        return {level: tuple(float(saved[f"{level} {what}"]) if what in _NUMBERS else saved[f"{level} {what}"]
                             for what in _FIELDS if f"{level} {what}" in saved) for level in levels}

    def _reference(self, name: str, token_ids: tuple[int, ...]):
        """What the model says on the KV as it was."""
        kv = pathlib.Path(f"{self._work.held_out(name)}.kv").read_bytes()
        return self._model.log_probabilities(kv, token_ids[self._prefix_tokens:])

    def _judge(self, key: str, level: str, name: str, token_ids: tuple[int, ...], reference, begin: int = 0,
               against: Mapping[str, object] | None = None) -> tuple:
        """_FIELDS: bits are of the blocks from that token on; the last one where they are coded against others."""
        session = self._work.held_out(name)
        restored = self._work.path / "restored.kv"
        flags = {"spec": self._work.spec, "profile": self._work.fit(key, "draft"), "level": level,
                 "tokens": f"{session}.tokens", "kv": f"{session}.kv"}
        coded = self._kvtrie.profile("code", flags={**flags, **(against or {}), "out": restored})
        candidate = self._model.log_probabilities(restored.read_bytes(), token_ids[self._prefix_tokens:])
        restored.unlink()
        kl, same_top = torch_model.divergence(reference, candidate)
        alone = [_bits(self._kvtrie.profile("code", flags=flags), begin)] if against else []
        return (_bits(coded, begin), kl, same_top, *alone)


_FIELDS = ("bits", "kl", "same", "alone bits")
_NUMBERS = ("bits", "alone bits")


def _bits(coded: Mapping, begin: int) -> float:
    """Per component, of the blocks that hold some of the tokens from `begin` on."""
    own = coded["block_bytes"][begin * coded["blocks"] // coded["tokens"]:]
    return 8 * sum(own) * coded["blocks"] / (len(own) * coded["components"])
