"""Frozen weights in few bits: exact levels, gradients, adapters on top, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from ndtrain.errors import RecipeError
from ndtrain.model.adapters import apply_adapter, report_trainable
from ndtrain.model.build import build_model
from ndtrain.model.quantised import (
    Bits,
    QuantisedLinear,
    decode_rows,
    encode_rows,
    quantisable,
    round_linears,
)
from ndtrain.model.weights import load_weights
from ndtrain.plan.model_source import find_model
from ndtrain.recipe.schema import Recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 80,
}
CPU = torch.device("cpu")


def weight(rows: int = 7, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def round_trip(exact: torch.Tensor, bits: Bits) -> torch.Tensor:
    return decode_rows(*encode_rows(exact, bits), bits, torch.float32)


@pytest.mark.parametrize(("bits", "most"), [(4, 0.16), (8, 0.0041)])
def test_every_value_is_near_its_own(bits: Bits, most: float) -> None:
    """Within half the widest gap between levels, of the largest value that shares the scale."""
    exact = weight()
    width = 64 if bits == 4 else exact.shape[1]
    largest = exact.view(7, -1, width).abs().amax(2).repeat_interleave(width, 1)
    assert bool(((round_trip(exact, bits) - exact).abs() <= most * largest).all())


def test_sizes_in_bytes() -> None:
    values, scales = encode_rows(weight(), 4)
    assert (values.dtype, tuple(values.shape), tuple(scales.shape)) == (
        torch.uint8,
        (7, 64),
        (7, 8),
    )
    values, scales = encode_rows(weight(), 8)
    assert (tuple(values.shape), tuple(scales.shape)) == ((7, 128), (7, 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_again_changes_nothing_and_zeros_stay(bits: Bits) -> None:
    once = round_trip(weight(), bits)
    assert torch.allclose(round_trip(once, bits), once, rtol=1e-6, atol=0)
    assert not round_trip(torch.zeros(2, 64), bits).any()


def test_levels_are_those_of_nf4() -> None:
    """A block of all sixteen levels comes back, each with its own number."""
    below = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004]
    above = [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    block = (torch.tensor([*below, 0.0, *above]) * 3).repeat(4)[None]
    assert torch.allclose(round_trip(block, 4), block, rtol=1e-6)
    values, _ = encode_rows(block, 4)
    assert values[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_bytes_are_those_of_bitsandbytes() -> None:
    reference = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is an extra")
    exact = weight(64, 256)
    packed, state = reference.quantize_4bit(exact, blocksize=64, quant_type="nf4")
    values, scales = encode_rows(exact, 4)
    assert torch.equal(values.flatten(), packed.flatten())
    assert torch.equal(scales.view(torch.float32).flatten(), state.absmax.flatten())
    assert torch.equal(round_trip(exact, 4), reference.dequantize_4bit(packed, state))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_the_linear_multiplies_by_the_decoded_weight(bits: Bits, bias: bool) -> None:
    plain = nn.Linear(128, 7, bias=bias)
    linear = QuantisedLinear(plain, bits)
    values, scales = encode_rows(plain.weight.detach(), bits)
    linear.weight.copy_(values)
    linear.scales.copy_(scales)
    with torch.no_grad():
        plain.weight.copy_(round_trip(plain.weight, bits))
    inputs = weight(5).requires_grad_()
    again = inputs.detach().clone().requires_grad_()
    outputs, expected = linear(inputs), plain(again)
    assert torch.equal(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(inputs.grad, again.grad)  # type: ignore[arg-type]


def adapted(bits: int, **keys: Any) -> tuple[Any, Recipe]:
    recipe = Recipe(
        model_config=CONFIG,
        learning_rate=1.0,
        adapter="qlora" if bits == 4 else "lora",
        lora_r=2,
        lora_target_linear=True,
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        **keys,
    )
    source = find_model(recipe)
    model = apply_adapter(build_model(source, recipe), recipe)
    load_weights(model, source, seed=1, device=CPU)
    return model, recipe


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_on_a_quantised_base_is_the_rounded_model(bits: Bits) -> None:
    model, recipe = adapted(bits)
    source = find_model(recipe)
    plain = build_model(source, recipe)
    load_weights(plain, source, seed=1, device=CPU)
    names = quantisable(plain, bits, [plain.lm_head])
    # rows of 96 inputs do not divide into blocks of 64
    assert any("down_proj" in name for name in names) is (bits == 8)
    round_linears(plain, names, bits)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        outputs = model.eval()(input_ids=ids).logits
        assert torch.allclose(outputs, plain.eval()(input_ids=ids).logits, atol=1e-6)
    model(input_ids=ids).logits.square().mean().backward()
    trained = {name for name, one in model.named_parameters() if one.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}


def test_the_report_counts_weights_not_bytes() -> None:
    quantised, recipe = adapted(4)
    whole = recipe.model_copy(update={"load_in_4bit": False, "adapter": "lora"})
    plain = apply_adapter(build_model(find_model(whole), whole), whole)
    assert report_trainable(quantised) == report_trainable(plain)


def test_dora_on_a_quantised_base_is_refused() -> None:
    with pytest.raises(RecipeError, match="DoRA measures whole weights"):
        adapted(4, peft_use_dora=True)


def test_modules_trained_whole_are_not_quantised() -> None:
    model, _ = adapted(4, lora_modules_to_save=("v_proj",))
    kept = model.model.layers[0].self_attn.v_proj
    assert type(kept) is torch.nn.Linear
    assert kept.weight.requires_grad


def test_what_a_pattern_trains_is_not_quantised() -> None:
    pattern = r"layers\.0\.self_attn\.v_proj"
    model, _ = adapted(4, unfrozen_parameters=(pattern,))
    first, second = (layer.self_attn.v_proj for layer in model.model.layers)
    assert type(first) is torch.nn.Linear
    assert first.weight.requires_grad
    assert isinstance(second.base_layer, QuantisedLinear)
