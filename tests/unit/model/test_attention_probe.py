"""Windows that stand in a mask alone are refused; those that attention is told of are not."""

from typing import Any

import pytest
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

from ndtrain.errors import ExitCode, MeshError
from ndtrain.model.attention_probe import check_attention, short_window
from ndtrain.model.build import build_from_config
from ndtrain.plan.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def built(model_type: str, **sizes: Any) -> PreTrainedModel:
    """A small model on the meta device."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    return build_from_config(config, dtype=config.dtype)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("phimoe", {"num_local_experts": 4}), ("doge", {}), ("doge", {"num_hidden_layers": 1})],
)
def test_a_window_in_the_mask_alone_is_refused_where_it_hides_something(
    model_type: str, sizes: dict[str, Any]
) -> None:
    model = built(model_type, sliding_window=8, **sizes)

    with pytest.raises(MeshError) as refused:
        check_attention(model, 9)

    assert refused.value.exit_code == ExitCode.MESH
    assert str(refused.value) == (
        f"sequence_len: '{model_type}' keeps its sliding_window of 8 tokens in a mask of its own, "
        "which ndtrain's attention does not get: longer rows would be trained without it. Use "
        "sequence_len: 8 or less, or another architecture."
    )
    check_attention(model, 8)
    check_attention(built(model_type, sliding_window=None, **sizes), 64)


def test_a_long_window_in_long_rows_is_seen() -> None:
    model = built("phimoe", sliding_window=3000, num_local_experts=4)

    with pytest.raises(MeshError, match="its sliding_window of 3000 tokens"):
        check_attention(model, 100_000)
    check_attention(model, 3000)


class Narrow(LlamaModel):
    """A base model that takes no keyword arguments beside its own."""

    def forward(  # type: ignore[override]
        self, input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: bool
    ) -> None: ...


class NarrowLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = Narrow(config)


def test_a_model_that_takes_no_rows_is_refused() -> None:
    model = NarrowLM(LlamaConfig(**SIZES))

    with pytest.raises(MeshError) as refused:
        check_attention(model, 32)

    assert refused.value.message == (
        "'llama' does not take what its layers must know: Narrow.forward() got an unexpected "
        "keyword argument 'rows'."
    )


@pytest.mark.parametrize("model_type", ["stablelm", "nemotron"])
def test_attention_that_gets_no_rows_is_refused_by_type(model_type: str) -> None:
    with pytest.raises(MeshError) as refused:
        check_attention(built(model_type), 32)

    assert refused.value.message == (
        f"the attention of '{model_type}' is not told where the tokens of a row stand: its layers "
        "do not hand their keyword arguments on."
    )


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("starcoder2", {"sliding_window": 8}),
        ("vaultgemma", {"sliding_window": 8, "head_dim": 16}),
        ("cwm", {"sliding_window": 8, "head_dim": 16}),
        ("modernbert-decoder", {"local_attention": 8}),
        ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 64, "head_dim": 16}),
        ("olmoe", EXPERTS),
        ("phi", {}),
        # layers that ask for values look at the padding alone
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
    ],
)
def test_attention_that_is_told_passes(model_type: str, sizes: dict[str, Any]) -> None:
    if model_type == "modernbert-decoder":
        sizes = {**sizes, **{f"{key}_token_id": 0 for key in ("cls", "sep")}}
    model = built(model_type, **sizes)
    before = model.config.to_dict()

    check_attention(model, 64)
    check_attention(model, 20000)

    assert model.config.to_dict() == before
    assert all(one.is_meta for one in model.parameters())


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_tested_architectures_tell_attention_everything(model_type: str) -> None:
    sizes: dict[str, Any] = {"head_dim": 16, "num_local_experts": 4, **EXPERTS}
    config = AutoConfig.for_model(model_type)
    known = {key: value for key, value in sizes.items() if hasattr(config, key)}
    if hasattr(config, "sliding_window"):
        known |= {"sliding_window": 8, "use_sliding_window": True}
    if model_type == "deepseek_v3":
        known |= {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 1}
        known |= {"topk_group": 1, "n_routed_experts": 4, "moe_intermediate_size": 16}
    if model_type == "qwen3_moe":
        known |= {"moe_intermediate_size": 16}
    check_attention(built(model_type, **known), 64)


@pytest.mark.parametrize(
    ("model_type", "sizes", "found"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 8}, ("sliding_window", 8)),
        ("mistral", {"sliding_window": 64}, None),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, None),
        ("olmo3", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, None),
        ("modernbert-decoder", {"local_attention": 8}, ("sliding_window", 4)),
    ],
)
def test_a_window_counts_where_layers_have_it(
    model_type: str, sizes: dict[str, Any], found: tuple[str, int] | None
) -> None:
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    assert short_window(config, 64) == found
