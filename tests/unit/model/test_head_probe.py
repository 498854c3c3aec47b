"""From hidden states to logits: what architectures do there, and what is known of it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from ndtrain.errors import MeshError
from ndtrain.model.build import build_from_config
from ndtrain.model.head import LogitShape
from ndtrain.model.head_probe import check_head
from ndtrain.plan.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOGITS = torch.tensor([-40.0, -1.0, 0.0, 0.5, 30.0])


def built(model_type: str, **sizes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SIZES, **sizes})
    return build_from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("model_type", "sizes", "expected"),
    [
        ("falcon_h1", {"lm_head_multiplier": 0.25}, LOGITS / 4),
        ("recurrent_gemma", {"logits_soft_cap": 3.0}, 3 * (LOGITS / 3).tanh()),
        ("hyperclovax", {"logits_scaling": 0.125}, LOGITS / 8),
        ("granite", {"logits_scaling": 8.0}, LOGITS / 8),
        ("granitemoe", {"logits_scaling": 8.0}, LOGITS / 8),
        ("cohere", {"logit_scale": 0.5}, LOGITS / 2),
        ("gemma2", {"final_logit_softcapping": 5.0}, 5 * (LOGITS / 5).tanh()),
        ("nanochat", {"final_logit_softcapping": 5.0}, 5 * (LOGITS / 5).tanh()),
        ("llama", {}, LOGITS),
    ],
)
def test_logits_are_shaped_as_the_architecture_does(
    model_type: str, sizes: dict[str, Any], expected: torch.Tensor
) -> None:
    model = built(model_type, **sizes)

    torch.testing.assert_close(LogitShape(model.config)(LOGITS), expected)
    check_head(model)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_tested_architectures_have_a_known_head(model_type: str) -> None:
    check_head(built(model_type))


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "bert"])
def test_layers_before_the_head_are_refused(model_type: str) -> None:
    sizes = {f"{key}_token_id": 0 for key in ("cls", "sep")} if "-" in model_type else {}

    with pytest.raises(MeshError) as refused:
        check_head(built(model_type, **sizes))

    assert refused.value.message == (
        f"'{model_type}' computes its logits in a way that is not known here: between hidden "
        "states and logits stands more than a head, a scale and a cap."
    )


def test_a_scale_under_an_unknown_key_is_refused() -> None:
    model = built("inkling_text", logits_mup_width_multiplier=4.0)

    with pytest.raises(MeshError, match="'inkling_text' computes its logits"):
        check_head(model)


def test_the_model_is_left_as_it_was() -> None:
    model = built("falcon_h1", tie_word_embeddings=True)
    names = [name for name, _ in model.named_modules()]
    forward = model.lm_head.forward

    check_head(model)

    assert [name for name, _ in model.named_modules()] == names
    assert model.lm_head.forward == forward
    assert "forward" not in vars(model.base_model)
