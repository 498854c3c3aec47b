"""Where tokens meet outside attention: read from configurations, and held to transformers' code."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ndtrain.plan.facts import facts_from_config
from ndtrain.plan.families import FAMILIES
from ndtrain.plan.mixing import BY_DEFAULT, EVERY_LAYER, mixing_layers
from ndtrain.plan.plan import ParallelPlan
from ndtrain.plan.search import all_meshes, possible_meshes
from ndtrain.recipe.schema import Recipe

ALONG_THE_ROW = re.compile(
    r"nn\.Conv1d|causal_conv1d|selective_scan|chunk_scan|gated_delta|LightningAttention|mLSTM"
    r"|rwkv_linear_attention|class \w*Indexer|class \w*Compressor|class \w*ShortConv"
)
AROUND_THE_DECODER = {
    # of towers for sound and pictures, or models that are not decoders alone
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "phi4_multimodal",
    "whisper",
    # its classes for such layers are never built
    "granitemoe_swa",
    "granitemoeshared",
}


def text_types() -> Iterator[str]:
    """Language models that transformers can build from their defaults."""
    found = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # two kinds of text, or defaults that their own check refuses
        if name.startswith("musicgen") or name.endswith("_assistant"):
            continue
        if name not in AROUND_THE_DECODER:
            found.add(CONFIG_MAPPING[name]().get_text_config().model_type)
    return iter(sorted(found - AROUND_THE_DECODER))


def source_of(model_type: str) -> str:
    """The code of an architecture."""
    module = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
    spec = find_spec(module)
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text()


def test_no_architecture_with_code_along_the_row_goes_unnoticed() -> None:
    missed = [
        model_type
        for model_type in text_types()
        if ALONG_THE_ROW.search(source_of(model_type))
        and not mixing_layers({"model_type": model_type})
    ]
    assert missed == []


def test_every_named_type_is_one_of_transformers() -> None:
    assert set(CONFIG_MAPPING) >= BY_DEFAULT | EVERY_LAYER
    assert not (BY_DEFAULT | EVERY_LAYER) & set(FAMILIES)


def test_whole_default_configurations_say_what_their_types_say() -> None:
    attention_only = {}
    for model_type in text_types():
        whole = CONFIG_MAPPING[model_type]().to_dict()
        known = mixing_layers({"model_type": model_type})
        found = mixing_layers({**whole, "model_type": model_type})
        if bool(known) != bool(found):
            attention_only[model_type] = whole.get("layer_types")
    # this one's defaults hold attention in every layer
    assert {key: set(kinds or ()) for key, kinds in attention_only.items()} == {
        "lfm2": {"full_attention"},
        "minimax_m3_vl_text": {"full_attention"},
    }


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, ""),
        ({"model_type": "new", "layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({"model_type": "new", "layer_types": ["chunked_attention", "mlp"]}, ""),
        (
            {"model_type": "new", "layer_types": ["linear_attention", "full_attention", "conv"]},
            "layers of kind 'conv', 'linear_attention'",
        ),
        (
            {"model_type": "new", "layers_block_type": ["mamba", "attention"]},
            "layers of kind 'mamba'",
        ),
        ({"model_type": "new", "block_types": ["recurrent"]}, "layers of kind 'recurrent'"),
        ({"model_type": "new", "conv_L_cache": 3}, "layers that its key 'conv_L_cache' describes"),
        ({"model_type": "new", "conv_L_cache": None}, ""),
        (
            {"model_type": "new", "mamba_d_state": 1},
            "layers that its key 'mamba_d_state' describes",
        ),
        # a hybrid without one of its other layers, as some small ones are released
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2}, ""),
        (
            {"model_type": "falcon_h1", "layer_types": ["full_attention"]},
            "convolutions or recurrent states in every layer",
        ),
    ],
)
def test_lists_of_layers_go_before_keys_and_types(config: dict[str, object], words: str) -> None:
    assert mixing_layers(config) == words


def test_a_search_splits_no_row_of_such_a_model() -> None:
    config = {"model_type": "qwen3_next", "hidden_size": 64, "num_attention_heads": 4}
    facts = facts_from_config(config, name="model", source="recipe")
    recipe = Recipe(base_model="m", learning_rate=1e-4, global_batch_size=8)

    found = [mesh.sizes for mesh in possible_meshes(recipe, facts, 4)]

    assert found
    assert all(cp == 1 for _, _, cp, _ in found)
    assert len(found) < len(list(all_meshes(4)))
    assert ParallelPlan(dp_shard=4).sizes in found
