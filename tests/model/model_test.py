"""Holds the numpy model against transformers (fixtures/reference.json) and against itself."""

import dataclasses
import hashlib
import json
import pathlib

import numpy as np
import pytest

import kv_blocks
import smollm2
import smollm2_tokenizer
import smollm2_weights
import texts

_REFERENCE = json.loads(
    (pathlib.Path(__file__).parent / "fixtures" / "reference.json").read_text(encoding="utf-8"))
_RUNS = [pytest.param(run, id=run["name"]) for run in _REFERENCE["runs"]]

# Float32 sums in another order. A sum of n products errs by about sqrt(n) * 2^-24 of its size, so
# 2e-6 at n = 1536; 30 layers that each add such an error to the residual stream give 1e-5 if the
# errors are random, and 6e-5 if they all have one sign. The tolerances are twice the latter.
_KV_TOLERANCE = 1.2e-4  # of the root mean square of the layer's sampled values
# Logits are sums over a hidden state with that relative error; they are below 40 in size.
_LOG_PROB_TOLERANCE = 40 * 1.2e-4


@pytest.fixture(scope="module", name="model")
def _model() -> smollm2.SmolLM2:
    return smollm2.SmolLM2()


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> smollm2_tokenizer.SmolLM2Tokenizer:
    return smollm2_tokenizer.SmolLM2Tokenizer()


@pytest.fixture(scope="module", name="candidates")
def _candidates(model: smollm2.SmolLM2) -> dict[str, tuple[smollm2.KvCache, np.ndarray]]:
    """By name of the reference's run: this model's cache and log-probabilities [tokens, vocab]."""
    return {run["name"]: _candidate(model, run) for run in _REFERENCE["runs"]}


def _candidate(model: smollm2.SmolLM2, run: dict,
               round_kv: bool = True) -> tuple[smollm2.KvCache, np.ndarray]:
    cache = model.new_cache(len(run["token_ids"]), keep_k_before_rope=True, round_kv=round_kv)
    return cache, smollm2.log_probs(model.extend(cache, run["token_ids"], logits="all"))


@dataclasses.dataclass(frozen=True)
class Computed:
    """A text's tokens, the cache after them, and the logits after the last one."""

    token_ids: list[int]
    cache: smollm2.KvCache
    logits: np.ndarray


@pytest.fixture(scope="module", name="whole")
def _whole(model: smollm2.SmolLM2, tokenizer: smollm2_tokenizer.SmolLM2Tokenizer) -> Computed:
    """300 tokens, computed in one call; the last chunk and the last block of 16 are not full."""
    token_ids = tokenizer.encode(texts.license_text("Apache-2.0"))[:300]
    cache = model.new_cache(400)
    return Computed(token_ids, cache, model.extend(cache, token_ids))


def _root_mean_square(values: np.ndarray, axis=None) -> np.ndarray:
    return np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=axis))


def _assert_same_kv(candidate: smollm2.KvCache, reference: smollm2.KvCache) -> None:
    assert candidate.length == reference.length
    live = slice(reference.length)
    np.testing.assert_array_equal(candidate.k[:, :, live], reference.k[:, :, live])
    np.testing.assert_array_equal(candidate.v[:, :, live], reference.v[:, :, live])


@pytest.mark.parametrize("entry",
                         _REFERENCE["tokenizer_texts"],
                         ids=lambda entry: entry["text"][:8])
def test_token_ids_of_short_texts_are_the_references(tokenizer, entry):
    assert tokenizer.encode(entry["text"]) == entry["token_ids"]
    assert tokenizer.decode(entry["token_ids"]) == entry["text"]


def test_token_ids_of_whole_files_are_the_references(tokenizer):
    compared = 0
    for entry in _REFERENCE["tokenizer_files"]:
        text = texts.license_text(entry["name"])
        if hashlib.sha256(text.encode()).hexdigest() != entry["text_sha256"]:
            continue  # Another edition of the file.
        token_ids = tokenizer.encode(text)
        assert len(token_ids) == entry["token_count"], entry["name"]
        digest = hashlib.sha256(np.array(token_ids, "<u4").tobytes()).hexdigest()
        assert digest == entry["token_ids_sha256"], entry["name"]
        compared += 1
    assert compared >= 5, "this machine's license files are other editions than the reference's"


def test_decode_inverts_encode_on_real_files(tokenizer):
    paths = texts.license_paths() + texts.python_source_paths()
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert tokenizer.decode(tokenizer.encode(text)) == text, path


def test_chat_template_is_the_references(tokenizer):
    chat = _REFERENCE["chat"]
    assert tokenizer.encode_chat(chat["messages"]) == chat["token_ids"]


def test_cut_keeps_whole_words_up_to_the_token_count(tokenizer):
    text = texts.license_text("BSD")
    head = tokenizer.cut(text, 50)
    assert text.startswith(head) and text[len(head)].isspace()
    assert 40 <= len(tokenizer.encode(head)) <= 50
    assert tokenizer.cut(head, 1000) == head


def test_model_file_is_the_references():
    assert smollm2_weights.gguf_sha256() == _REFERENCE["made_with"]["gguf_sha256"]


@pytest.mark.parametrize("run", _RUNS)
def test_arithmetic_is_the_references(model, run):
    """Without rounding to bfloat16, which would turn the least difference into one of 2^-8."""
    token_ids, expected = run["token_ids"], run["exact"]
    cache, log_probs = _candidate(model, run, round_kv=False)

    np.testing.assert_allclose(log_probs[np.arange(len(token_ids) - 1), token_ids[1:]],
                               expected["next_log_probs"],
                               rtol=0,
                               atol=_LOG_PROB_TOLERANCE)
    _, top_log_probs = smollm2.top_k(log_probs[run["positions"]], 10)
    np.testing.assert_allclose(top_log_probs,
                               expected["top_log_probs"],
                               rtol=0,
                               atol=_LOG_PROB_TOLERANCE)
    for name in ("k", "v", "k_before_rope"):
        expected_kv = np.array(expected[name])
        error = np.abs(_kv_sample(getattr(cache, name), run) - expected_kv)
        scale = _root_mean_square(expected_kv, axis=(1, 2, 3))
        relative_error = error.max(axis=(1, 2, 3)) / scale
        assert relative_error.max() <= _KV_TOLERANCE, (name, relative_error)


@pytest.mark.parametrize("run", _RUNS)
def test_rounded_model_is_the_rounded_reference(candidates, run):
    """Within what rounding K and V to bfloat16 does to the reference.

    A difference in the last bit of float32 tips some roundings the other way, and later layers
    carry that on. At worst the two are independent roundings of one model: sqrt(2) times as far
    apart as rounded and exact reference. The factor 2 leaves room for the sample's size; root mean
    squares are compared because the maxima of so many small changes scatter.
    """
    token_ids, expected, exact = run["token_ids"], run["rounded"], run["exact"]
    cache, log_probs = candidates[run["name"]]

    next_log_probs = log_probs[np.arange(len(token_ids) - 1), token_ids[1:]]
    effect = np.subtract(expected["next_log_probs"], exact["next_log_probs"])
    error = next_log_probs - expected["next_log_probs"]
    assert _root_mean_square(error) <= 2 * _root_mean_square(effect)

    for name in ("k", "v", "k_before_rope"):
        effect = np.subtract(expected[name], exact[name])
        error = _kv_sample(getattr(cache, name), run) - expected[name]
        assert _root_mean_square(error) <= 2 * _root_mean_square(effect), name


@pytest.mark.parametrize("run", _RUNS)
@pytest.mark.parametrize("kind", ["rounded", "exact"])
def test_most_probable_tokens_are_the_references(candidates, run, kind):
    """Everywhere but at ties nearer than what rounding does to log-probabilities."""
    _, log_probs = candidates[run["name"]]
    clear = np.array(run[kind]["lead"]) > 2 * _rounding_effect(run)
    assert clear.mean() > 0.5
    expected = np.array(run[kind]["argmax"])
    np.testing.assert_array_equal(log_probs.argmax(axis=1)[clear], expected[clear])


def _rounding_effect(run: dict) -> float:
    """The most by which rounding K and V moves a log-probability of the reference."""
    return np.abs(np.subtract(run["rounded"]["next_log_probs"],
                              run["exact"]["next_log_probs"])).max()


def _kv_sample(kv: np.ndarray, run: dict) -> np.ndarray:
    """The elements of [layers, KV heads, tokens, head_dim] that the fixture holds."""
    return kv[np.ix_(range(kv.shape[0]), range(kv.shape[1]), run["kv_positions"], run["kv_dims"])]


def test_answers_a_question(model, tokenizer):
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Name three planets."}])
    answer = model.generate(model.new_cache(100), prompt, 40, stop_ids=[tokenizer.end_of_turn_id])
    assert tokenizer.decode(answer) == "1. Mars\n2. Venus\n3. Earth<|im_end|>"


@pytest.mark.parametrize("split", [1, 63, 64, 65, 250, 299])
def test_split_prefill_is_bit_equal(model, whole, split):
    cache = model.new_cache(300)
    model.extend(cache, whole.token_ids[:split], logits="none")
    logits = model.extend(cache, whole.token_ids[split:])
    np.testing.assert_array_equal(logits, whole.logits)
    _assert_same_kv(cache, whole.cache)


@pytest.mark.parametrize("block_tokens", [16, 32, 100])
def test_computing_behind_restored_blocks_is_bit_equal(model, whole, block_tokens):
    blocks = kv_blocks.pack_blocks(whole.cache, block_tokens)[:-1]
    cache = model.new_cache(350)
    kv_blocks.append_blocks(cache, blocks, block_tokens)
    logits = model.extend(cache, whole.token_ids[cache.length:])
    np.testing.assert_array_equal(logits, whole.logits)
    _assert_same_kv(cache, whole.cache)


def test_generating_behind_restored_blocks_gives_the_same_tokens(model, whole):
    computed = model.new_cache(350)
    expected = model.generate(computed, whole.token_ids, 20)
    restored = model.new_cache(350)
    kv_blocks.append_blocks(restored, kv_blocks.pack_blocks(whole.cache, 16), 16)
    assert model.generate(restored, whole.token_ids[restored.length:], 20) == expected
    _assert_same_kv(restored, computed)


def test_wrong_kv_changes_the_logits(model, whole):
    """Otherwise the tests above would pass without looking at what they restore."""
    zeros = bytes(kv_blocks.block_bytes(model.config, 16))
    restored = model.new_cache(350)
    kv_blocks.append_blocks(restored, [zeros] * 18, 16)
    logits = model.extend(restored, whole.token_ids[restored.length:])
    assert np.abs(logits - whole.logits).max() > 1


def test_generate_leaves_the_cache_that_extend_computes(model, whole):
    generated_into = model.new_cache(350)
    answer = model.generate(generated_into, whole.token_ids, 20)
    computed = model.new_cache(350)
    model.extend(computed, whole.token_ids + answer[:-1], logits="none")
    _assert_same_kv(generated_into, computed)


def test_step_is_extend_of_one_token_up_to_rounding(model, whole):
    stepped, extended = model.new_cache(301), model.new_cache(301)
    for cache in (stepped, extended):
        kv_blocks.append_blocks(cache, kv_blocks.pack_blocks(whole.cache, 100), 100)
    token_id = int(np.argmax(whole.logits))
    logits = model.step(stepped, token_id)
    stepped_ids, stepped_top = smollm2.top_k(smollm2.log_probs(logits), 10)
    extended_log_probs = smollm2.log_probs(model.extend(extended, [token_id]))
    np.testing.assert_allclose(stepped_top,
                               extended_log_probs[stepped_ids],
                               rtol=0,
                               atol=max(_rounding_effect(run) for run in _REFERENCE["runs"]))
    assert stepped.length == extended.length == 301
    # The first layer's K and V come before any attention: no more than one tipped rounding apart.
    np.testing.assert_allclose(stepped.k[0, :, 300], extended.k[0, :, 300], rtol=2**-7, atol=1e-6)


def test_score_is_what_extend_says(model, whole):
    token_ids = whole.token_ids[:100]
    scores = model.score(model.new_cache(100), token_ids, top_count=5)
    log_probs = smollm2.log_probs(model.extend(model.new_cache(100), token_ids, logits="all"))
    np.testing.assert_array_equal(scores.next_log_probs, log_probs[np.arange(99), token_ids[1:]])
    np.testing.assert_array_equal(scores.top_ids[:, 0], log_probs.argmax(axis=1))
    np.testing.assert_array_equal(scores.top_log_probs, -np.sort(-log_probs, axis=1)[:, :5])
    np.testing.assert_allclose(np.exp(log_probs.astype(np.float64)).sum(axis=1), 1, atol=1e-4)


def test_truncated_cache_continues_as_if_the_rest_had_never_been(model, whole):
    cache = model.new_cache(350)
    model.extend(cache, whole.token_ids[:200] + whole.token_ids[:50], logits="none")
    cache.truncate(200)
    np.testing.assert_array_equal(model.extend(cache, whole.token_ids[200:]), whole.logits)


def test_refuses_more_tokens_than_the_cache_has_room_for(model):
    cache = model.new_cache(10)
    with pytest.raises(ValueError):
        model.extend(cache, [1] * 11)
    with pytest.raises(ValueError):
        model.extend(cache, [])
    model.extend(cache, [1] * 10, logits="none")
    with pytest.raises(ValueError):
        model.step(cache, 1)


def test_rounds_to_the_nearest_bf16_and_halves_to_even():
    ulp = 2.0**-7  # of bfloat16 in [1, 2)
    x = np.array([1, 1 + 0.49 * ulp, 1 + 0.5 * ulp, 1 + 1.5 * ulp, -1 - 0.51 * ulp, 0], np.float32)
    expected = np.array([1, 1, 1, 1 + 2 * ulp, -1 - ulp, 0], np.float32)
    np.testing.assert_array_equal(smollm2.round_to_bf16(x), expected)


@pytest.mark.parametrize("block_tokens", [1, 16, 32, 300])
def test_blocks_round_trip(model, whole, block_tokens):
    blocks = kv_blocks.pack_blocks(whole.cache, block_tokens)
    assert len(blocks) == 300 // block_tokens
    assert {len(block) for block in blocks} == {kv_blocks.block_bytes(model.config, block_tokens)}
    restored = model.new_cache(300)
    kv_blocks.append_blocks(restored, blocks, block_tokens)
    live = slice(restored.length)
    np.testing.assert_array_equal(restored.k[:, :, live], whole.cache.k[:, :, live])
    np.testing.assert_array_equal(restored.v[:, :, live], whole.cache.v[:, :, live])
    assert kv_blocks.pack_blocks(restored, block_tokens) == blocks


def test_block_order_is_layer_kv_token_head_dim(model, whole):
    block_tokens, block_index = 16, 3
    block = kv_blocks.pack_block(whole.cache, block_index, block_tokens)
    config = model.config
    for layer, is_v, token, head, dim in [(0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 1, 0),
                                          (0, 0, 1, 0, 0), (0, 1, 0, 0, 0), (1, 0, 0, 0, 0),
                                          (29, 1, 15, 2, 63)]:
        element = layer
        for size, index in [(2, is_v), (block_tokens, token), (config.kv_head_count, head),
                            (config.head_dim, dim)]:
            element = element * size + index
        kv = whole.cache.v if is_v else whole.cache.k
        bf16 = block[2 * element:2 * element + 2]  # little-endian: the upper half of a float32
        as_float = np.frombuffer(b"\0\0" + bf16, "<f4")[0]
        assert as_float == kv[layer, head, block_index * block_tokens + token, dim]


def test_refuses_what_is_no_block(model, whole):
    with pytest.raises(IndexError):
        kv_blocks.pack_block(whole.cache, 18, 16)  # 300 tokens: block 18 is partly filled.
    cache = model.new_cache(40)
    block = kv_blocks.pack_block(whole.cache, 0, 16)
    with pytest.raises(ValueError):
        kv_blocks.append_blocks(cache, [block[:-1]], 16)
    with pytest.raises(ValueError):
        kv_blocks.append_blocks(cache, [block] * 3, 16)
    model.extend(cache, [1], logits="none")
    with pytest.raises(ValueError):
        kv_blocks.append_blocks(cache, [block], 16)


@pytest.fixture(scope="module", name="sessions")
def _sessions(tokenizer) -> list[texts.ChatSession]:
    return texts.chat_sessions(tokenizer)


def test_sessions_depend_on_the_seed_alone(tokenizer, sessions):
    assert texts.chat_sessions(tokenizer) == sessions
    assert texts.chat_sessions(tokenizer, seed=2) != sessions


def test_sessions_have_the_stated_sizes(tokenizer, sessions):
    assert len(sessions) == 24
    sizes = [len(session.turn_prompts(tokenizer)[-1]) for session in sessions]
    assert min(sizes) >= texts.SESSION_TOKENS_MIN and max(sizes) <= texts.SESSION_TOKENS_MAX
    assert sum(size <= 1000 for size in sizes) >= 8
    assert {len(session.turn_prompts(tokenizer)) for session in sessions} == {2, 3}
    assert len({tuple(session.turn_prompts(tokenizer)[-1]) for session in sessions}) == 24


def test_each_turn_extends_the_one_before(tokenizer, sessions):
    for session in sessions:
        prompts = session.turn_prompts(tokenizer)
        for earlier, later in zip(prompts, prompts[1:]):
            assert later[:len(earlier)] == earlier, session.name


def test_sessions_of_a_group_share_their_system_prompt(tokenizer, sessions):
    shared_by_group = []
    for group in range(texts.GROUP_COUNT):
        prompts = [s.turn_prompts(tokenizer)[-1] for s in sessions if s.group == group]
        shared_by_group.append(min(_shared(prompts[0], prompt) for prompt in prompts[1:]))
    small, middle, large = shared_by_group
    assert 200 <= small <= 300 and 500 <= middle <= 600 and 950 <= large <= 1050
    firsts = [next(s for s in sessions if s.group == group) for group in range(texts.GROUP_COUNT)]
    a, b, c = (session.turn_prompts(tokenizer)[-1] for session in firsts)
    assert max(_shared(a, b), _shared(a, c), _shared(b, c)) < 50


def _shared(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that two sequences have in common."""
    unequal = (i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return next(unequal, min(len(a), len(b)))
