"""First values: by the architecture's rule, else as built, never what the memory held before."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ndtrain.errors import MeshError
from ndtrain.model.build import build_from_config
from ndtrain.model.random_weights import draw_weights, meta_twin, restore_buffers

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 3.0],
}


def drawn(model_type: str, seed: int = 1, **sizes: Any) -> dict[str, torch.Tensor]:
    """All weights of a random model by name."""
    config = AutoConfig.for_model(model_type, **SIZES, **sizes)
    twin = meta_twin(build_from_config(config, dtype=torch.float32))
    return dict(draw_weights(twin, seed=seed, device=CPU, dtype=torch.float32))


def test_a_parameter_that_no_rule_sets_has_the_value_it_was_built_with() -> None:
    weights = drawn("apertus")
    config = AutoConfig.for_model("apertus", **SIZES)
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()

    names = [name for name in weights if name.endswith(("alpha_p", "alpha_n"))]
    assert len(names) == 4
    for name in names:
        assert torch.equal(weights[name], built[name])
        assert weights[name].isfinite().all()


def test_a_parameter_that_the_module_around_it_sets_is_drawn() -> None:
    sizes = {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "initializer_range": 0.5,
    }
    name = "model.layers.0.mlp.gate.weight"
    gate = drawn("qwen3_next", **sizes)[name]

    assert gate.shape == (16, 32)
    assert gate.std().item() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(gate, drawn("qwen3_next", **sizes)[name])
    assert not torch.equal(gate, drawn("qwen3_next", seed=2, **sizes)[name])
    assert not torch.equal(gate, drawn("qwen3_next", **sizes)["model.layers.1.mlp.gate.weight"])


def test_a_buffer_that_the_whole_model_sets_is_restored() -> None:
    config = AutoConfig.for_model("falcon_h1", **SIZES, **MAMBA)
    model = build_from_config(config, dtype=torch.float32)
    twin = meta_twin(model)
    model.to_empty(device=CPU)

    restore_buffers(model, twin)

    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = dict(plain.named_buffers())
    restored = dict(model.named_buffers())
    assert restored.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(restored[name], buffer), name
    vector = restored["model.layers.1.mamba.mup_vector"]
    assert set(vector.flatten().tolist()) == {0.5, 2.0, 0.25, 4.0, 3.0}


class Unruled(nn.Module):
    """A module that the architecture's rule does not know."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, 512))
        self.scale = nn.Parameter(torch.full((rows,), 0.75))
        self.register_buffer("places", torch.arange(rows), persistent=False)


class UnruledModel(PreTrainedModel):
    """An architecture with one."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.part = Unruled(config.num_hidden_layers)
        self.post_init()


@pytest.mark.parametrize("rows", [2, 2000])
def test_a_tensor_without_any_first_value_is_refused_by_name(rows: int) -> None:
    twin = meta_twin(UnruledModel(LlamaConfig(num_hidden_layers=rows)))

    with pytest.raises(MeshError) as refused:
        dict(draw_weights(twin, seed=1, device=CPU, dtype=torch.float32))

    assert refused.value.message == (
        "the architecture 'llama' has no rule for the first values of 'part.table'."
    )


def test_whole_numbers_are_restored_as_built() -> None:
    class Numbered(UnruledModel):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            del self.part.table

    model = Numbered(LlamaConfig(num_hidden_layers=5))
    twin = meta_twin(model)
    weights = dict(draw_weights(twin, seed=1, device=CPU, dtype=torch.float32))
    model.to_empty(device=CPU)

    restore_buffers(model, twin)

    assert weights["part.scale"].tolist() == [0.75] * 5
    assert model.part.places.tolist() == [0, 1, 2, 3, 4]
