"""Chats with a stand-in for the model: their form and their cache."""

import pytest

import chat
import corpus
import fake_model
import kv_files
import smollm2_tokenizer


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> smollm2_tokenizer.SmolLM2Tokenizer:
    return smollm2_tokenizer.SmolLM2Tokenizer()


def _generate(tokenizer: smollm2_tokenizer.SmolLM2Tokenizer, seed: str) -> list[int]:
    turns = [f"Question {i}?" for i in range(100)]
    return chat.generate(fake_model.FakeModel(), tokenizer, turns, seed, lambda done: None)


def test_a_chat_is_turns_in_the_models_template(tokenizer):
    token_ids = _generate(tokenizer, "a")
    assert len(token_ids) == corpus.TEXT_TOKENS
    text = tokenizer.decode(token_ids)
    assert text.startswith(tokenizer.decode(tokenizer.encode_chat(
        [{"role": "user", "content": "Question 0?"}])))
    turns = text.split("<|im_start|>user\n")[1:]
    assert len(turns) > 3
    for i, turn in enumerate(turns[:-1]):
        assert turn.startswith(f"Question {i}?<|im_end|>\n<|im_start|>assistant\n")
        assert turn.endswith("<|im_end|>\n")


def test_the_same_seed_gives_the_same_chat(tokenizer):
    assert _generate(tokenizer, "a") == _generate(tokenizer, "a")
    assert _generate(tokenizer, "a") != _generate(tokenizer, "b")


def test_too_few_turns_are_an_error(tokenizer):
    with pytest.raises(RuntimeError, match="a chat of 2 turns"):
        chat.generate(fake_model.FakeModel(), tokenizer, ["One?", "Two?"], "a", lambda done: None)


def test_chats_come_from_the_cache_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_files, "cache_folder", lambda: tmp_path)
    lines = []

    def chats(load_model):
        return chat.chats("some", corpus.TEST_CHAT_SOURCES, 2, load_model, lines.append)

    first = chats(fake_model.FakeModel)
    assert [text.name for text in first] == ["some-00", "some-01"]
    assert {text.domain for text in first} == {"chat"}
    assert lines and lines[0].startswith("some-00: ")
    assert len(list((tmp_path / "chats").iterdir())) == 2

    def no_model():
        raise AssertionError("generated again")

    assert chats(no_model) == first
