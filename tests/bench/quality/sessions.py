"""What becomes of a scheme's error over the life of a session.

Turns: a prefix is restored, the next turn is computed on what was restored, stored, restored, and so on.
Stored early: blocks are coded when the session is short, with all that the codec then knows of it, and
read when it is long. Next: continuations of several lengths behind one restored prefix.
"""

import dataclasses

import numpy as np

import corpus
import judge
import schemes
import smollm2

FIRST_TOKENS = 256  # of a session, before its first turn
TURN_TOKENS = 128
TURNS = 6
JUDGED_TURNS = (1, 3, 6)
CONTINUATIONS = (16, 256, 1000)
_JUDGED_TOKENS = 256  # of the continuation behind blocks that were stored early


@dataclasses.dataclass(frozen=True)
class Reference:
    """A text's exact KV [layers, 2, PREFIX_TOKENS, KV heads, head_dim] and what the model says on it.

    turns: by number, for JUDGED_TURNS. continuation: None for texts without the tokens for it.
    """

    text: corpus.Text
    kv: np.ndarray
    turns: dict[int, judge.Distributions]
    continuation: judge.Distributions | None


@dataclasses.dataclass(frozen=True)
class Measure:
    """One of the measures: "turn 1", "stored early", "next 16", ..."""

    name: str
    bits: float
    divergence: judge.Divergence


def reference(model: smollm2.SmolLM2, text: corpus.Text, kv: np.ndarray) -> Reference:
    turns_end = FIRST_TOKENS + TURNS * TURN_TOKENS
    said = judge.continuation(model, kv[:, :, :FIRST_TOKENS],
                              text.token_ids[FIRST_TOKENS:turns_end])
    turns = {turn: said.part((turn - 1) * TURN_TOKENS, turn * TURN_TOKENS) for turn in JUDGED_TURNS}
    rest = text.token_ids[corpus.PREFIX_TOKENS:]
    long_enough = len(rest) >= max(CONTINUATIONS)
    return Reference(text, kv, turns,
                     judge.continuation(model, kv, rest) if long_enough else None)


def measure(model: smollm2.SmolLM2, scheme: schemes.Scheme, exact: Reference) -> list[Measure]:
    """All measures of a scheme on a text."""
    measures = measure_turns(model, scheme, exact)
    if exact.continuation is not None:
        measures += [measure_stored_early(model, scheme, exact), *measure_next(model, scheme, exact)]
    return measures


def measure_turns(model: smollm2.SmolLM2, scheme: schemes.Scheme,
                  exact: Reference) -> list[Measure]:
    """Turn i is judged on a prefix of which all was stored and restored, i times in all."""
    token_ids = exact.text.token_ids
    cache = model.new_cache(FIRST_TOKENS + TURNS * TURN_TOKENS)
    judge.set_cache(cache, exact.kv[:, :, :FIRST_TOKENS])
    measures, stored, byte_count = [], 0, 0
    for turn in range(1, TURNS + 1):
        session = judge.get_kv(cache)
        restored = scheme.restore(token_ids[:cache.length], session, stored)
        judge.set_cache(cache, np.concatenate([session[:, :, :stored], restored.kv], axis=2))
        stored, byte_count = cache.length, byte_count + restored.byte_count
        turn_ids = token_ids[stored:stored + TURN_TOKENS]
        if turn in exact.turns:
            candidate = judge.Distributions.of(model.extend(cache, turn_ids, logits="all"))
            measures.append(Measure(f"turn {turn}",
                                    bits_per_component(byte_count, session),
                                    judge.diverge(exact.turns[turn], candidate, turn_ids)))
        else:
            model.extend(cache, turn_ids, logits="none")
    return measures


def measure_stored_early(model: smollm2.SmolLM2, scheme: schemes.Scheme,
                         exact: Reference) -> Measure:
    """The first FIRST_TOKENS are coded when there are no more; the others when all of them are there."""
    token_ids, prefix = exact.text.token_ids, corpus.PREFIX_TOKENS
    early = scheme.restore(token_ids[:FIRST_TOKENS], exact.kv[:, :, :FIRST_TOKENS])
    late = scheme.restore(token_ids[:prefix],
                          np.concatenate([early.kv, exact.kv[:, :, FIRST_TOKENS:]], axis=2),
                          FIRST_TOKENS)
    next_ids = token_ids[prefix:prefix + _JUDGED_TOKENS]
    candidate = judge.continuation(model, np.concatenate([early.kv, late.kv], axis=2), next_ids)
    return Measure("stored early",
                   bits_per_component(early.byte_count + late.byte_count, exact.kv),
                   judge.diverge(exact.continuation.part(0, len(next_ids)), candidate, next_ids))


def measure_next(model: smollm2.SmolLM2, scheme: schemes.Scheme, exact: Reference) -> list[Measure]:
    """The first 16, 256, ... tokens behind a prefix that was stored at once."""
    token_ids, prefix = exact.text.token_ids, corpus.PREFIX_TOKENS
    restored = scheme.restore(token_ids[:prefix], exact.kv)
    candidate = judge.continuation(model, restored.kv, token_ids[prefix:])
    bits = bits_per_component(restored.byte_count, exact.kv)
    divergence = judge.diverge(exact.continuation, candidate, token_ids[prefix:])
    return [Measure(f"next {count}", bits, divergence.head(count)) for count in CONTINUATIONS]


def bits_per_component(byte_count: int, kv: np.ndarray) -> float:
    return 8 * byte_count / kv.size
