"""The optimizer in the backward pass: parameters are stepped when their gradients are whole.

The gradients are freed at once, so that those of one block exist at a time. A block is stepped when
its last gradient is there, for a step of a few parameters costs the host as much as one of a block.
Every block has an optimizer of its own over the states of the run's one, which checkpoints go on
reading.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ndtrain.parallel.clip import local_norms

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds the recipe's optimizer over parameter groups."""


class EarlySteps:
    """Steps parameters out of the backward pass, through hooks.

    Args:
        optimizer: over all parameters; keeps the states, and steps what is left: of blocks in
            which a parameter got no gradient too.
        make: builds an optimizer of the same kind over other groups.
        together: parameters of each block; any other is stepped alone.
        late: parameters whose gradients are not whole before the backward pass ends.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make: MakeOptimizer,
        together: Iterable[Iterable[nn.Parameter]] = (),
        late: Collection[nn.Parameter] = (),
    ) -> None:
        self.norms: dict[nn.Parameter, torch.Tensor] = {}
        """Norm of this rank's part of each gradient that was used up in this step."""
        waiting = {p for group in optimizer.param_groups for p in group["params"]} - set(late)
        self._units: list[_Unit] = []
        for block in together:
            if own := waiting.intersection(block):
                waiting -= own
                self._units.append(_Unit(own, optimizer, make, self.norms))
        self._units += [_Unit({alone}, optimizer, make, self.norms) for alone in waiting]

    def begin(self) -> None:
        """Forget the last step's norms, and the gradients that it left to the run's optimizer."""
        self.norms.clear()
        for unit in self._units:
            unit.arrived.clear()

    def is_finite(self) -> bool:
        """Whether all gradients that were used up on this rank were finite; waits for them."""
        return all(bool(torch.isfinite(norm)) for norm in self.norms.values())


class _Unit:
    """Parameters that are stepped together.

    Args:
        members: of the unit.
        optimizer: over all parameters.
        make: builds an optimizer of the same kind.
        norms: filled by parameter.
    """

    def __init__(
        self,
        members: Collection[nn.Parameter],
        optimizer: Optimizer,
        make: MakeOptimizer,
        norms: dict[nn.Parameter, torch.Tensor],
    ) -> None:
        self.arrived: list[nn.Parameter] = []
        """Parameters whose gradients of this step are there."""
        self._size = len(members)
        self._norms = norms
        parts = ((group, _part_of(group, members)) for group in optimizer.param_groups)
        # a part's learning rate is set on the group that it comes from
        self._groups, own = zip(*((g, part) for g, part in parts if part["params"]), strict=True)
        self._own = make(list(own))
        self._own.state = optimizer.state
        for parameter in members:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        self.arrived.append(parameter)
        if len(self.arrived) == self._size:
            self._step()

    def _step(self) -> None:
        if norms := local_norms(self.arrived):
            self._norms |= norms
            self._leave_out(norms)
        for group, own in zip(self._groups, self._own.param_groups, strict=True):
            own["lr"] = group["lr"]
        self._own.step()
        for parameter in self.arrived:
            parameter.grad = None

    def _leave_out(self, norms: dict[nn.Parameter, torch.Tensor]) -> None:
        """Keep what is not finite from the weights."""
        all_norms = torch.stack(list(norms.values()))
        if self._groups[0].get("fused") and all_norms.device.type == "cuda":
            finite = torch.isfinite(all_norms).all()
            self._own.found_inf = (~finite).float()  # type: ignore[attr-defined]
            return
        for parameter, finite in zip(norms, torch.isfinite(all_norms).tolist(), strict=True):
            if not finite:
                parameter.grad = None


def _part_of(group: dict[str, Any], members: Collection[nn.Parameter]) -> dict[str, Any]:
    """The group with those of its parameters that are among the members."""
    places = [number for number, p in enumerate(group["params"]) if p in members]
    part = {**group, "params": [group["params"][number] for number in places]}
    if "names" in group:
        part["names"] = [group["names"][number] for number in places]
    return part
