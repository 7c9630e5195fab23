"""Sessions that hold a text again behind another prefix. A token here is a number."""

import pytest

from kvtrie.calibrate import repeated
from kvtrie.calibrate.texts import Sample

_PREFIX, _LENGTH = 300, 400


def _sample(number: int, group: str, text: str | None = None) -> Sample:
    """Begins with token 1, as all sessions do."""
    return Sample(f"s{number}", group, (1, *range(1000 * number, 1000 * number + _LENGTH - 1)), text or f"t{number}")


_SAMPLES = [_sample(1, "a"), _sample(2, "a"), _sample(3, "b"), _sample(4, "b")]


@pytest.mark.parametrize("lead", [0, 1])
def test_a_session_is_another_prefix_and_the_text(lead):
    sessions = repeated.repeat(_SAMPLES, _SAMPLES, _PREFIX, lead)
    assert [session.sample for session in sessions] == _SAMPLES
    assert len({session.name for session in sessions}) == 4
    for session in sessions:
        assert len(session.token_ids) == _LENGTH
        assert 60 <= session.begin - lead <= 100  # a third of the session
        prefix = session.token_ids[:session.begin]
        other = next(sample for sample in _SAMPLES if sample.token_ids[:session.begin] == prefix)
        assert other.group != session.sample.group
        own = session.sample.token_ids
        at = own.index(session.token_ids[session.begin])
        # All of it is in the sample, the part that is stored in the part that is stored, and at other positions.
        assert own[at:at + _LENGTH - session.begin] == session.token_ids[session.begin:]
        assert at + _PREFIX - session.begin <= _PREFIX and lead <= at < session.begin
    assert repeated.shared_tokens(sessions, _PREFIX) == sum(_PREFIX - session.begin for session in sessions)


def test_the_same_samples_give_the_same_sessions():
    assert repeated.repeat(_SAMPLES, _SAMPLES, _PREFIX, 1) == repeated.repeat(_SAMPLES[:], _SAMPLES[:], _PREFIX, 1)
    begins = [session.begin for session in repeated.repeat(_SAMPLES, _SAMPLES, _PREFIX, 1)]
    assert len(set(begins)) > 1


def test_another_text_of_the_group_will_do_and_the_same_one_will_not():
    sessions = repeated.repeat(_SAMPLES[:1], _SAMPLES[:2], _PREFIX, 1)
    assert sessions[0].token_ids[1] == 2000
    assert not repeated.repeat(_SAMPLES[:1], [_sample(1, "a"), _sample(7, "b", text="t1")], _PREFIX, 1)


def test_sessions_too_short_for_a_run_are_none():
    assert len(repeated.repeat(_SAMPLES, _SAMPLES, 60, 1)) == 4
    assert not repeated.repeat(_SAMPLES, _SAMPLES, 45, 1)
    assert not repeated.repeat(_SAMPLES, _SAMPLES, 2, 0)
