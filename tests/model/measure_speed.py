"""Prints how fast the model is on one core: prefill, prefill behind a restored prefix, decode."""

import time
from collections.abc import Callable

import kv_blocks
import smollm2
import smollm2_tokenizer
import texts

_PROMPT_TOKENS = 1000
_RESTORED_TOKENS = 960
_BLOCK_TOKENS = 32
_DECODED_TOKENS = 20


def main() -> None:
    model = smollm2.SmolLM2()
    token_ids = smollm2_tokenizer.SmolLM2Tokenizer().encode(texts.license_text("GPL-3"))
    prompt = token_ids[:_PROMPT_TOKENS]
    model.extend(model.new_cache(1), [0])  # Maps the weights into memory.

    cache = model.new_cache(_PROMPT_TOKENS + _DECODED_TOKENS)
    seconds = _seconds(lambda: model.extend(cache, prompt))
    print(f"prefill of {_PROMPT_TOKENS} tokens: {seconds:.2f} s")

    blocks = kv_blocks.pack_blocks(cache, _BLOCK_TOKENS)[:_RESTORED_TOKENS // _BLOCK_TOKENS]
    restored = model.new_cache(_PROMPT_TOKENS)
    seconds = _seconds(lambda: kv_blocks.append_blocks(restored, blocks, _BLOCK_TOKENS))
    print(f"unpacking {_RESTORED_TOKENS} tokens of KV: {seconds:.3f} s")
    seconds = _seconds(lambda: model.extend(restored, prompt[_RESTORED_TOKENS:]))
    print(f"prefill of the {_PROMPT_TOKENS - _RESTORED_TOKENS} tokens behind them: {seconds:.2f} s")

    def decode() -> None:
        for token_id in token_ids[_PROMPT_TOKENS:_PROMPT_TOKENS + _DECODED_TOKENS]:
            model.step(cache, token_id)

    seconds = _seconds(decode) / _DECODED_TOKENS
    print(f"decode behind {_PROMPT_TOKENS} tokens: {seconds:.3f} s per token")


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
