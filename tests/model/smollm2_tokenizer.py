"""Byte-level BPE tokenizer and chat template of SmolLM2."""

from collections.abc import Iterable, Mapping, Sequence

import tokenizers

import smollm2_weights

# A chat message: {"role": "system" | "user" | "assistant", "content": text}.
Message = Mapping[str, str]

_DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class SmolLM2Tokenizer:
    """Text <-> token ids. Immutable after construction; thread-safe."""

    def __init__(self):
        folder = smollm2_weights.filled_cache_folder()
        self._tokenizer = tokenizers.Tokenizer.from_file(
            str(folder / smollm2_weights.TOKENIZER_NAME))
        self.end_of_turn_id: int = self._tokenizer.token_to_id("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added; each "<|im_start|>" and its like is one token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Inverse of encode for any text; special tokens are written out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def cut(self, text: str, token_count: int) -> str:
        """The longest start of `text` of whole words and at most `token_count` tokens."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= token_count:
            return text
        head = text[:offsets[token_count][0] + 1]
        return head.rsplit(maxsplit=1)[0].rstrip()

    def encode_chat(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of a conversation that the assistant is about to continue (see render_chat)."""
        return self.encode(render_chat(messages))


def render_chat(messages: Iterable[Message]) -> str:
    """ChatML text of a conversation, up to the start of the assistant's next message."""
    messages = list(messages)
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _DEFAULT_SYSTEM})
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
