"""The optimizer in the backward pass: a parameter is stepped when its gradient is whole.

The gradient is freed at once, so that gradients of one block exist at a time. Every parameter has
an optimizer of its own over the states of the run's one, which checkpoints go on reading.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ndtrain.model.regions import local_tensor

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds the recipe's optimizer over parameter groups."""


class EarlySteps:
    """Steps parameters out of the backward pass, through hooks.

    Args:
        optimizer: over all parameters; keeps the states, and steps what is left.
        make: builds an optimizer of the same kind over other groups.
        late: parameters whose gradients are not whole before the backward pass ends.
    """

    def __init__(
        self, optimizer: Optimizer, make: MakeOptimizer, late: Collection[nn.Parameter] = ()
    ) -> None:
        self.norms: dict[nn.Parameter, torch.Tensor] = {}
        """Norm of this rank's part of each gradient that was used up in this step."""
        left_out = set(late)
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter in left_out:
                    continue
                own = make([_group_of_one(group, number)])
                own.state = optimizer.state
                parameter.register_post_accumulate_grad_hook(partial(self._step, own, group))

    def begin(self) -> None:
        """Forget the last step's norms."""
        self.norms.clear()

    def is_finite(self) -> bool:
        """Whether all gradients that were used up on this rank were finite; waits for them."""
        return all(bool(torch.isfinite(norm)) for norm in self.norms.values())

    @torch.no_grad()
    def _step(self, own: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad)
        if gradient.numel():
            # as for all gradients together, so that the norm of the step is the same
            (norm,) = torch._foreach_norm([gradient], 2, dtype=torch.float32)
            self.norms[parameter] = norm
            if group.get("fused") and gradient.device.type == "cuda":
                own.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            elif not torch.isfinite(norm):
                parameter.grad = None
                return
        own.param_groups[0]["lr"] = group["lr"]
        own.step()
        parameter.grad = None


def _group_of_one(group: dict[str, Any], number: int) -> dict[str, Any]:
    """The group with one of its parameters."""
    alone = {**group, "params": [group["params"][number]]}
    if "names" in group:
        alone["names"] = [group["names"][number]]
    return alone
