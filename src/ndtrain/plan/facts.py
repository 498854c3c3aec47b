"""Sizes of a model, read from its configuration alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndtrain.errors import MeshError
from ndtrain.plan.families import BASE_DEFAULTS, FAMILIES, Family
from ndtrain.plan.mixing import mixing_layers


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs to know of a model; from `config.json`, a GGUF header or the book.

    Attributes:
        name: what the recipe calls it.
        source: where the sizes come from: `folder`, `cache`, `gguf`, `recipe` or `book`.
        model_type: transformers' architecture word, e.g. `llama`.
        intermediate_size: width of a dense feed-forward part.
        sliding_window: tokens of the local attention window, None when no layer has one.
        num_window_layers: layers that have the window.
        num_experts: experts of a mixture layer, 0 for a dense model.
        num_dense_layers: first layers of a mixture model that have a dense feed-forward part.
        shared_expert_size: width of the experts every token passes, 0 when there is none.
        q_lora_rank: rank of the compressed queries of latent attention, 0 when they are whole.
        kv_lora_rank: rank of the compressed keys and values, 0 without latent attention.
        rope_head_dim: part of a latent attention head that carries positions.
        value_head_dim: size of a value head; equal to `head_dim` without latent attention.
        mixing: what lets tokens meet outside attention, in words; empty for attention alone.
    """

    name: str
    source: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int | None = None
    sliding_window: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    softcap: bool = False
    sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    num_window_layers: int = 0
    num_dense_layers: int = 0
    shared_expert_size: int = 0
    mlp_bias: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0
    mixing: str = ""

    @property
    def family(self) -> Family:
        """How the blocks are built; an unknown architecture is taken to be like llama."""
        return FAMILIES.get(self.model_type, FAMILIES["llama"])

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0


def facts_from_config(config: Mapping[str, Any], *, name: str, source: str) -> ModelFacts:
    """The sizes that a transformers configuration states or implies.

    Keys that it leaves out take the architecture's own defaults. A multimodal configuration is
    read through its `text_config`.

    Raises:
        MeshError: the configuration names no architecture, or a size is not a whole number.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        merged = {"tie_word_embeddings": config.get("tie_word_embeddings"), **nested}
        config = {key: value for key, value in merged.items() if value is not None}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise MeshError(
            f"the configuration of '{name}' names no model_type.",
            where=name,
            hint="Add the architecture word, e.g. model_type: llama.",
        )
    family = FAMILIES.get(model_type, FAMILIES["llama"])
    values = {**BASE_DEFAULTS, **family.defaults}
    # A null means "left out" for every size except the window, where it says there is none.
    values |= {k: v for k, v in config.items() if v is not None or k == "sliding_window"}
    reader = _Reader(values, name)

    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    layers = reader.size("num_hidden_layers")
    head_dim = reader.size("head_dim", hidden // heads)
    value_dim = head_dim
    if family.mla:
        head_dim = reader.size("qk_nope_head_dim") + reader.size("qk_rope_head_dim")
        value_dim = reader.size("v_head_dim")
    experts = reader.size("num_local_experts", reader.size("num_experts", 0))
    experts = reader.size("n_routed_experts", experts)
    expert_size = reader.size("moe_intermediate_size", reader.size("intermediate_size"))
    window = values.get("sliding_window")
    window_layers = _window_layers(values, family, layers) if window else 0
    bias = bool(values["attention_bias"]) if family.qkv_bias is None else family.qkv_bias
    return ModelFacts(
        name=name,
        source=source,
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=reader.size("vocab_size"),
        tied_embeddings=bool(values["tie_word_embeddings"]),
        max_positions=values.get("max_position_embeddings"),
        sliding_window=window if window_layers else None,
        num_window_layers=window_layers,
        qk_norm=family.qk_norm != "none",
        attention_bias=bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        softcap=values.get("attn_logit_softcapping") is not None,
        sinks=family.sinks,
        num_experts=experts,
        experts_per_token=reader.size("num_experts_per_tok", 1) if experts else 0,
        expert_intermediate_size=expert_size if experts else 0,
        num_dense_layers=_dense_layers(values, layers) if experts else 0,
        shared_expert_size=(expert_size * reader.size("n_shared_experts", 0)) if experts else 0,
        q_lora_rank=reader.size("q_lora_rank", 0) if family.mla else 0,
        kv_lora_rank=reader.size("kv_lora_rank") if family.mla else 0,
        rope_head_dim=reader.size("qk_rope_head_dim") if family.mla else 0,
        value_head_dim=value_dim,
        mixing="" if model_type in FAMILIES else mixing_layers(config),
    )


class _Reader:
    """Whole numbers out of a configuration, with an error that names the key."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self._name = name

    def size(self, key: str, default: int | None = None) -> int:
        """The value of `key`, else `default`; 0 is a size only where it is the default."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (default != 0):
            above = "" if default == 0 else " above 0"
            raise MeshError(
                f"{key} of '{self._name}' is '{value}', not a whole number{above}.",
                where=self._name,
                hint="Correct the model's configuration.",
            )
        return value


def _window_layers(values: Mapping[str, Any], family: Family, layers: int) -> int:
    """How many layers see only the local window."""
    kinds = values.get("layer_types")
    if isinstance(kinds, list | tuple):
        return sum(kind == "sliding_attention" for kind in kinds[:layers])
    if family.window_switch is not None and not values.get(family.window_switch, False):
        return 0
    if family.window_from == "max_window_layers":
        return max(0, layers - int(values.get("max_window_layers", 28)))
    if family.window_from == "no_rope":
        return layers // int(values.get("no_rope_layer_interval", 4))
    every = int(values.get("sliding_window_pattern") or family.window_every)
    return layers - layers // every if every else layers


def _dense_layers(values: Mapping[str, Any], layers: int) -> int:
    """How many layers of a mixture model have a dense feed-forward part."""
    if "first_k_dense_replace" in values:
        return min(layers, int(values["first_k_dense_replace"]))
    step = int(values.get("decoder_sparse_step", 1) or 1)
    dense = set(values.get("mlp_only_layers") or ())
    return sum(i in dense or (i + 1) % step != 0 for i in range(layers))
