"""Measures over the life of a session, with a stand-in for the model and schemes that can be reckoned."""

import dataclasses

import numpy as np
import pytest

import corpus
import fake_model
import judge
import schemes
import sessions


@dataclasses.dataclass
class _Scheme:
    """Adds `error` to all KV. calls: (tokens, first_token) of each restore."""

    error: float
    calls: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def restore(self, token_ids, kv, first_token=0):
        assert kv.shape[2] == len(token_ids)
        self.calls.append((len(token_ids), first_token))
        restored = kv[:, :, first_token:] + np.float32(self.error)
        return schemes.Restored(restored, restored.size)


@pytest.fixture(scope="module", name="exact")
def _exact() -> sessions.Reference:
    return _reference(corpus.LONG_TEXT_TOKENS)


def _reference(token_count: int) -> sessions.Reference:
    token_ids = tuple(np.random.default_rng(8).integers(0, 60, token_count).tolist())
    model = fake_model.FakeModel()
    cache = model.new_cache(corpus.PREFIX_TOKENS)
    model.extend(cache, token_ids[:corpus.PREFIX_TOKENS])
    return sessions.reference(model, corpus.Text("text", "prose", token_ids), judge.get_kv(cache))


def test_what_is_exact_stays_exact(exact):
    measures = sessions.measure(fake_model.FakeModel(), _Scheme(0), exact)
    assert [m.name for m in measures] == ["turn 1", "turn 3", "turn 6", "stored early", "next 16",
                                          "next 256", "next 1000"]
    for measure in measures:
        assert measure.bits == 8
        assert not measure.divergence.kl.any() and measure.divergence.same_top.all(), measure.name
    sizes = {m.name: len(m.divergence.kl) for m in measures}
    assert sizes == {"turn 1": 128, "turn 3": 128, "turn 6": 128, "stored early": 256,
                     "next 16": 16, "next 256": 256, "next 1000": 1000}


def test_each_turn_stores_what_is_new_of_the_session_so_far(exact):
    scheme, model = _Scheme(0), fake_model.FakeModel()
    sessions.measure_turns(model, scheme, exact)
    assert scheme.calls == [(256, 0), (384, 256), (512, 384), (640, 512), (768, 640), (896, 768)]
    assert model.extended == [128] * 6  # turn 6 ends at 1,024 tokens


def test_turns_are_computed_on_what_was_restored(exact):
    measures = sessions.measure_turns(fake_model.FakeModel(), _Scheme(0.5), exact)
    # The stand-in's memory is short: the first token behind an error feels it, the last ones do not.
    for measure in measures:
        assert measure.divergence.kl[0] > 0.01 > measure.divergence.kl[-1], measure.name


def test_stored_early_codes_the_rest_when_all_is_there(exact):
    scheme = _Scheme(0)
    sessions.measure_stored_early(fake_model.FakeModel(), scheme, exact)
    assert scheme.calls == [(256, 0), (768, 256)]


def test_next_measures_are_parts_of_one_continuation(exact):
    model = fake_model.FakeModel()
    measures = sessions.measure_next(model, _Scheme(0.5), exact)
    assert model.extended == [1000]
    np.testing.assert_array_equal(measures[0].divergence.kl, measures[2].divergence.kl[:16])
    assert measures[0].divergence.kl.mean() > measures[2].divergence.kl.mean() > 0


def test_a_text_without_a_long_continuation_has_turns_alone():
    exact = _reference(corpus.TEXT_TOKENS)
    assert exact.continuation is None
    measures = sessions.measure(fake_model.FakeModel(), _Scheme(0), exact)
    assert [m.name for m in measures] == ["turn 1", "turn 3", "turn 6"]
