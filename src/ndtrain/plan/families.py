"""What the architectures have that their configuration files do not say.

One entry per `model_type`: the values transformers assumes for keys a configuration leaves out,
and how a block is built. A new architecture is one entry here; the test that counts its
parameters against transformers picks it up by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GLM_NORMS = (*LLAMA_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """How the blocks of one architecture are built.

    Attributes:
        defaults: transformers' values for keys that a configuration leaves out.
        norms: names of a block's norms over the hidden size.
        qk_norm: norms of queries and keys: none, one of head size, or over all heads.
        qkv_bias: whether q, k and v have a bias; None = the key `attention_bias` says.
        o_bias: whether the output projection has a bias when q, k and v have one.
        tp_attention: how tensor parallelism splits attention: by heads; by columns that are
            gathered again before the heads are formed; or not at all.
        tp_mlp: whether tensor parallelism splits the feed-forward part.
        window_every: layers of one pattern of local and global attention, the last of which is
            global; 0 = every layer alike; a `layer_types` key wins.
        window_switch: configuration key that must be true for windows to be in use.
        window_from: which layers have the window then: all, those from `max_window_layers` on, or
            those without rotary positions.
        experts_transposed: expert matrices are stored [experts, in, out].
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: tuple[str, ...] = LLAMA_NORMS
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool | None = None
    o_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tp_attention: Literal["heads", "gathered", "none"] = "heads"
    tp_mlp: bool = True
    window_every: int = 0
    window_switch: str | None = None
    window_from: Literal["all", "max_window_layers", "no_rope"] = "all"
    sinks: bool = False
    experts_transposed: bool = False
    mla: bool = False

    @property
    def norms_mlp_output(self) -> bool:
        """Whether a norm of the block reads what its MLP gives."""
        return bool({"post_feedforward_layernorm", "post_mlp_layernorm"} & set(self.norms))


FAMILIES: Mapping[str, Family] = {
    "llama": Family({"intermediate_size": 11008}, qkv_bias=None, o_bias=True),
    "qwen2": Family(
        {"intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936},
        qkv_bias=True,
        window_switch="use_sliding_window",
        window_from="max_window_layers",
    ),
    "qwen3": Family(
        {
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        qk_norm="head",
        o_bias=True,
        window_switch="use_sliding_window",
        window_from="max_window_layers",
    ),
    "mistral": Family(
        {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
    ),
    "gemma": Family(
        {
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "vocab_size": 256000,
            "tie_word_embeddings": True,
        },
        o_bias=True,
    ),
    "gemma2": Family(
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norms=SANDWICH_NORMS,
        o_bias=True,
        window_every=2,
    ),
    "gemma3_text": Family(
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
        },
        norms=SANDWICH_NORMS,
        qk_norm="head",
        o_bias=True,
        window_every=6,
    ),
    "phi3": Family(
        {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064},
        qkv_bias=False,
        fused_qkv=True,
        fused_gate_up=True,
        tp_attention="gathered",
    ),
    "olmo2": Family(
        {"intermediate_size": 11008, "vocab_size": 50304},
        norms=POST_NORMS,
        qk_norm="full",
        o_bias=True,
        tp_attention="gathered",
    ),
    "olmo3": Family(
        {"intermediate_size": 11008, "vocab_size": 50304, "sliding_window": 4096},
        norms=POST_NORMS,
        qk_norm="full",
        o_bias=True,
        tp_attention="gathered",
        window_every=4,
    ),
    "granite": Family({"intermediate_size": 11008}, o_bias=True),
    "glm4": Family(
        {
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 151552,
            "attention_bias": True,
        },
        norms=GLM_NORMS,
        fused_gate_up=True,
    ),
    "cohere2": Family(
        {
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "vocab_size": 256000,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
        },
        norms=("input_layernorm",),
        o_bias=True,
        window_every=4,
    ),
    "smollm3": Family(
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        o_bias=True,
        window_switch="use_sliding_window",
        window_from="no_rope",
    ),
    "qwen3_moe": Family(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm="head",
        o_bias=True,
        window_switch="use_sliding_window",
    ),
    "mixtral": Family(
        {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        qkv_bias=False,
    ),
    "gpt_oss": Family(
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
        },
        o_bias=True,
        tp_attention="none",
        tp_mlp=False,
        window_every=2,
        sinks=True,
        experts_transposed=True,
    ),
    "deepseek_v3": Family(
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "vocab_size": 129280,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        tp_attention="none",
        mla=True,
    ),
}

USE_A_TESTED_ONE = f"Use another architecture; tested are {', '.join(sorted(FAMILIES))}."
"""The advice where an architecture cannot be trained."""

BASE_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""What transformers assumes where a family says nothing else."""
