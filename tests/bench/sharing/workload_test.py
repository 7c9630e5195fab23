"""The workload is what its specification says, and what the benchmark's claims stand on."""

import json

import pytest

import corpus
import smollm2_tokenizer
import workload


@pytest.fixture(name="made", scope="module")
def _made():
    return workload.make(smollm2_tokenizer.SmolLM2Tokenizer())


def test_sessions_are_as_many_and_as_long_as_the_specification_says(made):
    spec = json.loads(workload.SPEC_PATH.read_text(encoding="utf-8"))
    assert len(made.sessions) == sum(group["sessions"] for group in spec["groups"]) == 200
    for number, group in enumerate(spec["groups"]):
        own = [session for session in made.sessions if session.group == number]
        assert len(own) == group["sessions"]
        assert {session.system_tokens for session in own} == {group["system_tokens"]}
        assert len({session.token_ids[:group["system_tokens"]] for session in own}) == 1
    least, most = spec["turns"]
    assert {len(session.turns) for session in made.sessions} == set(range(least, most + 1))


def test_at_least_half_of_the_distinct_tokens_are_private(made):
    assert made.private_share >= 0.5
    assert made.distinct_tokens < sum(len(session.token_ids) for session in made.sessions)


def test_documents_stand_behind_several_prompts(made):
    groups = {}
    for session in made.sessions:
        for number, begin, end in session.documents:
            assert session.token_ids[begin:end] == made.documents[number]
            groups.setdefault(number, set()).add(session.group)
    assert sum(len(own) > 1 for own in groups.values()) >= len(made.documents) / 2


def test_what_is_private_stands_nowhere_else(made):
    """Of 24 tokens in a row, behind the longest thing that sessions share."""
    window, known = 24, set()
    for session in made.sessions:
        ends = sorted((end for _, _, end in session.documents), reverse=True)
        own = session.token_ids[max([session.system_tokens, *ends[:1]]):]
        windows = {own[at:at + window] for at in range(0, len(own) - window + 1)}
        assert len(windows & known) <= window  # templates, and text that repeats itself
        known |= windows


def test_turns_and_prefixes_lie_where_they_are_said_to(made):
    for session in made.sessions:
        assert session.turns[-1].end == len(session.token_ids)
        assert all(turn.answer < turn.end for turn in session.turns)
        assert session.system_tokens <= session.shared_tokens < session.turns[0].answer
    by_name = {}
    for session in made.sessions:
        prefix = session.token_ids[:session.shared_tokens]
        assert by_name.setdefault(session.prefix_name, prefix) == prefix
    assert set(made.judged) <= {session.name for session in made.sessions}
    assert len(made.judged) == 24
    continued = {session.name for session in made.sessions if session.continuation}
    assert continued == set(made.judged)


def test_the_same_specification_gives_the_same_sessions(made):
    again = workload.make(smollm2_tokenizer.SmolLM2Tokenizer())
    assert again == made


def test_quick_is_a_small_part_of_each_group():
    quick = workload.make(smollm2_tokenizer.SmolLM2Tokenizer(), quick=True)
    assert {session.group for session in quick.sessions} == set(range(8))
    assert len(quick.sessions) == 24


def test_too_little_text_is_said_so(made):
    texts = workload._Texts(smollm2_tokenizer.SmolLM2Tokenizer(), corpus.PROSE, workload.random.Random(1))
    with pytest.raises(corpus.PackageMissing, match="too little text"):
        texts.take(10_000_000)
