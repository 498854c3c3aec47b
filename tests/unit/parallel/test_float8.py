"""8-bit matmuls: what tensor cores would compute, near to exact, and alike on every mesh."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ndtrain.errors import MeshError
from ndtrain.parallel.float8 import (
    GRADIENTS,
    VALUES,
    Float8Linear,
    apply_float8,
    float8_linear,
    multiply_on_cores,
    multiply_plainly,
    product,
)

TOKENS, FEATURES, OUTPUTS = 48, 64, 96


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values whose rows differ a hundredfold in size."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, shape[0])[:, None]
    return (torch.randn(shape, generator=random) * sizes).to(dtype)


def apart(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("by_row", [False, True])
def test_all_three_products_are_near_to_exact_ones(by_row: bool) -> None:
    """e4m3 rounds to 1/16 at most, e5m2 to 1/8: uniformly, some 2 and 4 % in the mean."""
    inputs, weight = drawn(TOKENS, FEATURES), drawn(OUTPUTS, FEATURES, seed=1)
    gradient = drawn(TOKENS, OUTPUTS, seed=2)
    bias = drawn(1, OUTPUTS, seed=3)[0]
    eight = [one.clone().requires_grad_() for one in (inputs, weight, bias)]
    outputs = float8_linear(*eight, by_row=by_row)
    outputs.backward(gradient)
    exact = [one.float().requires_grad_() for one in (inputs, weight, bias)]
    wanted = functional.linear(*exact)
    wanted.backward(gradient.float())
    assert outputs.dtype == torch.bfloat16
    assert apart(outputs, wanted.detach()) < 0.045
    for one, other in zip(eight[:2], exact[:2], strict=True):
        assert one.grad.dtype == torch.bfloat16
        assert apart(one.grad, other.grad) < (0.045 if by_row else 0.08)
    assert apart(eight[2].grad, exact[2].grad) < 0.01


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("left_dtype", [VALUES, GRADIENTS])
def test_the_plain_product_is_the_one_of_the_cores(by_row: bool, left_dtype: torch.dtype) -> None:
    """torch's own operation, which on CPU adds up in another order, and rounds once to bf16."""
    left = drawn(32, FEATURES, dtype=torch.float32).to(left_dtype)
    right = drawn(48, FEATURES, seed=1, dtype=torch.float32).to(VALUES)
    back = torch.tensor(0.25), torch.tensor(0.5)
    if by_row:
        back = torch.logspace(-2, 2, 32)[:, None], torch.logspace(-2, 2, 48)[None]
    plain = multiply_plainly(left, right, back, torch.bfloat16)
    cores = multiply_on_cores(left, right, back, torch.bfloat16, fast=False)
    torch.testing.assert_close(cores, plain, rtol=2**-7, atol=1e-4)


def test_what_eight_bits_hold_is_multiplied_exactly() -> None:
    left = torch.tensor([[1.0, -2.0, 0.5, 448.0] * 4])
    right = torch.eye(16) * torch.tensor([1.0, 2.0, 4.0, 0.25] * 4)
    wanted = left @ right.T
    for by_row in (False, True):
        found = product(left, right, left_dtype=VALUES, by_row=by_row)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("by_row", [False, True])
def test_scales_do_not_move_what_a_part_rounds_to(by_row: bool) -> None:
    """Rows of another rank change the scale by a power of two, and so nothing else.

    No value is 28,672 times smaller than another: that is how far the format reaches in full.
    """
    rows, weight = (
        torch.where(one >= 0, one + 1e-2, one - 1e-2)
        for one in (
            drawn(TOKENS, FEATURES, dtype=torch.float32),
            drawn(OUTPUTS, FEATURES, seed=1, dtype=torch.float32),
        )
    )
    multiply = partial(product, left_dtype=VALUES, by_row=by_row)
    whole = multiply(rows, weight)
    assert torch.equal(torch.cat([multiply(part, weight) for part in rows.split(16)]), whole)
    parts = [multiply(rows, part) for part in weight.split(32)]
    assert torch.equal(torch.cat(parts, 1), whole)
    halves = zip(rows.split(32, 1), weight.split(32, 1), strict=True)
    summed = sum(multiply(*half) for half in halves)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-4)


def test_tokens_that_are_no_multiple_of_16_are_padded_for_the_weights_gradient() -> None:
    weight = drawn(OUTPUTS, FEATURES).requires_grad_()
    inputs = drawn(50, FEATURES, seed=1)
    float8_linear(inputs, weight, by_row=True).sum().backward()
    padded = weight.detach().clone().requires_grad_()
    more = torch.cat([inputs, torch.zeros(14, FEATURES, dtype=inputs.dtype)])
    float8_linear(more, padded, by_row=True)[:50].sum().backward()
    assert torch.equal(weight.grad, padded.grad)


@pytest.mark.parametrize("by_row", [False, True])
def test_zeros_and_broken_numbers_stay_what_they_are(by_row: bool) -> None:
    nothing = torch.zeros(16, 16)
    weight = drawn(16, 16, dtype=torch.float32)
    assert torch.equal(product(nothing, weight, left_dtype=VALUES, by_row=by_row), nothing)
    for number in (float("nan"), float("inf")):
        broken = torch.ones(16, 16)
        broken[3, 4] = number
        assert not product(broken, weight, left_dtype=VALUES, by_row=by_row)[3].isfinite().any()


class Block(nn.Module):
    """Two linears that can, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, OUTPUTS)
        self.down = nn.Linear(OUTPUTS, FEATURES, bias=False)
        self.odd = nn.Linear(FEATURES, 9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.odd(self.down(self.up(inputs).relu()))


def test_linears_of_blocks_are_replaced_and_keep_their_parameters() -> None:
    block = Block()
    before = dict(block.named_parameters())
    apply_float8([block], "tensorwise")
    assert dict(block.named_parameters()) == before
    kinds = [type(module) for module in (block.up, block.down, block.odd)]
    assert kinds == [Float8Linear, Float8Linear, nn.Linear]


def test_blocks_of_odd_sizes_are_refused() -> None:
    with pytest.raises(MeshError, match="multiples of 16"):
        apply_float8([nn.Sequential(nn.Linear(9, 9))], "rowwise")


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_a_block_is_traced_as_one_graph_that_computes_the_same(kind: str) -> None:
    block = Block().bfloat16()
    apply_float8([block], kind)
    inputs = drawn(TOKENS, FEATURES)
    plain = block(inputs)
    plain.sum().backward()
    gradients = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    traced = torch.compile(block, fullgraph=True, backend="aot_eager")(inputs)
    traced.sum().backward()
    assert torch.equal(traced, plain)
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
