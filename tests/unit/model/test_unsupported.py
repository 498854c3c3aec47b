"""Architectures that cannot be trained here are refused by name, with what can be done."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ndtrain.errors import ExitCode, MeshError
from ndtrain.model.attention import attention
from ndtrain.model.build import build_from_config
from ndtrain.model.split_plan import split_plan
from ndtrain.plan.families import FAMILIES
from ndtrain.train.assemble import check_architecture

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def built(model_type: str, **sizes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SIZES, "pad_token_id": 0, **sizes})
    return build_from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon", "bloom", "mpt", "gptj"])
def test_decoders_of_another_layout_are_refused_and_the_tested_ones_named(model_type: str) -> None:
    with pytest.raises(MeshError) as refused:
        check_architecture(built(model_type), 32)

    assert refused.value.exit_code == ExitCode.MESH
    assert refused.value.message == (
        f"the architecture '{model_type}' is not supported: its base model has no list of blocks "
        "called 'layers'."
    )
    assert all(name in refused.value.hint for name in FAMILIES)


@pytest.mark.parametrize("model_type", ["llama", "arcee", "starcoder2", "phi"])
def test_decoders_of_the_known_layout_pass(model_type: str) -> None:
    check_architecture(built(model_type), 32)


def test_an_assertion_of_transformers_is_an_error_of_the_model() -> None:
    sizes = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    with pytest.raises(MeshError) as refused:
        built("modernbert-decoder", pad_token_id=50283, **sizes)

    assert refused.value.message == (
        "the model of type 'modernbert-decoder' cannot be built: Padding_idx must be within "
        "num_embeddings"
    )


def test_attention_without_rows_names_the_architecture() -> None:
    module = nn.Module()
    module.config = AutoConfig.for_model("stablelm")
    states = torch.zeros(1, 4, 8, 16)

    with pytest.raises(MeshError, match="attention of 'stablelm' is not told where"):
        attention(module, states, states, states, None)


def test_norms_with_weights_for_every_head_are_not_split() -> None:
    model = built("cohere", use_qk_norm=True, num_key_value_heads=2)

    with pytest.raises(MeshError) as refused:
        split_plan(model, model, 2)

    assert str(refused.value) == (
        "tensor_parallel_size: tensor parallelism splits the heads of 'cohere', but its plan in "
        "transformers does not split 'model.layers.0.self_attn.q_norm', which has weights for each "
        "of them. Use tensor_parallel_size: 1; dp_shard_size and context_parallel_size work."
    )


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("cohere", {"use_qk_norm": False}),
        # weights of one head, which every rank shares
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
        ("gemma3_text", {"head_dim": 16}),
        # queries and keys are gathered before their norms
        ("olmo2", {}),
    ],
)
def test_norms_that_are_whole_on_every_rank_are_fine(
    model_type: str, sizes: dict[str, Any]
) -> None:
    model = built(model_type, **{"num_key_value_heads": 4, **sizes})
    assert split_plan(model, model, 2).modules
