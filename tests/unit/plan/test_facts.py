"""Facts and parameter lists agree with what transformers itself builds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ndtrain.errors import MeshError
from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.families import FAMILIES
from ndtrain.plan.shapes import model_parameters

SMALL = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "vocab_size": 320}
EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
EXTRA = {
    "qwen3_moe": EXPERTS,
    "mixtral": {k: v for k, v in EXPERTS.items() if k != "moe_intermediate_size"},
    "gpt_oss": {k: v for k, v in EXPERTS.items() if k != "moe_intermediate_size"},
    "deepseek_v3": EXPERTS | {"first_k_dense_replace": 1},
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def built(config):
    """The parameters of the real model, on the meta device."""
    reference = AutoConfig.for_model(**config, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference)
    return reference, {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("heads", [HEADS, {}], ids=["heads given", "heads left out"])
def test_parameters_are_those_of_transformers(model_type, heads):
    config = {"model_type": model_type, **SMALL, **heads, **EXTRA.get(model_type, {})}
    reference, shapes = built(config)

    facts = facts_from_config(config, name="tiny", source="recipe")

    assert {p.name: p.shape for p in model_parameters(facts)} == shapes
    assert facts.num_heads == reference.num_attention_heads
    assert facts.num_kv_heads == reference.num_key_value_heads
    assert facts.tied_embeddings == reference.tie_word_embeddings


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "granite", "olmo2", "gemma3_text"])
def test_a_bias_and_untied_embeddings_are_counted(model_type):
    switches = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    config = {"model_type": model_type, **SMALL, **HEADS, **switches}
    if model_type not in ("llama", "granite"):
        del config["mlp_bias"]
    _, shapes = built(config)

    facts = facts_from_config(config, name="tiny", source="recipe")

    assert {p.name: p.shape for p in model_parameters(facts)} == shapes


@pytest.mark.parametrize("model_type", FAMILIES)
def test_window_layers_are_those_of_transformers(model_type):
    for extra in ({}, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 5}):
        config = {"model_type": model_type, "num_hidden_layers": 12, **extra}
        reference = AutoConfig.for_model(**config)
        kinds = getattr(reference, "layer_types", None)
        window = getattr(reference, "sliding_window", None)
        expected = (
            sum(kind == "sliding_attention" for kind in kinds) if kinds else (12 if window else 0)
        )

        facts = facts_from_config(config, name="tiny", source="recipe")

        assert facts.num_window_layers == expected
        assert facts.sliding_window == (window if expected else None)


def test_a_multimodal_configuration_is_read_through_its_text_part():
    text = {"model_type": "gemma3_text", **SMALL, **HEADS, "head_dim": 16}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}}

    facts = facts_from_config(outer, name="tiny", source="folder")

    assert (facts.model_type, facts.hidden_size, facts.head_dim) == ("gemma3_text", 64, 16)
    assert facts.tied_embeddings


def test_softcap_and_sinks_are_seen():
    gemma = facts_from_config({"model_type": "gemma2"}, name="g", source="recipe")
    oss = facts_from_config({"model_type": "gpt_oss"}, name="o", source="recipe")

    assert (gemma.softcap, gemma.sinks) == (True, False)
    assert (oss.softcap, oss.sinks) == (False, True)


def test_a_configuration_without_architecture_is_refused():
    with pytest.raises(MeshError, match="the configuration of 'm' names no model_type"):
        facts_from_config({"hidden_size": 64}, name="m", source="folder")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_hidden_layers", -1),
        ("vocab_size", True),
    ],
)
def test_a_size_that_is_no_number_above_zero_is_named(key, value):
    message = f"{key} of 'm' is '{value}', not a whole number above 0"
    with pytest.raises(MeshError, match=message):
        facts_from_config({"model_type": "llama", key: value}, name="m", source="folder")
