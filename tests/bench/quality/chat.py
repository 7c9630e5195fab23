"""Chats with the model itself: its own template, its own answers.

A user turn quotes a piece of a text behind an instruction. The model answers, sampled, until the chat has
TEXT_TOKENS tokens. Answers take minutes to compute, so finished chats are kept in the cache, by a digest
of what they depend on.
"""

import hashlib
import pathlib
import random
from collections.abc import Callable

import numpy as np

import corpus
import kv_files
import smollm2
import smollm2_tokenizer

_TEMPERATURE = 0.7
_ANSWER_TOKENS_MAX = 220
_TURNS_MAX = 40  # more than any chat takes

_INSTRUCTIONS = (
    "Please summarize this in two sentences:",
    "What does this mean?",
    "Explain this to a beginner:",
    "What would you ask somebody who wrote this?",
    "List the main points of this:",
    "Give an example for this:",
    "Rewrite this in simpler words:",
    "Is this right? Say why or why not.",
    "What might come after this?",
    "Which words here are the important ones?",
)


def user_turns(sources: tuple[corpus.Source, ...], seed: str) -> list[str]:
    """What the user says, turn by turn."""
    rng = random.Random(f"chat {seed}")
    return [f"{rng.choice(_INSTRUCTIONS)}\n\n{piece}"
            for piece in corpus.pieces(sources, rng, _TURNS_MAX)]


def chats(prefix: str, sources: tuple[corpus.Source, ...], count: int,
          load_model: Callable[[], smollm2.SmolLM2],
          progress: Callable[[str], None]) -> list[corpus.Text]:
    """`count` chats; those that the cache lacks are generated one after another.

    progress: called with a line now and then while that goes on.
    """
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    texts = []
    for index in range(count):
        name = f"{prefix}-{index:02}"
        turns = user_turns(sources, name)
        path = _path(name, turns)
        if not path.exists():
            token_ids = generate(load_model(), tokenizer, turns, name,
                                 lambda done, name=name: progress(
                                     f"{name}: {done} of {corpus.TEXT_TOKENS} tokens"))
            kv_files.write_atomically(path, np.array(token_ids, "<u4").tobytes())
        token_ids = tuple(np.frombuffer(path.read_bytes(), "<u4").tolist())
        texts.append(corpus.Text(name, corpus.CHAT_DOMAIN, token_ids))
    return texts


def _path(name: str, turns: list[str]) -> pathlib.Path:
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    digest.update(kv_files.model_digest().encode())
    for turn in turns:
        digest.update(f"{len(turn)} {turn}".encode())
    return kv_files.cache_folder() / "chats" / f"{name}-{digest.hexdigest()[:24]}.tokens"


def generate(model: smollm2.SmolLM2, tokenizer: smollm2_tokenizer.SmolLM2Tokenizer,
             turns: list[str], seed: str, progress: Callable[[int], None]) -> list[int]:
    """TEXT_TOKENS tokens of a chat. progress: called with the tokens so far, turn by turn."""
    rng = np.random.default_rng(list(hashlib.sha256(seed.encode()).digest()))
    cache = model.new_cache(corpus.TEXT_TOKENS)
    token_ids = tokenizer.encode_chat([{"role": "user", "content": turns[0]}])
    for turn in turns[1:]:
        logits = model.extend(cache, token_ids[cache.length:])
        answer_end = min(len(token_ids) + _ANSWER_TOKENS_MAX, corpus.TEXT_TOKENS)
        while True:
            token_ids.append(_sample(logits, rng))
            if token_ids[-1] == tokenizer.end_of_turn_id or len(token_ids) == answer_end:
                break
            logits = model.step(cache, token_ids[-1])
        progress(len(token_ids))
        if token_ids[-1] != tokenizer.end_of_turn_id:
            token_ids.append(tokenizer.end_of_turn_id)
        token_ids += tokenizer.encode(f"\n<|im_start|>user\n{turn}<|im_end|>\n"
                                      "<|im_start|>assistant\n")
        if len(token_ids) >= corpus.TEXT_TOKENS:
            return token_ids[:corpus.TEXT_TOKENS]
    raise RuntimeError(f"a chat of {len(turns)} turns has only {len(token_ids)} tokens")


def _sample(logits: np.ndarray, rng: np.random.Generator) -> int:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / _TEMPERATURE)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
