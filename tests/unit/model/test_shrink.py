"""A shrunk model keeps what a mesh can get wrong, and still builds."""

from typing import Any

import pytest

from ndtrain.errors import MeshError
from ndtrain.model.build import build_model
from ndtrain.model.shrink import complete_config, shrink_config, shrink_vocabulary, shrink_width
from ndtrain.plan.model_source import ModelSource
from ndtrain.recipe.schema import Recipe

# config.json of released models, as far as their sizes go
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
        "vocab_size": 262208,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
PHI4_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 200064,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [1.0 + place / 8 for place in range(48)],
    },
    "eos_token_id": 199999,
    "pad_token_id": 199999,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
}
RELEASED = {
    "llama 8b": LLAMA_8B,
    "qwen3 0.6b": QWEN3_06B,
    "smollm2 135m": SMOLLM2_135M,
    "gemma3 27b": GEMMA3_27B,
    "phi4 mini": PHI4_MINI,
    "deepseek v3": DEEPSEEK_V3,
    "qwen3 30b-a3b": QWEN3_30B_A3B,
    "gpt-oss 20b": GPT_OSS_20B,
}


def source_of(config: dict[str, Any]) -> ModelSource:
    return ModelSource("folder", "model", None, config)


def shrunk(config: dict[str, Any], tp: int = 2) -> dict[str, Any]:
    return shrink_config(complete_config(source_of(config)), sequence_len=64, tp=tp)


@pytest.mark.parametrize("name", RELEASED)
def test_what_a_mesh_can_get_wrong_stays(name: str) -> None:
    full = complete_config(source_of(RELEASED[name]))
    small = shrunk(RELEASED[name])
    for key in ("model_type", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"):
        assert small[key] == full[key]
    assert small["vocab_size"] % 64 == full["vocab_size"] % 64
    assert set(small.get("layer_types") or ()) == set(full.get("layer_types") or ())
    if full.get("sliding_window"):
        assert 0 < small["sliding_window"] < 64


@pytest.mark.parametrize("name", RELEASED)
def test_every_shrunk_model_builds_and_is_small(name: str) -> None:
    small = shrunk(RELEASED[name])
    recipe = Recipe(model_config=small, tokenizer_config="bytes", learning_rate=1e-3)
    model = build_model(ModelSource("random", name, None, small), recipe)
    assert model.config.num_hidden_layers == 2
    assert sum(parameter.numel() for parameter in model.parameters()) < 8_000_000


def test_a_gemma_keeps_one_layer_of_each_kind_and_its_scale() -> None:
    small = shrunk(GEMMA3_27B)
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert (small["query_pre_attn_scalar"], small["head_dim"], small["hidden_size"]) == (8, 8, 256)


def test_a_mixture_keeps_a_dense_layer_and_a_choice_among_groups() -> None:
    small = shrunk(DEEPSEEK_V3)
    kept = ("first_k_dense_replace", "n_routed_experts", "n_group", "topk_group")
    assert [small[key] for key in kept] == [1, 8, 2, 1]
    assert small["num_experts_per_tok"] == 2


def test_rotary_factors_are_cut_to_the_features_left() -> None:
    # 96 of 128 features turn; 6 of 8 are left, which is 3 pairs
    rope = shrunk(PHI4_MINI)["rope_parameters"]
    assert rope["long_factor"] == [1.0, 1.125, 1.25]
    assert rope["short_factor"] == [1.0] * 3


@pytest.mark.parametrize(
    ("size", "small"), [(128256, 256), (32001, 257), (49152, 256), (151936, 256), (97, 97)]
)
def test_vocabularies_keep_their_remainder(size: int, small: int) -> None:
    assert shrink_vocabulary(size) == small


@pytest.mark.parametrize(
    ("size", "tp", "small"), [(14336, 1, 64), (14336, 4, 64), (11009, 4, 65), (13, 2, 13)]
)
def test_widths_keep_their_remainder(size: int, tp: int, small: int) -> None:
    assert shrink_width(size, tp) == small


def test_ids_of_special_tokens_exist_in_the_small_vocabulary() -> None:
    small = shrunk(LLAMA_8B)
    ids = [small["bos_token_id"], *small["eos_token_id"]]
    assert ids == [128000 % 256, 128001 % 256, 128008 % 256, 128009 % 256]


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(MeshError, match="'brand_new'"):
        complete_config(source_of({"model_type": "brand_new"}))
