"""What decides the work of coding and of computing KV: a model's shape, and how its profile cuts planes.

All of it is for one token of one tensor parallel rank, unless said.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a model's KV, and what its forward pass reads for a token."""

    name: str
    layers: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int  # 0: one latent instead of K and V
    query_heads: int
    rope: bool  # whether K is turned before it is coded
    active_weights: float  # of the matrices that a token goes through, without embedding and output head
    all_weights: float  # the same of all experts
    attention_macs: float  # for each position that the token sees, in all layers
    per_head: bool = False  # matrices join components of one KV head only
    inputs: int = 4  # the first so many of: layer below, the one below that, layer 0, K for V
    source: str = ""  # where the numbers are from

    @property
    def planes(self) -> list[int]:
        """Components of each plane, in order."""
        kinds = [self.kv_heads * dim for dim in (self.k_head_dim, self.v_head_dim) if dim > 0]
        return kinds * self.layers

    @property
    def components(self) -> int:
        return sum(self.planes)

    @property
    def blocks(self) -> int:
        """Of a plane."""
        return self.kv_heads if self.per_head else 1

    def input_components(self, plane: int) -> int:
        """What a plane is predicted from."""
        kinds = 2 if self.v_head_dim > 0 else 1
        layer, is_v = divmod(plane, kinds)
        # Near the bottom, layer 0 is one of those below; it is read once.
        layers = {layer - n for n in (1, 2)[:self.inputs]} | ({0} if self.inputs >= 3 else set())
        inputs = sum(self.planes[:kinds]) * len([n for n in layers if 0 <= n < layer])
        # A layer of the bottom reads nothing, not even its own K.
        return inputs + (self.planes[plane - 1] if is_v and self.inputs >= 4 and layer > 0 else 0)

    def forward_flops(self, position: float) -> float:
        """Of a token's forward pass. position: how many tokens it sees."""
        return 2 * self.active_weights + 2 * self.attention_macs * position


def dense(name: str, hidden: int, intermediate: int, layers: int, query_heads: int, kv_heads: int, head_dim: int,
          tensor_parallel: int = 1, **more) -> Shape:
    """A decoder whose layers have Q, K, V, output, and three matrices of a gated feed-forward part."""
    attention = hidden * head_dim * 2 * (query_heads + kv_heads)
    weights = layers * (attention + 3 * hidden * intermediate) / tensor_parallel
    return Shape(name, layers, kv_heads // tensor_parallel, head_dim, head_dim, query_heads // tensor_parallel, True,
                 weights, weights, layers * query_heads * 2 * head_dim / tensor_parallel, **more)


def _deepseek_v3() -> Shape:
    """Of its config.json: kv_lora_rank and qk_rope_head_dim make the latent, num_experts_per_tok of n_routed_experts
    and n_shared_experts are active, the first_k_dense_replace layers have none. As in RESIDUAL.md, what of the latent
    RoPE turned is not turned back."""
    hidden, layers, heads, q_rank, kv_rank, nope, rope, v = 7168, 61, 128, 1536, 512, 128, 64, 128
    attention = (hidden * q_rank + q_rank * heads * (nope + rope) + hidden * (kv_rank + rope)
                 + kv_rank * heads * (nope + v) + heads * v * hidden)
    dense_layers, intermediate, expert, routed, chosen, shared = 3, 18432, 2048, 256, 8, 1
    common = (layers * attention + dense_layers * 3 * hidden * intermediate
              + (layers - dense_layers) * (hidden * routed + shared * 3 * hidden * expert))
    one_of_each_layer = (layers - dense_layers) * 3 * hidden * expert
    return Shape("DeepSeek-V3", layers, 1, kv_rank + rope, 0, heads, False, common + chosen * one_of_each_layer,
                 common + routed * one_of_each_layer,
                 layers * heads * (nope + rope + v),
                 source="deepseek-ai/DeepSeek-V3")


# Planes of more than 576 components are cut by heads: their matrices grow with the square.
PUBLIC = (
    dense("SmolLM2-135M", 576, 1536, 30, 9, 3, 64, source="HuggingFaceTB/SmolLM2-135M"),
    dense("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, per_head=True, source="meta-llama/Llama-3.1-8B"),
    dense("Llama-3.1-70B, TP 4", 8192, 28672, 80, 64, 8, 128, tensor_parallel=4, source="meta-llama/Llama-3.1-70B"),
    dense("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, source="Qwen/Qwen2.5-7B"),
    _deepseek_v3(),
)


@dataclasses.dataclass(frozen=True)
class Shares:
    """What the KV and the level decide: of components, the values that are coded and those that are not zero;
    of coded values, steps of the entropy coder."""

    coded: float
    nonzero: float
    steps: float


def operations(shape: Shape, shares: Shares) -> dict[str, float]:
    """Per token; the names are those of codec_costs_bench."""
    found = dict.fromkeys(
        ("components", "rope_components", "predict_macs", "input_codes", "predict_products", "analyze_macs",
         "coded_values", "entropy_steps", "nonzero_values", "add_macs", "importance_macs", "importance_scores",
         "importance_features"), 0.0)
    planes = shape.planes
    for plane, components in enumerate(planes):
        inputs = shape.input_components(plane)
        is_k = shape.v_head_dim == 0 or plane % 2 == 0
        found["components"] += components
        found["rope_components"] += components if is_k and shape.rope else 0
        found["predict_macs"] += components * inputs / shape.blocks
        found["input_codes"] += inputs
        found["predict_products"] += components if inputs else 0
        found["analyze_macs"] += components * components / shape.blocks
        found["add_macs"] += shares.nonzero * components * components / shape.blocks
        if is_k:
            # importance.h: at 5 distances, each query head's mean and 8 factors of its covariance.
            found["importance_scores"] += 5 * shape.query_heads
            found["importance_macs"] += 5 * shape.query_heads * (1 + 8) * shape.k_head_dim
    found["coded_values"] = shares.coded * found["components"]
    found["nonzero_values"] = shares.nonzero * found["components"]
    found["entropy_steps"] = shares.steps * found["coded_values"]
    heads = shape.kv_heads
    found["importance_features"] = len(planes) * (22 * (1 + heads) + 3)
    return found


def matrix_bytes(shape: Shape) -> dict[str, float]:
    """What a batch reads of the profile, as it lies in memory: int8 weights, float32 of the others."""
    found = operations(shape, Shares(1, 1, 1))
    return {"weights": found["predict_macs"], "basis": 4 * found["analyze_macs"],
            "analysis": 4 * found["analyze_macs"]}
