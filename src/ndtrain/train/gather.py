"""Collects sharded tensors on the main rank, one after the other, whatever the mesh.

Only the main rank ever holds a whole tensor. Where each part belongs follows from the mesh alone
(`ndtrain.model.regions`), so sizes need not divide and splits may be interleaved.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ndtrain.model.regions import local_tensor
from ndtrain.model.whole import places_of, put_region


class Gather:
    """Whole tensors in a fixed order that all ranks share.

    Args:
        model: whose parameters and persistent buffers are wanted.
        trained_only: leave out what is frozen.
    """

    def __init__(self, model: nn.Module, *, trained_only: bool = False) -> None:
        self._tensors = {
            name: tensor
            for name, tensor in _stored_tensors(model).items()
            if tensor.requires_grad or not trained_only
        }
        self._left = list(self._tensors)

    @property
    def names(self) -> list[str]:
        """All names, in order; tied parameters once."""
        return list(self._tensors)

    def take(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, on the main rank; those before it are gathered and dropped.

        The other ranks must be in `finish`.
        """
        while True:
            following = self._left.pop(0)
            whole = gather_whole(self._tensors[following])
            if following == name:
                assert whole is not None
                return whole

    def finish(self) -> None:
        """Take part in all gathering that is left, so that no rank waits forever."""
        while self._left:
            gather_whole(self._tensors[self._left.pop(0)])


@torch.no_grad()
def gather_whole(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole of a tensor on the main rank, None on the others; every rank calls it."""
    own = local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return own if _is_main() else None
    places = places_of(tensor)
    longest = max(prod(region.shape) for _, region in places)
    sent = own.new_zeros(longest)
    sent[: own.numel()] = own.reshape(-1)
    received: list[torch.Tensor] | None = None
    if _is_main():
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.gather(sent, received, dst=0)
    if received is None:
        return None
    whole = own.new_empty(tensor.shape)
    for rank, region in places:
        if not region.is_empty:
            part = received[rank][: prod(region.shape)].view(region.shape)
            put_region(whole, part, region)
    return whole


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name in the wrapped model."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors
