"""The pairs are what they claim to be: the same documents, other prefixes, sets apart."""

import pytest

import corpus
import pairs
import smollm2_tokenizer


@pytest.fixture(scope="module", name="tokenizer")
def fixture_tokenizer():
    try:
        corpus.files_of(corpus.PROSE)
        return smollm2_tokenizer.SmolLM2Tokenizer()
    except (corpus.PackageMissing, OSError) as error:
        pytest.skip(str(error))


def _documents(of):
    return [pair.second.token_ids[slice(*pair.second.document)] for pair in of]


def _windows(of):
    return {document[at:at + 32] for document in _documents(of) for at in range(len(document) - 31)}


def test_both_sessions_hold_the_document_behind_other_prefixes(tokenizer):
    found = pairs.fit_pairs(tokenizer) + pairs.test_pairs(tokenizer)
    assert len(found) == sum(count for _, count in (*pairs.FIT_SOURCES, *pairs.TEST_SOURCES, *pairs.GLOSSARY_SOURCES,
                                                    *pairs.GLOSSARY_SOURCES))
    for pair in found:
        first, second = ([*session.token_ids[slice(*session.document)]] for session in (pair.first, pair.second))
        assert first == second
        assert len(first) == pairs.DOCUMENT_TOKENS
        prefixes = [session.token_ids[:session.document[0]] for session in (pair.first, pair.second)]
        assert prefixes[0] != prefixes[1]
        assert all(len(prefix) - 1 in pairs.PREFIX_TOKENS for prefix in prefixes)
        assert pair.first.continuation == pair.second.continuation


def test_sets_share_no_text(tokenizer):
    fit, tune, test = pairs.fit_pairs(tokenizer), pairs.tune_pairs(tokenizer), pairs.test_pairs(tokenizer)
    assert len(tune) == sum(count for _, count in pairs.TUNE_SOURCES)
    assert _windows(fit).isdisjoint(_windows(tune))
    assert (_windows(fit) | _windows(tune)).isdisjoint(_windows(test))
    fitted = {source.package for source, _ in (*pairs.FIT_SOURCES, *pairs.TUNE_SOURCES)}
    assert fitted.isdisjoint(source.package for source, _ in (*pairs.TEST_SOURCES, *pairs.GLOSSARY_SOURCES))


def test_glossaries_explain_the_words_of_the_document(tokenizer):
    found = [pair for pair in pairs.test_pairs(tokenizer) if pair.kind != pairs.UNRELATED]
    assert {pair.kind for pair in found} == {pairs.GLOSSARY, pairs.RESOLVED}
    for pair in found:
        prefixes = [tokenizer.decode(session.token_ids[1:session.document[0]]) for session in (pair.first, pair.second)]
        words = [[line.split('"')[1] for line in prefix.splitlines() if line.startswith('"')] for prefix in prefixes]
        assert len(words[0]) >= 8 and set(words[0]) <= set(words[1])
        document = tokenizer.decode(pair.second.token_ids[slice(*pair.second.document)])
        assert sum(word in document for word in words[1]) >= 3


def test_a_pair_is_the_same_each_time(tokenizer):
    assert pairs.fit_pairs(tokenizer) == pairs.fit_pairs(tokenizer)
