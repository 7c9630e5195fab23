"""All schemes that can be judged, one line each.

A scheme is a picklable object: it restores, of a session whose KV is known, what is stored behind
`first_token`. What is restored is a bfloat16 cache again, whatever the scheme computes with.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import baselines
import codec_tool
import judge
import kv_files
import smollm2
import workers


# Errors' cost and tokens' importance, from gradients.
_MATERIAL = pathlib.Path(__file__).resolve().parents[2] / "model/fixtures/smollm2_fit_material.bin"
# Options of a fit whose profile codes faster, for more bits.
FAST = {"inputs": "below,first-layer,same-k"}


@dataclasses.dataclass(frozen=True)
class Restored:
    """kv: float32 of bfloat16 values [layers, 2, tokens from first_token on, KV heads, head_dim].

    byte_count: what was stored for these tokens.
    """

    kv: np.ndarray
    byte_count: int


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A code of baselines.py by name. first_exact: the session's first token is kept in 16 bits."""

    name: str
    family: str
    code: str
    code_arguments: tuple[int, ...] = ()
    first_exact: bool = False
    quick: bool = False  # judged with --quick
    sessions: bool = False  # measured over turns too
    ablation: bool = False
    compared_with: str = "kvtrie"
    against_float32: bool = False  # the reference is a cache that was never rounded

    def restore(self, token_ids: Sequence[int], kv: np.ndarray, first_token: int = 0) -> Restored:
        """Codes the tokens from first_token on by themselves."""
        del token_ids
        code = getattr(baselines, self.code)
        code = code(*self.code_arguments) if self.code_arguments else code
        if self.first_exact and first_token == 0:
            code = baselines.first_exact(code)
        restored, bits = code(kv[:, :, first_token:])
        return Restored(smollm2.round_to_bf16(restored), math.ceil(bits / 8))


@dataclasses.dataclass(frozen=True)
class Codec:
    """The store's codec at a quality level. fit, code: flags of `kvtrie profile`.

    material: what it is fitted with beside the calibration texts.
    """

    name: str
    family: str
    level: str
    fit: Mapping[str, object] = dataclasses.field(default_factory=dict)
    code: Mapping[str, object] = dataclasses.field(default_factory=dict)
    calibration: str = "all"  # a name of corpus.CALIBRATION_PARTS
    block_tokens: int = codec_tool.BLOCK_TOKENS
    by_surprisal: bool = False  # a token's importance is its surprisal: arXiv:2604.15356
    ablation: bool = False  # judged on fewer texts, and compared with its family at equal KL
    compared_with: str = ""  # the family that it is compared with
    quick: bool = False
    sessions: bool = False
    against_float32: bool = False
    material: pathlib.Path | None = _MATERIAL
    vocabulary: bool = True  # layer 0 of tokens that the texts lack is known
    profile: pathlib.Path | None = None  # set by fitted()

    def fitted(self, samples: pathlib.Path) -> "Codec":
        """This scheme with its profile. Errors: codec_tool.CodecToolError."""
        vocabulary = kv_files.vocabulary() if self.vocabulary else None
        profile = codec_tool.fit(kv_files.part(samples, self.calibration), self.fit, self.material, vocabulary)
        return dataclasses.replace(self, profile=profile)

    def restore(self, token_ids: Sequence[int], kv: np.ndarray, first_token: int = 0) -> Restored:
        """Codes the blocks from first_token on as a put of them into this session does: with the whole
        session known. REQUIRES: fitted; whole blocks."""
        importance = _relative_surprisal(tuple(token_ids)) if self.by_surprisal else None
        coded = codec_tool.code(self.profile, self.level, self.code, token_ids, kv,
                                self.block_tokens, importance)
        first_block = first_token // self.block_tokens
        return Restored(coded.kv[:, :, first_token:], sum(coded.block_bytes[first_block:]))


Scheme = Baseline | Codec


@functools.lru_cache(maxsize=4)
def _relative_surprisal(token_ids: tuple[int, ...]) -> np.ndarray:
    """[tokens]: the surprisal of each token by the model itself, 1 on average. The first has the mean."""
    model = workers.model()
    logits = model.extend(model.new_cache(len(token_ids)), token_ids, logits="all")
    said = judge.Distributions.of(logits)
    rows = np.arange(len(token_ids) - 1)
    surprisal = said.log_sums[:-1] - said.logits[rows, list(token_ids[1:])]
    # A token that was sure to come still costs something.
    surprisal = np.concatenate([[surprisal.mean()], surprisal + 0.05])
    return (surprisal / surprisal.mean()).astype(np.float32)


def _turboquant(k_bits: int, v_bits: int, first_exact: bool, **options: bool) -> Baseline:
    bits = f"{k_bits} bit" if k_bits == v_bits else f"K{k_bits}V{v_bits}"
    family = "TurboQuant, first exact" if first_exact else "TurboQuant"
    name = f"TurboQuant {bits}" + (" first exact" if first_exact else "")
    return Baseline(name, family, "turboquant", (k_bits, v_bits), first_exact, **options)


def _ablations() -> Iterator[Codec]:
    """What each part of the codec brings. All but the sizes of blocks are fitted to fewer texts."""
    for block_tokens in (64, 256):
        yield Codec(f"blocks of {block_tokens}", "kvtrie, blocks", "high",
                    block_tokens=block_tokens, ablation=True, compared_with="kvtrie")
    base = "kvtrie, fewer texts"
    common = {"calibration": "quarter", "ablation": True, "compared_with": base}
    for level in ("near-exact", "high", "small"):
        yield Codec(f"fewer texts {level}", base, level, **common)
    for name, fit in (
            ("no prediction", {"inputs": ""}),
            ("K for V only", {"inputs": "same-k"}),
            ("layer 0 and K for V only", {"inputs": "first-layer,same-k"}),
            ("one layer below", {"inputs": "below,first-layer,same-k"}),
            ("not from layer 0", {"inputs": "below,two-below,same-k"}),
            ("not from K for V", {"inputs": "below,two-below,first-layer"}),
            ("matrices per head", {"heads": True}),
            ("no token table", {"table": 0}),
            ("variances as metric", {"no-metric": True, "high": 1.2}),
            ("metric without shrinkage", {"shrinkage": 0}),
            ("all tokens alike", {"importance": 0}),
            ("no energy contexts", {"energy-prior": 65535, "energy-carried": 0}),
            ("plain rounding", {"rate-weight": 0}),
            ("fast", FAST)):
        yield Codec(name, "kvtrie, ablations", "high", fit=fit, **common)
    yield Codec("table of the texts' tokens", "kvtrie, ablations", "high", vocabulary=False, **common)
    yield Codec("importance is surprisal", "kvtrie, ablations", "high", by_surprisal=True, **common)
    for level in ("near-exact", "high", "small"):
        yield Codec(f"prose only {level}", "kvtrie, prose only", level,
                    **(common | {"calibration": "prose"}))


SCHEMES: tuple[Scheme, ...] = (
    Baseline("raw bf16", "float", "bf16", against_float32=True),
    Baseline("fp8 e4m3", "float", "fp8_e4m3", quick=True, sessions=True),
    Baseline("q8_0", "ggml", "q8_0"),
    Baseline("q4_0", "ggml", "q4_0", quick=True),
    Baseline("KIVI-like 4 bit", "KIVI-like", "kivi_like", (4,), quick=True, sessions=True),
    Baseline("KIVI-like 3 bit", "KIVI-like", "kivi_like", (3,)),
    Baseline("KIVI-like 2 bit", "KIVI-like", "kivi_like", (2,)),
    _turboquant(5, 5, False),
    _turboquant(4, 4, False, quick=True),
    _turboquant(3, 3, False, quick=True),
    _turboquant(2, 2, False),
    _turboquant(5, 5, True),
    _turboquant(5, 4, True),
    _turboquant(4, 4, True, sessions=True),
    _turboquant(4, 3, True),
    _turboquant(3, 3, True),
    _turboquant(2, 2, True),
    Codec("kvtrie exact", "kvtrie", "exact"),
    Codec("kvtrie near-exact", "kvtrie", "near-exact", sessions=True),
    Codec("kvtrie high", "kvtrie", "high", quick=True, sessions=True),
    Codec("kvtrie small", "kvtrie", "small", quick=True, sessions=True),
    *_ablations(),
)
