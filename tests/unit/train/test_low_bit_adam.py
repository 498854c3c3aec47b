"""AdamW with few bits: torch's own steps in fp32, close to them in fewer, and none lost."""

from typing import Any

import pytest
import torch
from torch import nn

from ndtrain.errors import RecipeError
from ndtrain.recipe.schema import Recipe
from ndtrain.train.deferred import skips_on_device
from ndtrain.train.low_bit_adam import (
    ONE_PASS,
    LowBitAdamW,
    Rates,
    update_in_blocks,
    update_plain,
)
from ndtrain.train.optim import build_optimizer
from ndtrain.train.rounding import places_of

RATE, DECAY = 1e-2, 0.1


def adam(parameters: list[nn.Parameter], states: str, seed: int = 1) -> LowBitAdamW:
    names = [f"p{number}" for number in range(len(parameters))]
    group = {"params": parameters, "names": names, "weight_decay": DECAY}
    return LowBitAdamW(
        [group], lr=RATE, betas=(0.9, 0.999), eps=1e-8, state_dtype=states, seed=seed
    )


def torch_adam(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)


def weights() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = ((64, 256), (32,), (3, 40, 64))
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]


def test_with_fp32_states_it_is_torchs_adamw() -> None:
    ours, theirs = weights(), weights()
    own, reference = adam(ours, "fp32"), torch_adam(theirs)
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=random)
            other.grad = one.grad.clone()
        own.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def loss_after(states: str, dtype: torch.dtype, steps: int = 300) -> list[float]:
    """A small network learns a fixed function; losses on its way."""
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, 64, generator=random)
    targets = (inputs @ torch.randn(64, 64, generator=random)).tanh()
    layers = [nn.Parameter(torch.randn(s, generator=random) / 8) for s in ((128, 64), (64, 128))]
    stored = [nn.Parameter(layer.detach().to(dtype)) for layer in layers]
    optimizer: torch.optim.Optimizer = adam(stored, states)
    if states == "fp32" and dtype == torch.float32:
        optimizer = torch_adam(stored)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        first, second = (layer.float() for layer in stored)
        loss = ((inputs @ first.T).relu() @ second.T - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_states_in_few_bits_learn_as_well_as_fp32_ones() -> None:
    reference = loss_after("fp32", torch.float32)
    assert reference[-1] < reference[0] / 20
    for states in ("bf16", "8bit"):
        losses = loss_after(states, torch.float32)
        assert losses[-1] == pytest.approx(reference[-1], rel=0.05), states


def test_bf16_weights_learn_too() -> None:
    reference = loss_after("fp32", torch.float32)
    for states in ("fp32", "bf16", "8bit"):
        losses = loss_after(states, torch.bfloat16)
        assert losses[-1] < 1.3 * reference[-1], states


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_small_updates_of_bf16_weights_are_kept_on_average(states: str) -> None:
    """Each step is 1/40 of the space between bf16 numbers: rounded to the nearest, all are lost."""
    weight = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
    own = adam([weight], states)
    own.param_groups[0].update(lr=1e-4, weight_decay=0.0)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        own.step()
    assert weight.detach().float().mean().item() == pytest.approx(1 - 20e-4, abs=2e-4)
    nearest = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    other = torch.optim.AdamW([nearest], lr=1e-4)
    for _ in range(20):
        nearest.grad = torch.ones_like(nearest)
        other.step()
    assert torch.equal(nearest.detach(), torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_the_second_moment_follows_gradients_that_grow(states: str) -> None:
    """It moves by a thousandth a step, which rounding to the nearest would swallow."""
    weight = nn.Parameter(torch.zeros(64, 256))
    own = adam([weight], states)
    exact = torch_adam([nn.Parameter(torch.zeros(64, 256))])
    random = torch.Generator().manual_seed(5)
    for step in range(400):
        gradient = torch.randn(64, 256, generator=random) * (1 if step < 200 else 3)
        weight.grad = gradient
        exact.param_groups[0]["params"][0].grad = gradient
        own.step()
        exact.step()
    # what a step is divided by, seen through two fresh gradients of zero and one
    (state,) = exact.state.values()
    expected = state["exp_avg_sq"].mean().item()
    assert _second_moment(own, weight).mean().item() == pytest.approx(expected, rel=0.01)


def _second_moment(optimizer: LowBitAdamW, weight: nn.Parameter) -> torch.Tensor:
    state = optimizer.state[weight]
    if "exp_avg_sq_scale" not in state:
        return state["exp_avg_sq"].float()
    scales = state["exp_avg_sq_scale"]
    codes = state["exp_avg_sq"].reshape(*scales.shape, -1).float()
    return (codes / 255) ** 4 * scales[..., None]


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_a_flag_on_the_device_leaves_a_step_out(states: str) -> None:
    parameters = [nn.Parameter(one.detach().bfloat16()) for one in weights()]
    own = adam(parameters, states)
    for _ in range(2):
        for one in parameters:
            one.grad = torch.ones_like(one)
        own.step()
    before = [one.detach().clone() for one in parameters]
    held = [{name: value.clone() for name, value in own.state[one].items()} for one in parameters]
    own.found_inf = torch.ones(())
    for one in parameters:
        one.grad = torch.full_like(one, float("nan"))
    own.step()
    for one, old, state in zip(parameters, before, held, strict=True):
        assert torch.equal(one.detach(), old)
        for name, value in state.items():
            assert torch.equal(own.state[one][name], value), name
    assert skips_on_device(own, torch.device("cuda"))


def test_gradients_are_scaled_where_they_are_read() -> None:
    scaled, halved = weights(), weights()
    one, other = adam(scaled, "fp32"), adam(halved, "fp32")
    one.gradient_factor = torch.tensor(0.5)
    for left, right in zip(scaled, halved, strict=True):
        left.grad = torch.linspace(-1, 1, left.numel()).reshape(left.shape)
        right.grad = left.grad / 2
    one.step()
    other.step()
    for left, right in zip(scaled, halved, strict=True):
        assert torch.equal(left, right)


def test_the_same_seed_rounds_alike_and_another_does_not() -> None:
    def run(seed: int) -> torch.Tensor:
        weight = nn.Parameter(weights()[0].detach().bfloat16())
        own = adam([weight], "bf16", seed)
        weight.grad = torch.ones_like(weight)
        own.step()
        return weight.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_states_take_the_bytes_they_promise() -> None:
    def held(states: str) -> int:
        weight = nn.Parameter(torch.zeros(256, 4096))
        own = adam([weight], states)
        weight.grad = torch.ones_like(weight)
        own.step()
        return sum(value.nbytes for name, value in own.state[weight].items() if name != "step")

    count = 256 * 4096
    assert [held(states) for states in ("fp32", "bf16", "8bit")] == [
        8 * count,
        4 * count,
        2 * count + 2 * count * 4 // 256,
    ]


def recipe_of(**keys: Any) -> Recipe:
    sizes = {"model_type": "llama", "hidden_size": 64}
    return Recipe(model_config=sizes, tokenizer_config="bytes", learning_rate=RATE, **keys)


@pytest.mark.parametrize(
    ("keys", "dtype", "expected"),
    [
        ({}, torch.float32, False),
        ({}, torch.bfloat16, True),
        ({"optimizer_state_dtype": "8bit"}, torch.float32, True),
        ({"optimizer_state_dtype": "bf16", "optimizer": "adamw_torch"}, torch.float32, True),
        ({"optimizer": "sgd"}, torch.bfloat16, False),
    ],
)
def test_it_is_chosen_where_bits_are_missing(
    keys: dict[str, Any], dtype: torch.dtype, expected: bool
) -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    built = build_optimizer([("w", weight)], recipe_of(**keys))
    assert isinstance(built, LowBitAdamW) == expected


def test_arguments_of_torchs_adamw_are_refused() -> None:
    recipe = recipe_of(optimizer_state_dtype="bf16", optim_args={"amsgrad": True})
    with pytest.raises(RecipeError, match="takes no amsgrad"):
        build_optimizer([("w", nn.Parameter(torch.zeros(2)))], recipe)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [update_plain, update_in_blocks])
def test_the_update_is_one_graph_that_computes_the_same(kernel) -> None:
    """Compiled as on CUDA: states bit for bit, fp32 weights to their last bit."""

    def arguments() -> tuple[Any, ...]:
        random = torch.Generator().manual_seed(2)
        weight = torch.randn(16, 64, generator=random)
        gradient = torch.randn(16, 64, generator=random)
        moments = [torch.zeros(16, 64, dtype=torch.bfloat16) for _ in range(2)]
        if kernel is update_in_blocks:
            codes = (torch.zeros(16, 64, dtype=one) for one in (torch.int8, torch.uint8))
            moments = [one for code in codes for one in (code, torch.zeros(16, 4))]
        places = places_of(weight, "w", 1)
        numbers = torch.tensor([RATE, 33.0, 1e-3, 0.0, 0.5])
        key = torch.tensor(12345, dtype=torch.int32)
        rates = Rates(0.9, 0.999, 1e-8)
        return weight, gradient, moments, places.rows, places.columns, numbers, key, rates

    eager, compiled = arguments(), arguments()
    kernel(*eager)
    torch.compile(kernel, fullgraph=True, dynamic=False, options=ONE_PASS)(*compiled)
    torch.testing.assert_close(compiled[0], eager[0], rtol=1e-6, atol=1e-7)
    for one, other in zip(compiled[2], eager[2], strict=True):
        assert torch.equal(one, other)
