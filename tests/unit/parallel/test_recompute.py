"""Blocks that recompute give the same gradients, and leave the compiler's settings alone."""

import re
import shutil

import pytest
import torch
import torch._functorch.config as partitioner
from torch import nn
from torch._inductor.utils import run_and_get_code

from ndtrain.parallel.recompute import apply_compile, apply_recompute


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.up(x)
        heads = q.view(2, 4, 4, 8).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + self.down(mixed.transpose(1, 2).reshape(2, 4, 32))


def gradients(blocks: nn.ModuleList) -> list[torch.Tensor]:
    hidden = torch.linspace(-1, 1, 64).reshape(2, 4, 8).requires_grad_()
    out = hidden
    for block in blocks:
        out = block(out)
    torch.autograd.backward(out.square().sum())
    return [hidden.grad, *(parameter.grad for parameter in blocks.parameters())]


def build() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block(), Block()])


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_recomputed_gradients_are_the_kept_ones(policy: str) -> None:
    blocks = build()
    apply_recompute(blocks, policy)
    for found, expected in zip(gradients(blocks), gradients(build()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_compiled_gradients_are_the_eager_ones() -> None:
    blocks, before = build(), partitioner.activation_memory_budget
    apply_compile(blocks, budget=0.5)
    for found, expected in zip(gradients(blocks), gradients(build()), strict=True):
        torch.testing.assert_close(found, expected)
    assert partitioner.activation_memory_budget == before


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
@pytest.mark.parametrize(("budget", "again"), [(1.0, 0), (0.0, 1)])
def test_a_compiled_block_that_keeps_its_input_only_does_not_repeat_its_last_product(
    budget: float, again: int
) -> None:
    blocks = build()
    apply_compile(blocks, budget)

    _, (forward, backward) = run_and_get_code(gradients, blocks)
    products = [
        len(re.findall(r"extern_kernels\.(?:add)?mm\(", code)) for code in (forward, backward)
    ]
    assert products == [2, 4 + again]


class NeedsPlainSizes(nn.Module):
    """Fails to compile where a size is a symbol: the argument takes a plain bool only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = x.expand(2, *x.shape[1:]), x[:, :1]
        several = x.shape[1] != key.shape[1]
        attend = nn.functional.scaled_dot_product_attention
        return attend(
            query, key.expand(2, -1, -1, -1), key.expand(2, -1, -1, -1), enable_gqa=several
        )


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_sizes_of_an_earlier_model_are_no_hint_that_those_of_the_next_vary() -> None:
    for heads in (4, 2, 6):
        block = NeedsPlainSizes()
        apply_compile([block], budget=0.9)
        assert block(torch.ones(1, heads, 3, 8)).shape == (2, heads, 3, 8)
