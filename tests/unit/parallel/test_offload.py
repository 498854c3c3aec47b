"""Inputs of recomputed blocks leave and come back; nothing else does."""

import shutil
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ndtrain.parallel.offload import HostParking, apply_offload
from ndtrain.parallel.recompute import apply_compile, apply_recompute

DEPTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return hidden + (self.linear(hidden) * angles).tanh()


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(DEPTH))


def run(stack: nn.ModuleList) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the input, whose gradient is wanted."""
    hidden = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
    angles = torch.linspace(0, 1, 8)
    states = hidden * 1.0
    for block in stack:
        states = block(states, angles)
    return states.square().sum(), hidden


def compiled(stack: nn.ModuleList) -> None:
    apply_compile(stack, budget=0.0)


def recomputed(stack: nn.ModuleList) -> None:
    apply_recompute(stack, "full")


WAYS = [
    recomputed,
    pytest.param(
        compiled,
        marks=pytest.mark.skipif(
            shutil.which("g++") is None, reason="compiling for the CPU needs g++"
        ),
    ),
]


@pytest.mark.parametrize("recompute", WAYS)
def test_gradients_are_those_without_it_also_when_taken_twice(
    recompute: Callable[[nn.ModuleList], None],
) -> None:
    plain, moved = blocks(), blocks()
    for stack in (plain, moved):
        recompute(stack)
    apply_offload(moved, torch.device("cpu"))
    for _ in range(2):
        expected, start = run(plain)
        loss, own_start = run(moved)
        expected.backward()
        loss.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(own_start.grad, start.grad)
    for one, other in zip(moved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def remember_inputs(stack: nn.ModuleList) -> list[weakref.ref[torch.UntypedStorage]]:
    """Weakly, the memory of each block's input, in the order in which blocks run."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    for block in stack:
        block.forward = remembering(block.forward, seen)
    return seen


def remembering(
    forward: Callable[..., torch.Tensor], seen: list[weakref.ref[torch.UntypedStorage]]
) -> Callable[..., torch.Tensor]:
    def remember(hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(hidden.untyped_storage()))
        return forward(hidden, angles)

    return remember


@pytest.mark.parametrize("recompute", WAYS)
def test_the_inputs_are_gone_between_the_passes(
    recompute: Callable[[nn.ModuleList], None],
) -> None:
    kept, moved = blocks(), blocks()
    for stack in (kept, moved):
        recompute(stack)
    apply_offload(moved, torch.device("cpu"))
    seen = [remember_inputs(stack) for stack in (kept, moved)]
    losses = [run(stack)[0] for stack in (kept, moved)]
    assert [storage() is not None for storage in seen[0]] == [True] * DEPTH
    assert [storage() is not None for storage in seen[1]] == [False] * DEPTH
    del losses


def test_what_is_not_the_input_stays_where_it_is() -> None:
    parking = HostParking(torch.device("cpu"))
    hidden, angles = torch.ones(3), torch.ones(3)
    assert parking.pack(hidden.data_ptr(), angles) is angles
    assert parking.unpack(angles) is angles
    # a compiled block keeps a tensor of its own over the input's memory
    assert parking.pack(hidden.data_ptr(), hidden.detach()) is not hidden


def test_the_one_before_is_fetched_ahead_and_a_dropped_graph_parks_nothing() -> None:
    parking = HostParking(torch.device("cpu"))
    tensors = [torch.full((2,), float(n)) for n in range(3)]
    parked = [parking.pack(tensor.data_ptr(), tensor) for tensor in tensors]
    assert parking.unpack(parked[2]).tolist() == [2.0, 2.0]
    assert [one.fetched is not None for one in parked] == [False, True, False]
    assert parking.unpack(parked[1]).tolist() == [1.0, 1.0]
    gone = weakref.ref(parked[0])
    del parked
    assert gone() is None
