"""How much of a token's K and V can be known before it is stored: what each predictor is worth in bits.

Linear predictions of K before RoPE and of V of each layer, fitted to calibration texts and measured on
test texts of other packages (SmolLM2-135M-Instruct, the English ones). A predictor's worth is what a good
code of high rate saves with it: half the logarithm of the ratio of determinants of the covariance of what
is left to the one of what there was, per component. arXiv:2604.15356 predicts from what the model expects
of the next token (E_p); here that is the mean of layer 0's K and V over the model's own distribution.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "model"))
# pylint: disable=wrong-import-position
import chat
import corpus
import smollm2
import smollm2_tokenizer
import workers

# Parts of a row of a layer: the constant, E_p, layer 0, the layers below, and what is predicted.
_CONSTANT, _EXPECTED, _FIRST, _TWO_BELOW, _BELOW, _K, _V = range(7)
_RIDGE = 1e-4  # of the mean variance of the features


@dataclasses.dataclass(frozen=True)
class Predictor:
    """parts: of the row, for K and V; for V also K where same_layer_k. rank: of the matrix; 0: full."""

    name: str
    parts: tuple[int, ...]
    same_layer_k: bool = False
    rank: int = 0


PREDICTORS = (
    Predictor("E_p, the expected next token", (_EXPECTED,)),
    Predictor("layer 0 of the actual token", (_FIRST,)),
    Predictor("layer 0 and E_p", (_FIRST, _EXPECTED)),
    Predictor("K for V", (), True),
    Predictor("one layer below", (_BELOW,)),
    Predictor("one layer below, K for V", (_BELOW,), True),
    Predictor("two layers below, K for V", (_BELOW, _TWO_BELOW), True),
    Predictor("two layers below, layer 0, K for V", (_BELOW, _TWO_BELOW, _FIRST), True),
    Predictor("the same at rank 96", (_BELOW, _TWO_BELOW, _FIRST), True, 96),
    Predictor("the same at rank 48", (_BELOW, _TWO_BELOW, _FIRST), True, 48),
    Predictor("the same and E_p", (_BELOW, _TWO_BELOW, _FIRST, _EXPECTED), True),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns of each part of a row. width: of K, and of V."""

    width: int

    def columns(self, part: int) -> slice:
        starts = np.cumsum([0, 1, *[2 * self.width] * 4, self.width, self.width])
        return slice(int(starts[part]), int(starts[part + 1]))

    @property
    def total(self) -> int:
        return self.columns(_V).stop

    def select(self, parts: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.arange(self.columns(part).start, self.columns(part).stop)
                               for part in (_CONSTANT, *parts)])


def rows_of_text(model: smollm2.SmolLM2, table: np.ndarray,
                 token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Layer by layer from 1 on, the rows [tokens - 1, columns] of all tokens but the first.

    table: of first_layer_kv.
    """
    layout = Layout(table.shape[2])
    cache = model.new_cache(len(token_ids), keep_k_before_rope=True)
    logits = model.extend(cache, token_ids, logits="all")
    expected = np.exp(smollm2.log_probs(logits[:-1])) @ table.reshape(len(table), -1)

    def plane(values: np.ndarray) -> np.ndarray:
        return values[:, 1:cache.length].swapaxes(0, 1).reshape(len(token_ids) - 1, -1)

    layers = [np.concatenate([plane(cache.k_before_rope[layer]), plane(cache.v[layer])], axis=1)
              for layer in range(model.config.layer_count)]
    for layer in range(1, len(layers)):
        rows = np.ones((len(token_ids) - 1, layout.total), np.float32)
        rows[:, layout.columns(_EXPECTED)] = expected
        rows[:, layout.columns(_FIRST)] = layers[0]
        rows[:, layout.columns(_TWO_BELOW)] = layers[max(layer - 2, 0)]
        rows[:, layout.columns(_BELOW)] = layers[layer - 1]
        rows[:, layout.columns(_K).start:] = layers[layer]
        yield rows


def moments(model: smollm2.SmolLM2, texts: Sequence[corpus.Text], what: str) -> np.ndarray:
    """[layers - 1, columns, columns] float64: sums of products over the rows of the texts' prefixes."""
    table = model.first_layer_kv()
    size = Layout(table.shape[2]).total
    sums = np.zeros((model.config.layer_count - 1, size, size))
    progress = workers.Progress(what, len(texts))
    for done, text in enumerate(texts, start=1):
        for layer, rows in enumerate(rows_of_text(model, table,
                                                  text.token_ids[:corpus.PREFIX_TOKENS])):
            sums[layer] += rows.T @ rows
        progress.show(done)
    progress.finish()
    return sums


def fit(sums: np.ndarray, features: np.ndarray, targets: np.ndarray, rank: int = 0) -> np.ndarray:
    """The matrix [features, targets] that predicts best, of a rank at most; the constant is feature 0.

    sums: [columns, columns] of products over rows. features, targets: columns.
    """
    count = sums[0, 0]
    inputs = features[1:]
    input_means, target_means = sums[0, inputs] / count, sums[0, targets] / count
    gram = sums[np.ix_(inputs, inputs)] - count * np.outer(input_means, input_means)
    gram[np.diag_indices(len(inputs))] += _RIDGE * np.trace(gram) / max(len(inputs), 1)
    cross = sums[np.ix_(inputs, targets)] - count * np.outer(input_means, target_means)
    weights = np.linalg.solve(gram, cross)
    if rank:
        # Predictions in their own principal components.
        predicted = weights.T @ cross
        vectors = np.linalg.eigh((predicted + predicted.T) / 2)[1][:, -rank:]
        weights = weights @ vectors @ vectors.T
    return np.concatenate([[target_means - input_means @ weights], weights])


def saved_bits(sums: np.ndarray, weights: np.ndarray, features: np.ndarray,
               targets: np.ndarray) -> float:
    """Bits per target that a code of high rate saves on the rows of `sums`."""
    count = sums[0, 0]
    mean = sums[0, targets] / count
    whole = sums[np.ix_(targets, targets)] / count - np.outer(mean, mean)
    cross = weights.T @ sums[np.ix_(features, targets)]
    left = (sums[np.ix_(targets, targets)] - cross - cross.T
            + weights.T @ sums[np.ix_(features, features)] @ weights) / count
    return float(np.linalg.slogdet(whole)[1] - np.linalg.slogdet(left)[1]) / (
        2 * len(targets) * np.log(2))


def table(fitted: np.ndarray, judged: np.ndarray, width: int) -> str:
    """A line per predictor: bits saved per component of K, of V, and of both."""
    layout = Layout(width)
    lines = [f"{'bits per component saved':38}{'K':>8}{'V':>8}{'both':>8}"]
    for predictor in PREDICTORS:
        saved = []
        for part in (_K, _V):
            parts = predictor.parts + ((_K,) if predictor.same_layer_k and part == _V else ())
            features = layout.select(parts)
            targets = np.arange(layout.columns(part).start, layout.columns(part).stop)
            saved.append(np.mean([
                saved_bits(judged[i], fit(fitted[i], features, targets,
                                          predictor.rank),
                           features, targets) for i in range(len(fitted))]))
        lines.append(f"{predictor.name:38}{saved[0]:8.3f}{saved[1]:8.3f}{np.mean(saved):8.3f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="predictors.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=4,
                        help="of each of the calibration domains, at most (default: 4)")
    options = parser.parse_args()
    start = time.monotonic()
    tokenizer = smollm2_tokenizer.SmolLM2Tokenizer()
    model = workers.model()
    calibration: dict[str, list[corpus.Text]] = {}
    for text in corpus.calibration_texts(tokenizer) + chat.chats(
            "chat-calibration", corpus.CALIBRATION_CHAT_SOURCES, corpus.CALIBRATION_CHATS,
            workers.model, print):
        calibration.setdefault(text.domain, []).append(text)
    fitted = moments(model, [text for texts in calibration.values()
                             for text in texts[:options.texts]], "calibration texts")
    tests = corpus.test_texts(tokenizer) + chat.chats(
        "chat-test", corpus.TEST_CHAT_SOURCES, corpus.TEST_CHATS, workers.model, print)
    judged = moments(model, [text for text in tests if text.domain in corpus.ENGLISH_DOMAINS],
                     "test texts")
    print(table(fitted, judged, model.config.kv_head_count * model.config.head_dim))
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
