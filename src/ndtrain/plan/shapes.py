"""Every parameter of a model: its name, its shape and how tensor parallelism splits it.

Computed from the sizes alone; a test holds it against the parameters transformers builds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from ndtrain.plan.facts import ModelFacts

TpStyle = Literal["whole", "colwise", "rowwise", "vocab", "kv"]
"""colwise splits the output dim, rowwise the input dim, vocab the rows of the embedding or head;
kv is colwise where the key/value heads divide and whole where they do not; whole is never split."""


@dataclass(frozen=True)
class ParamShape:
    """One parameter.

    Attributes:
        tp_dim: dim that tensor parallelism splits; meaningless for the style `whole`.
        group: what it belongs to: embedding, head, norm or the number of its layer.
    """

    name: str
    shape: tuple[int, ...]
    style: TpStyle = "whole"
    tp_dim: int = 0
    group: str | int = "norm"

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)


def model_parameters(facts: ModelFacts) -> tuple[ParamShape, ...]:
    """All parameters in the order of the model; tied embeddings are listed once."""
    size = (facts.vocab_size, facts.hidden_size)
    rows = [ParamShape("model.embed_tokens.weight", size, "vocab", 0, "embedding")]
    for layer in range(facts.num_layers):
        rows.extend(layer_parameters(facts, layer))
    rows.append(ParamShape("model.norm.weight", (facts.hidden_size,), group="norm"))
    if not facts.tied_embeddings:
        rows.append(ParamShape("lm_head.weight", size, "vocab", 0, "head"))
    return tuple(rows)


def layer_parameters(facts: ModelFacts, layer: int) -> Iterator[ParamShape]:
    """The parameters of one block."""
    prefix = f"model.layers.{layer}."
    parts = _latent_attention(facts) if facts.kv_lora_rank else _attention(facts)
    is_moe = bool(facts.num_experts) and layer >= facts.num_dense_layers
    for name, shape, style, dim in (*parts, *(_experts(facts) if is_moe else _mlp(facts))):
        yield ParamShape(prefix + name, shape, style, dim, layer)
    for norm in facts.family.norms:
        yield ParamShape(f"{prefix}{norm}.weight", (facts.hidden_size,), group=layer)


_Part = tuple[str, tuple[int, ...], TpStyle, int]


def _linear(name: str, out: int, into: int, style: TpStyle, bias: bool) -> Iterator[_Part]:
    """A linear's weight [out, in] and its bias, which is whole unless the output is split."""
    yield f"{name}.weight", (out, into), style, 1 if style == "rowwise" else 0
    if bias:
        yield f"{name}.bias", (out,), "whole" if style == "rowwise" else style, 0


def _attention(facts: ModelFacts) -> Iterator[_Part]:
    family, hidden, bias = facts.family, facts.hidden_size, facts.attention_bias
    q, kv = facts.q_size, facts.kv_size
    split = family.tp_attention != "none"
    col: TpStyle = "colwise" if split else "whole"
    key: TpStyle = "kv" if family.tp_attention == "heads" else col
    if family.fused_qkv:
        yield from _linear("self_attn.qkv_proj", q + 2 * kv, hidden, col, bias)
    else:
        yield from _linear("self_attn.q_proj", q, hidden, col, bias)
        yield from _linear("self_attn.k_proj", kv, hidden, key, bias)
        yield from _linear("self_attn.v_proj", kv, hidden, key, bias)
    row: TpStyle = "rowwise" if split else "whole"
    yield from _linear("self_attn.o_proj", hidden, q, row, bias and family.o_bias)
    if family.qk_norm == "head":
        yield "self_attn.q_norm.weight", (facts.head_dim,), "whole", 0
        yield "self_attn.k_norm.weight", (facts.head_dim,), "whole", 0
    if family.qk_norm == "full":
        yield "self_attn.q_norm.weight", (q,), "whole", 0
        yield "self_attn.k_norm.weight", (kv,), "whole", 0
    if facts.sinks:
        yield "self_attn.sinks", (facts.num_heads,), "whole", 0


def _latent_attention(facts: ModelFacts) -> Iterator[_Part]:
    """Latent attention (MLA): queries, keys and values pass a low-rank bottleneck."""
    hidden, heads, bias = facts.hidden_size, facts.num_heads, facts.attention_bias
    query_in = hidden
    if facts.q_lora_rank:
        query_in = facts.q_lora_rank
        yield from _linear("self_attn.q_a_proj", query_in, hidden, "whole", bias)
        yield "self_attn.q_a_layernorm.weight", (query_in,), "whole", 0
    name = "q_b_proj" if facts.q_lora_rank else "q_proj"
    yield from _linear(f"self_attn.{name}", facts.q_size, query_in, "whole", False)
    rank = facts.kv_lora_rank
    into_latent = rank + facts.rope_head_dim
    yield from _linear("self_attn.kv_a_proj_with_mqa", into_latent, hidden, "whole", bias)
    yield "self_attn.kv_a_layernorm.weight", (rank,), "whole", 0
    out = heads * (facts.head_dim - facts.rope_head_dim + facts.value_head_dim)
    yield from _linear("self_attn.kv_b_proj", out, rank, "whole", False)
    yield from _linear("self_attn.o_proj", hidden, heads * facts.value_head_dim, "whole", bias)


def _gated(prefix: str, facts: ModelFacts, size: int, *, fused: bool) -> Iterator[_Part]:
    split = facts.family.tp_mlp
    col: TpStyle = "colwise" if split else "whole"
    hidden, bias = facts.hidden_size, facts.mlp_bias
    if fused:
        yield from _linear(f"{prefix}.gate_up_proj", 2 * size, hidden, col, bias)
    else:
        yield from _linear(f"{prefix}.gate_proj", size, hidden, col, bias)
        yield from _linear(f"{prefix}.up_proj", size, hidden, col, bias)
    yield from _linear(f"{prefix}.down_proj", hidden, size, "rowwise" if split else "whole", bias)


def _mlp(facts: ModelFacts) -> Iterator[_Part]:
    fused = facts.family.fused_gate_up
    yield from _gated("mlp", facts, facts.intermediate_size, fused=fused)


def _experts(facts: ModelFacts) -> Iterator[_Part]:
    """Router and experts; the experts of a layer are one tensor [experts, out, in]."""
    hidden, size, count = facts.hidden_size, facts.expert_intermediate_size, facts.num_experts
    split = facts.family.tp_mlp
    col: TpStyle = "colwise" if split else "whole"
    row: TpStyle = "rowwise" if split else "whole"
    turned = facts.family.experts_transposed
    up = (count, hidden, 2 * size) if turned else (count, 2 * size, hidden)
    down = (count, size, hidden) if turned else (count, hidden, size)
    yield "mlp.experts.gate_up_proj", up, col, 2 if turned else 1
    yield "mlp.experts.down_proj", down, row, 1 if turned else 2
    router = "mlp.router" if turned else "mlp.gate"
    yield f"{router}.weight", (count, hidden), "whole", 0
    if turned:
        yield f"{router}.bias", (count,), "whole", 0
        yield "mlp.experts.gate_up_proj_bias", (count, 2 * size), "whole", 0
        yield "mlp.experts.down_proj_bias", (count, hidden), "whole", 0
    if facts.shared_expert_size:
        yield from _gated("mlp.shared_experts", facts, facts.shared_expert_size, fused=False)


def count_parameters(facts: ModelFacts) -> int:
    """Number of parameters, tied embeddings counted once."""
    hidden, vocab = facts.hidden_size, facts.vocab_size
    total = vocab * hidden * (1 if facts.tied_embeddings else 2) + hidden
    for layer, count in kinds_of_layers(facts):
        total += count * sum(part.numel for part in layer_parameters(facts, layer))
    return total


def lora_parameters(facts: ModelFacts, rank: int, *, targets: tuple[str, ...] | None = None) -> int:
    """Parameters of adapters of `rank` on the named linears, by default all except the head."""
    total = 0
    for layer, count in kinds_of_layers(facts):
        for part in layer_parameters(facts, layer):
            name = part.name.removesuffix(".weight")
            chosen = targets is None or name.rsplit(".", 1)[-1] in targets
            if part.name.endswith("_proj.weight") and chosen:
                total += count * rank * sum(part.shape)
    return total


def kinds_of_layers(facts: ModelFacts) -> Iterator[tuple[int, int]]:
    """One layer of each kind and how many there are of it."""
    dense = facts.num_layers - facts.num_moe_layers
    if dense:
        yield 0, dense
    if facts.num_moe_layers:
        yield facts.num_layers - 1, facts.num_moe_layers
