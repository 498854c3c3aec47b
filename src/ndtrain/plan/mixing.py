"""Where tokens of a row meet other than in attention, read from a model's configuration.

Context parallelism gives a rank a part of a row and lets the ranks exchange keys and values. A
convolution or a recurrent state that runs along the row would start anew on every rank, and sparse
attention would choose among a rank's own tokens only.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_LISTS = ("layer_types", "layers_block_type", "block_types")
"""Keys that say of each layer what it is."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_BY_TOKEN = frozenset({"mlp", "moe"})
"""Layers that read every token by itself."""

_MARKS = re.compile(
    r"(use_|n_)?mamba_\w+|\w*ssm_\w+|state_size|rwkv\w*|lru_width|conv1d_width"
    r"|conv_(L_cache|kernel(_size)?)|\w+_conv_kernel_(size|dim)|short_conv\w*"
    r"|linear_((key_|value_)?head_dim|num_(key_|value_)?heads|attn_\w+)"
    r"|attn_layer_(period|offset|indices)|attn_type_list|hybrid_(layer_ids|override_pattern)"
    r"|index_(topk\w*|n_heads|head_dim)|indexer_\w+|compress_rates"
)
"""Keys that only configurations of such layers have."""

EVERY_LAYER = frozenset(
    {
        "falcon_h1",
        "falcon_mamba",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_text",
        "mamba",
        "mamba2",
        "rwkv",
        "xlstm",
        "zaya",
    }
)
"""Types that have such a part in every layer, whatever their lists of layers say."""
BY_DEFAULT = frozenset(
    {
        "axk2",
        "bailing_hybrid",
        "bamba",
        "deepseek_v32",
        "deepseek_v4",
        "dots3_note_text",
        "glm_moe_dsa",
        "granitemoehybrid",
        "hy_v4",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "minimax",
        "minimax_m3_vl_text",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "recurrent_gemma",
        "zamba",
        "zamba2",
    }
)
"""Types that have such layers where the configuration does not list its layers."""


def mixing_layers(config: Mapping[str, Any]) -> str:
    """What in a model lets tokens meet outside full, sliding or chunked attention.

    Args:
        config: keys of the text model's config.json; keys may be left out.

    Returns:
        Words for a message, e.g. `layers of kind 'conv'`; empty where there is nothing of it.
    """
    model_type = config.get("model_type")
    if model_type in EVERY_LAYER:
        return "convolutions or recurrent states in every layer"
    kinds = [kind for key in _LISTS for kind in _listed(config.get(key))]
    others = sorted({kind for kind in kinds if kind not in _ATTENTION | _BY_TOKEN})
    if others:
        return f"layers of kind {', '.join(repr(kind) for kind in others)}"
    if kinds:
        return ""
    if model_type in BY_DEFAULT:
        return "convolutional, recurrent or sparsely attending layers"
    marks = [key for key, value in config.items() if value is not None and _MARKS.fullmatch(key)]
    return f"layers that its key '{min(marks)}' describes" if marks else ""


def _listed(value: Any) -> Iterable[str]:
    return (str(kind) for kind in value) if isinstance(value, list | tuple) else ()
