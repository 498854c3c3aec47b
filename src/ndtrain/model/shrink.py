"""A small copy of a model's configuration that keeps whatever a mesh can get wrong.

Heads and their ratio, both kinds of layers, windows, tied embeddings and the remainders of the
vocabulary and of the feed-forward width stay; depth, widths and numbers of experts become small.
"""

from collections.abc import Mapping
from typing import Any

from ndtrain.errors import MeshError
from ndtrain.plan.model_source import ModelSource

LAYERS = 2
HEAD_SIZE = 8
_VOCABULARY = 256
_REMAINDER = 64
_WIDTH = 64
_EXPERTS = 8
_NOT_SIZES = {"architectures", "dtype", "transformers_version", "_name_or_path"}
_FACTOR_LISTS = ("short_factor", "long_factor")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_LATENT_RANKS = ("q_lora_rank", "kv_lora_rank")
_LATENT_SIZES = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def complete_config(source: ModelSource) -> dict[str, Any]:
    """A model's text config with all defaults; of a model on the hub only config.json is read.

    Raises:
        MeshError: transformers does not know the architecture, or the hub does not answer.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    keys = dict(source.config)
    if not keys:
        try:
            keys, _ = PreTrainedConfig.get_config_dict(source.name, revision=source.revision)
        except OSError as error:
            raise MeshError(
                f"config.json of '{source.name}' cannot be read: {str(error).splitlines()[0]}",
                where="base_model",
                hint="Check the network, or name a folder or .gguf file on this machine.",
            ) from error
    kind = str(keys.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise MeshError(
            f"transformers does not know the model type '{kind}', so its model cannot be shrunk.",
            where="base_model",
        )
    text = CONFIG_MAPPING[kind].from_dict(keys).get_text_config()
    kept = set(type(text)().to_dict()) - _NOT_SIZES
    found = {key: value for key, value in text.to_dict().items() if key in kept}
    return {**found, "model_type": text.model_type}


def shrink_config(config: Mapping[str, Any], *, sequence_len: int, tp: int) -> dict[str, Any]:
    """The configuration of a copy that one processor steps in a moment.

    Args:
        config: keys and values of a text model's config, complete with its defaults.
        sequence_len: length of the rows, which windows are cut to a quarter of.
        tp: ranks that share each big matrix; widths keep their remainder by it.
    """
    depth = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    old_head = int(config.get("head_dim") or config["hidden_size"] // heads)
    head = min(HEAD_SIZE, old_head)
    small: dict[str, Any] = {
        key: _two_kinds(value) if _is_per_layer(value, depth) else value
        for key, value in config.items()
    }
    small |= {
        "num_hidden_layers": LAYERS,
        "hidden_size": heads * head,
        # large enough that attention and feed-forward both matter to the loss
        "initializer_range": 1.6 / (heads * head) ** 0.5,
    }
    if "head_dim" in config:
        small["head_dim"] = head
    vocab_size = shrink_vocabulary(int(config["vocab_size"]))
    small["vocab_size"] = vocab_size
    for key, value in config.items():
        if value is None or isinstance(value, bool):
            continue
        if key.endswith("intermediate_size"):
            small[key] = shrink_width(int(value), tp)
        elif key in _TOKEN_IDS:
            small[key] = _folded(value, vocab_size)
        elif key == "sliding_window":
            small[key] = max(2, min(int(value), sequence_len // 4))
        elif key in _LATENT_RANKS:
            small[key] = min(int(value), 2 * HEAD_SIZE)
        elif key in _LATENT_SIZES:
            small[key] = min(int(value), HEAD_SIZE)
        elif key == "query_pre_attn_scalar":
            small[key] = head
        elif key == "attention_multiplier":
            small[key] = value * old_head / head
        elif key in ("rope_parameters", "rope_scaling"):
            small[key] = _cut_factors(value, head, old_head)
    return small | _experts(config) | _layer_kinds(config)


def shrink_vocabulary(size: int) -> int:
    """A small vocabulary with the same remainder by 64."""
    return min(size, _VOCABULARY + size % _REMAINDER)


def shrink_width(size: int, tp: int) -> int:
    """A small width with the same remainder by the ranks that share it."""
    step = 16 * tp
    return min(size, -(-_WIDTH // step) * step + size % tp)


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == depth


def _two_kinds(values: Any) -> list[Any]:
    """The first layer, and the first one of another kind where there is one."""
    other = next((value for value in values if value != values[0]), values[0])
    return [values[0], other]


def _folded(value: Any, vocab_size: int) -> Any:
    if isinstance(value, list | tuple):
        return [token % vocab_size for token in value]
    return int(value) % vocab_size


def _cut_factors(rope: Any, head: int, old_head: int) -> Any:
    """Rotary factors are given for each pair of features, of which fewer are left."""
    if not isinstance(rope, Mapping):
        return rope
    cut: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, Mapping):
            cut[key] = _cut_factors(value, head, old_head)
        elif key in _FACTOR_LISTS:
            cut[key] = list(value)[: max(1, len(value) * head // old_head)]
        else:
            cut[key] = value
    return cut


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """At most eight experts, two for each token, in at most two groups."""
    small: dict[str, Any] = {
        key: min(int(config[key]), _EXPERTS) for key in _EXPERT_COUNTS if config.get(key)
    }
    if small and config.get("num_experts_per_tok"):
        small["num_experts_per_tok"] = min(int(config["num_experts_per_tok"]), 2)
    if (config.get("n_group") or 1) > 1:
        small |= {"n_group": 2, "topk_group": 1}
    return small


def _layer_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of layers that are told apart by number: one of each kind."""
    small: dict[str, Any] = {}
    if config.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    if config.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    for key in ("decoder_sparse_step", "no_rope_layer_interval", "_sliding_window_pattern"):
        if config.get(key):
            small[key] = min(int(config[key]), LAYERS)
    if config.get("max_window_layers") is not None:
        small["max_window_layers"] = min(int(config["max_window_layers"]), 1)
    return small
