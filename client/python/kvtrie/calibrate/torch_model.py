"""A causal language model of transformers, as calibration sees it: the only module that needs torch.

K "as coded" is K before RoPE where the codec knows how it was turned (no scaling rule), and as it is elsewhere.
Planes are K, V of layer 0, K, V of layer 1, ...
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import torch
import transformers

from kvtrie.calibrate.model_spec import Geometry
from kvtrie.errors import KvtrieError

# The first tokens of a session, which all later ones attend to whatever they are, are outliers.
_GRADIENTS_FROM = 8
_QUERIES_FROM = 16
# Of K that is turned back, against K that never was: rounding of cosines in the model's own type.
_TURN_TOLERANCE = 2e-2
_TOKENS_AT_ONCE = 512  # of the vocabulary

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Computed:
    """Of one sample's prefix. kv: raw bytes. importance: f32 [plane][KV head][token], or none.

    sums: what the sample adds to metrics.query_statistics, from_gradients or without_gradients.
    """

    kv: bytes
    importance: np.ndarray | None
    sums: dict[str, np.ndarray]


class Model:
    """Single owner; not thread-safe."""

    def __init__(self, model_dir: pathlib.Path, geometry: Geometry, dtype: str, device: str):
        """Errors: KvtrieError when it cannot be loaded, or is not built as this module assumes."""
        transformers.utils.logging.disable_progress_bar()
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                model_dir, local_files_only=True, attn_implementation="sdpa",
                **{_dtype_argument(): _TORCH_DTYPES[dtype]}).to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise KvtrieError(f"{model_dir}: cannot be loaded: {error}") from error
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        self._device = device
        self._geometry = geometry
        self._attentions = self._find_attentions()
        self._turned = geometry.rope_scaling == ""
        self._queries: dict[int, torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}
        for layer, attention in enumerate(self._attentions):
            # Some models normalize queries and keys on their way to RoPE.
            for kept, names in ((self._queries, ("q_norm", "q_proj")), (self._keys, ("k_norm", "k_proj"))):
                module = next(getattr(attention, name) for name in names if hasattr(attention, name))
                module.register_forward_hook(_keep(kept, layer))
        self._check_turn()

    def compute(self, token_ids: tuple[int, ...], prefix_tokens: int, draws: int, seed: int) -> Computed:
        """KV and statistics of the first prefix_tokens.

        draws: of labels that the model itself gives to the continuation, whose loss is derived by the
        prefix's K and V; the mean over draws of g g^T is Fisher's information. 0: no gradients.
        """
        cache, sums = self._prefill(token_ids[:prefix_tokens])
        kv = self._raw(cache)
        if draws == 0:
            return Computed(kv, None, sums)
        importance, outer, count = self._gradients(kv, token_ids, prefix_tokens, draws, seed)
        sums["gradient_outer"], sums["gradient_count"] = outer, np.float64(count)
        return Computed(kv, importance, sums)

    @property
    def vocabulary_tokens(self) -> int:
        return self._model.get_input_embeddings().num_embeddings

    def first_layer(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """f32 [token][K as coded, V][KV head][dim] of layer 0, which depends on the token alone.

        None where K as coded depends on positions too.
        """
        if not self._turned:
            return None
        rows = []
        for first in range(0, len(token_ids), _TOKENS_AT_ONCE):
            cache = transformers.DynamicCache()
            # Sessions of one token: at position 0 RoPE turns nothing.
            sessions = torch.tensor(token_ids[first:first + _TOKENS_AT_ONCE], device=self._device)[:, None]
            with torch.no_grad():
                self._model(sessions, past_key_values=cache, use_cache=True, logits_to_keep=1)
            rows.append(torch.stack([part[:, :, 0] for part in _layer_of(cache, 0)], 1).float().cpu().numpy())
        return np.concatenate(rows)

    def prefill(self, token_ids: tuple[int, ...]) -> bytes:
        """Raw KV of these tokens."""
        return self._raw(self._prefill(token_ids)[0])

    def log_probabilities(self, kv: bytes, token_ids: tuple[int, ...]) -> torch.Tensor:
        """f32 [token][vocabulary] of what follows each of these tokens, teacher-forced behind raw KV."""
        with torch.no_grad():
            logits = self._continue(self._cache_of(self._planes(kv).flatten(0, 1)), token_ids)
            return torch.log_softmax(logits.float(), -1)

    def output_weights(self) -> np.ndarray:
        """f32 [layer][query head][hidden][dim] of the output projections."""
        geometry = self._geometry
        return np.stack([
            attention.o_proj.weight.detach().float().cpu().numpy()
            .reshape(-1, geometry.query_heads, geometry.head_dim).swapaxes(0, 1)
            for attention in self._attentions])

    def rope_frequencies(self) -> np.ndarray | None:
        """Radians per token of each pair; None where K as coded is K as it is."""
        if not self._turned:
            return None
        pairs = self._geometry.rotary_dims // 2
        return self._geometry.rope_theta ** -(np.arange(pairs) / pairs)

    def _find_attentions(self) -> list:
        found = [module for _, module in self._model.named_modules()
                 if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))]
        if len(found) != self._geometry.layers:
            raise KvtrieError(f"{type(self._model).__name__}: {len(found)} of {self._geometry.layers} layers have an "
                              "attention with q_proj, k_proj, v_proj and o_proj; only models of the kind of Llama, "
                              "SmolLM2, Qwen2 and Mistral are supported")
        return found

    def _check_turn(self) -> None:
        """That K in the cache, turned back, is the K that came out of the projection.

        So pairing, theta and rotary dimensions of the spec are those of the model.
        """
        token_ids = tuple(range(2, 34))
        cache, _ = self._prefill(token_ids)
        geometry = self._geometry
        shape = (geometry.kv_heads, len(token_ids), geometry.head_dim)
        for layer in range(geometry.layers):
            keys, values = _layer_of(cache, layer)
            if keys.shape[1:] != shape or values.shape[1:] != shape:
                raise KvtrieError(f"layer {layer}: KV of shape {tuple(keys.shape[1:])}, {tuple(values.shape[1:])}, and "
                                  f"config.json says {shape}: [KV head][token][dim]")
            if not self._turned:
                continue
            before = self._heads(self._keys[layer], geometry.kv_heads).float()
            error = (self._turn_back(keys[0].float()) - before).norm() / before.norm()
            if not error < _TURN_TOLERANCE:
                raise KvtrieError(f"layer {layer}: K is not turned by RoPE of theta {geometry.rope_theta:g} over "
                                  f"{geometry.rotary_dims} dimensions, half-split: it differs by {error:.3f} of its "
                                  "size; this kind of model is not supported")

    def _prefill(self, token_ids: tuple[int, ...]):
        """The cache of a prefix, and the sums of what needs no gradients."""
        cache = transformers.DynamicCache()
        with torch.no_grad():
            streams = self._model(torch.tensor([token_ids], device=self._device), past_key_values=cache,
                                  use_cache=True, output_hidden_states=True, logits_to_keep=1).hidden_states
        # Behind each layer. That behind the last is given after the final norm, which is another size.
        streams = [*streams[1:-1], streams[-2]]
        geometry = self._geometry
        start = min(_QUERIES_FROM, len(token_ids) // 2)
        count = np.float64(len(token_ids) - start)
        sums = {"query_count": count, "value_count": count, "stream_count": count}
        positions = torch.arange(len(token_ids), device=self._device)
        parts: dict[str, list] = {}
        for layer in range(geometry.layers):
            queries = self._heads(self._queries[layer], geometry.query_heads).float()
            if not self._turned:
                queries = self._model_turn(queries, positions)
            queries = queries[:, start:]
            values = _layer_of(cache, layer)[1][0].float()[:, start:]
            for name, value in (("query_sum", queries.sum(1)), ("query_outer", queries.mT @ queries),
                                ("value_sum", values.sum(1)), ("value_outer", values.mT @ values),
                                ("stream_square", streams[layer][0, start:].float().square().sum())):
                parts.setdefault(name, []).append(value)
        sums |= {name: torch.stack(values).cpu().numpy() for name, values in parts.items()}
        return cache, sums

    def _gradients(self, kv: bytes, token_ids: tuple[int, ...], prefix_tokens: int, draws: int, seed: int):
        """Of the continuation's loss by the prefix's K as coded, and V.

        The cache is what is varied, and nothing that was computed from it before: so it is with what is stored.
        """
        geometry = self._geometry
        # Apart, because the derivative of a slice is as large as all of it.
        planes = [plane.clone().requires_grad_(True) for plane in self._planes(kv).flatten(0, 1)]
        logits = self._continue(self._cache_of(planes), token_ids[prefix_tokens:])
        log_probabilities = torch.log_softmax(logits.float(), -1)
        generator = torch.Generator(self._device).manual_seed(seed)
        importance = torch.zeros(2 * geometry.layers, geometry.kv_heads, prefix_tokens, device=self._device)
        outer = torch.zeros(2 * geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_dim,
                            device=self._device)
        for draw in range(draws):
            labels = torch.multinomial(log_probabilities.detach().exp(), 1, generator=generator)
            loss = -log_probabilities.gather(1, labels).sum()
            gradients = torch.autograd.grad(loss, planes, retain_graph=draw + 1 < draws)
            for plane, gradient in enumerate(gradients):
                gradient = gradient.float()  # [head][token][dim]
                if self._turned and plane % 2 == 0:
                    gradient = self._turn_back(gradient)
                importance[plane] += gradient.square().sum(-1) / draws
                counted = gradient[:, min(_GRADIENTS_FROM, prefix_tokens // 2):]
                outer[plane] += counted.mT @ counted / draws
        count = prefix_tokens - min(_GRADIENTS_FROM, prefix_tokens // 2)
        return importance.cpu().numpy(), outer.cpu().numpy(), count

    def _continue(self, cache, token_ids: tuple[int, ...]):
        """Logits [token][vocabulary]."""
        start = cache.get_seq_length()
        positions = torch.arange(start, start + len(token_ids), device=self._device)
        return self._model(torch.tensor([token_ids], device=self._device), past_key_values=cache,
                           position_ids=positions[None], use_cache=True).logits[0]

    def _planes(self, kv: bytes) -> torch.Tensor:
        """[layer][K, V][KV head][token][dim] in the model's type, of raw KV."""
        geometry = self._geometry
        raw = torch.frombuffer(bytearray(kv), dtype=_TORCH_DTYPES[geometry.dtype])
        raw = raw.view(geometry.layers, 2, -1, geometry.kv_heads, geometry.head_dim)
        return raw.transpose(2, 3).to(self._device, self._model.dtype)

    def _cache_of(self, planes):
        """Of planes, each [KV head][token][dim]."""
        cache = transformers.DynamicCache()
        for layer in range(self._geometry.layers):
            cache.update(planes[2 * layer][None], planes[2 * layer + 1][None], layer)
        return cache

    def _raw(self, cache) -> bytes:
        planes = torch.stack([torch.stack([part[0] for part in _layer_of(cache, layer)])
                              for layer in range(self._geometry.layers)])
        raw = planes.transpose(2, 3).to("cpu", _TORCH_DTYPES[self._geometry.dtype]).contiguous()
        return raw.view(torch.uint8).numpy().tobytes()

    def _heads(self, projected: torch.Tensor, heads: int) -> torch.Tensor:
        """[head][token][dim] of a projection's output, which is [1][token][head * dim] or has its heads apart."""
        return projected.reshape(-1, heads, self._geometry.head_dim).transpose(0, 1)

    def _turn_back(self, x: torch.Tensor) -> torch.Tensor:
        """[...][token][dim] from position 0 on: K before RoPE, of half-split pairs."""
        pairs = self._geometry.rotary_dims // 2
        frequencies = torch.tensor(self.rope_frequencies(), device=x.device)
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
        cosines, sines = angles.cos().float(), angles.sin().float()
        first, other, rest = x[..., :pairs], x[..., pairs:2 * pairs], x[..., 2 * pairs:]
        return torch.cat([first * cosines + other * sines, other * cosines - first * sines, rest], -1)

    def _model_turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[head][token][dim] turned as the model does with its scaling rule."""
        rotary = next((module for name, module in self._model.named_modules() if name.endswith("rotary_emb")), None)
        if rotary is None:
            raise KvtrieError("the model has no module rotary_emb: this kind of model is not supported")
        cosines, sines = (table[0].float() for table in rotary(x[None], positions[None]))
        pairs = cosines.shape[-1] // 2
        turned, rest = x[..., :2 * pairs], x[..., 2 * pairs:]
        quarter = torch.cat([-turned[..., pairs:], turned[..., :pairs]], -1)
        return torch.cat([turned * cosines + quarter * sines, rest], -1)


def load_tokenizer(model_dir: pathlib.Path):
    """Errors: KvtrieError."""
    try:
        return transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise KvtrieError(f"{model_dir}: its tokenizer cannot be loaded: {error}") from error


def divergence(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """KL of the candidate from the reference in nat, float64 [token], and whether the likeliest token is the same.

    Both: log probabilities [token][vocabulary].
    """
    kl = (reference.double().exp() * (reference.double() - candidate.double())).sum(-1)
    return kl.cpu().numpy(), (reference.argmax(-1) == candidate.argmax(-1)).cpu().numpy()


def _keep(kept: dict, layer: int):
    def hook(_module, _inputs, output):
        kept[layer] = output.detach()
    return hook


def _layer_of(cache, layer: int):
    """K and V, [1][KV head][token][dim]."""
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


def _dtype_argument() -> str:
    return "dtype" if int(transformers.__version__.split(".", maxsplit=1)[0]) >= 5 else "torch_dtype"
