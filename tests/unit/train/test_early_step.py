"""Blocks that are stepped in the backward pass: when, with which rates, and without what."""

from typing import Any

import torch
from torch import nn

from ndtrain.train.early_step import EarlySteps

RATE = 0.1


class Net(nn.Module):
    """Two blocks and a head; the second block's gate is passed by where `gated` is false."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(4, 4), "gate": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor, *, gated: bool = True) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleDict)
            made = block["linear"](rows)
            rows = made * block["gate"](rows).sigmoid() if gated or number == 0 else made
        total: torch.Tensor = self.head(rows).square().sum()
        return total


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Biases in a group of their own, as in a run."""
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" in name], "lr": RATE, "weight_decay": 0.0},
        {"params": [p for name, p in named if "bias" not in name], "lr": RATE, "weight_decay": 0.1},
    ]


def trained(
    *, early: bool, gated: bool = True, spoilt: int | None = None
) -> tuple[Net, EarlySteps | None]:
    """The net after four steps whose rate falls; the gate's gradient of one step is infinite."""
    net = Net()
    optimizer = torch.optim.AdamW(groups_of(net))
    blocks = [list(block.parameters()) for block in net.blocks]
    steps = None
    if early:
        steps = EarlySteps(optimizer, torch.optim.AdamW, blocks, list(net.head.parameters()))
    random = torch.Generator().manual_seed(1)
    gate = blocks[1][2]
    for number in range(4):
        if steps is not None:
            steps.begin()
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - number / 8)
        loss = net(torch.randn(8, 4, generator=random), gated=gated or number != 1)
        if number == spoilt:
            handle = gate.register_hook(lambda gradient: gradient * torch.inf)
        loss.backward()
        if number == spoilt:
            handle.remove()
            if steps is None:
                gate.grad = None
            else:
                assert not steps.is_finite()
        optimizer.step()
        optimizer.zero_grad()
    return net, steps


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, msg=name)


def test_blocks_are_stepped_as_one_optimizer_would_after_the_pass() -> None:
    late, _ = trained(early=False)
    early, steps = trained(early=True)
    assert steps is not None
    assert_alike(early, late)
    # the head was left to the run's optimizer
    assert set(steps.norms) == {p for block in early.blocks for p in block.parameters()}


def test_a_block_without_one_of_its_gradients_is_stepped_after_the_pass() -> None:
    late, _ = trained(early=False, gated=False)
    early, _ = trained(early=True, gated=False)
    assert_alike(early, late)


def test_what_is_not_finite_does_not_reach_the_weights() -> None:
    late, _ = trained(early=False, spoilt=2)
    early, _ = trained(early=True, spoilt=2)
    assert all(bool(torch.isfinite(p).all()) for p in early.parameters())
    assert_alike(early, late)
